"""A word to the user where code is compiled, which takes a minute the first time on a machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 5.0  # seconds before it is said what takes so long


@contextmanager
def saying_what_takes_so_long(what: str) -> Iterator[None]:
    """Say that something is prepared, if that takes long."""
    said = f"preparing {what} (may take a minute the first time on a machine)"
    note = threading.Timer(PATIENCE, print, [said], {"file": sys.stderr})
    note.start()
    try:
        yield
    finally:
        note.cancel()
