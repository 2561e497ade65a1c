"""Circumstances of a measurement: command, date, hardware, versions and commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from TIDE.version import __version__

PACKAGES = ("torch", "transformers", "lm_eval", "numba")


def circumstances() -> dict[str, Any]:
    """Return how, when, where and with what something is measured."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "tide": __version__,
        "commit": commit(Path(__file__).parent.parent),
        "hardware": hardware(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def hardware() -> dict[str, Any]:
    """Return the processors and memory of this machine."""
    gpus = [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(pages / 2**30, 1),
        "gpus": gpus,
    }


def commit(folder: Path) -> str | None:
    """Return the commit that a folder of a git repository was last changed in; None for an installed package."""
    hash_ = _git(folder, "log", "-1", "--format=%H", "--", ".")
    return f"{hash_}{' and changes' if _git(folder, 'status', '--porcelain', '--', '.') else ''}" if hash_ else None


def _git(folder: Path, *words: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
