"""The lm-evaluation-harness: is it here, and is it of a version that this code was written for?"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Iterator

from TIDE.extras import install_command

OLDEST, BEFORE = (0, 4, 13), (0, 5)  # versions: from, and below
INSTALL = install_command("eval")


def check_harness() -> None:
    """Raise if the harness is not installed, or has another version."""
    wanted = f"lm_eval {_dotted(OLDEST)} or later, below {_dotted(BEFORE)}"
    try:
        found = importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"evaluation needs {wanted}, which is not installed. Install it with: {INSTALL}") from None
    if not OLDEST <= _numbers(found) < BEFORE:
        raise ImportError(f"evaluation needs {wanted}, found {found}. Install another one with: {INSTALL}")


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of the harness: those of TIDE show what takes time."""
    from lm_eval.api import task

    held = task.tqdm
    task.tqdm = functools.partial(held, disable=True)
    try:
        yield
    finally:
        task.tqdm = held


def _numbers(version: str) -> tuple[int, ...]:
    parts = []
    for part in version.split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
