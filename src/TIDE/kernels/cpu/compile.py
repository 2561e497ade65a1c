"""Compiled CPU code made ahead, in several processes, the first time on a machine.

numba compiles one function after the other. Where its cache has none yet, other processes compile the parts that take longest
into it, while this one compiles the layer around them:

    this process      layer  ...............  (waits for products and attention)  first pass
    another one       products
    another one       attention, 8-bit products, exits

A process that fails changes nothing but the time: what it should have made is compiled where it is used.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]  # has the package TIDE
PARTS = (
    ("products.float_products",),
    ("attention.attention", "products.int8_products", "exits.compile_exits"),
)
_running: dict[str, subprocess.Popen[bytes]] = {}  # by function


def compile_ahead() -> None:
    """Begin to compile in other processes, unless that was begun before."""
    if _running or not sys.executable:
        return
    for names in PARTS:
        script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from TIDE.kernels.cpu.compile import run; run({names!r})"
        quiet: Any = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        started = subprocess.Popen([sys.executable, "-c", script], **quiet)
        _running.update(dict.fromkeys(names, started))


def wait_for(name: str) -> None:
    """Wait until another process has compiled a function, if one does."""
    if name in _running:
        _running.pop(name).wait()


def run(names: tuple[str, ...]) -> None:
    """Compile functions; in a process of its own."""
    for name in names:
        module, function = name.split(".")
        compile_: Callable[[], Any] = getattr(importlib.import_module(f"TIDE.kernels.cpu.{module}"), function)
        compile_()


def is_cached(function: Any, neighbour: Any) -> bool:
    """Return True if numba's cache has a function that is as its source is now.

    Args:
        neighbour: a compiled function of the same file.
    """
    code = function.__code__
    names = f"*{function.__qualname__}-{code.co_firstlineno}.py*.nbi"
    written = [path.stat().st_mtime for path in Path(neighbour.stats.cache_path).glob(names)]
    return bool(written) and max(written) >= Path(code.co_filename).stat().st_mtime
