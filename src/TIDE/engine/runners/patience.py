"""A word to the user where code is compiled, which takes a minute the first time on a machine."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

PATIENCE = 5.0  # seconds before it is said what takes so long


@contextmanager
def saying_what_takes_so_long(what: str) -> Iterator[None]:
    """Say that something is compiled, if that takes long. What comes from numba's cache is not, however busy the machine is."""
    ended = threading.Event()

    def watch(compiled: list[Any]) -> None:
        while not ended.wait(PATIENCE):
            if compiled:
                print(f"compiling {what} (may take a minute, once on a machine)", file=sys.stderr)
                return

    with ExitStack() as stack:
        if "numba" in sys.modules:
            from numba.core.event import install_recorder

            events = stack.enter_context(install_recorder("numba:compile"))
            threading.Thread(target=watch, args=(events.buffer,), daemon=True).start()
            stack.callback(ended.set)
        yield
