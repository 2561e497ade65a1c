"""Files of figures: checked before any work, drawn without pyplot, so the program's own figures and backend stay untouched."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from TIDE.extras import install_command

SUFFIXES = (".png", ".svg", ".pdf")


def check_target(path: str | Path, suffixes: tuple[str, ...], rule: str) -> None:
    """Raise if a file cannot be written to `path`: better before long work than after it."""
    path = Path(path)
    if path.suffix not in suffixes:
        raise ValueError(f"{rule}, found {path.name!r}.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} to. Make it first.")


def check_figure(path: str | Path) -> None:
    """Raise if a figure cannot be written to `path`."""
    check_matplotlib()
    check_target(path, SUFFIXES, f"a figure ends in {', '.join(SUFFIXES)}")


def check_matplotlib(_: object = None) -> None:
    """Raise if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(f"figures need matplotlib. Install with: {install_command('plots')}")


@contextmanager
def drawn(
    path: str | Path, width: float = 8, height: float = 4.5, layout: Any = "constrained", **subplots: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes; write it to `path` after the block. The suffix selects the format."""
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout=layout)
    yield figure, figure.subplots(**subplots)
    figure.savefig(path, dpi=150)
