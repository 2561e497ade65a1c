"""Memory that was freed, given back to the system.

glibc keeps what threads free, in pieces between what they still hold: hundreds of MB after a few long prompts at a time.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any


def trim() -> None:
    """Give free memory back where the C library can."""
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
