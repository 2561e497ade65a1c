"""The metadata at the beginning of a GGUF file, read without its arrays.

A tokenizer's arrays hold hundreds of thousands of strings; here their length is enough, and the file is read no further than
its reader asks:

    "GGUF"  version  tensors  entries  |  key  type  value  |  key  type  value  |  …          little endian
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from TIDE.hub import GGUF

STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type -> of struct
VERSIONS = (2, 3)  # version 1 counts in 32 bits, and nobody writes it any more


class Array(NamedTuple):
    """An array, by its length."""

    length: int


def entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the metadata, arrays as `Array`; raise ValueError where a file is not GGUF."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            reader = _Reader(data)
            if data[: len(GGUF)] != GGUF or reader.number("I") not in VERSIONS:
                raise ValueError(f"{path} is no GGUF file of version {' or '.join(map(str, VERSIONS))}")
            reader.number("Q")  # tensors
            for _ in range(reader.number("Q")):
                yield reader.string().decode("utf-8", "replace"), reader.value(reader.number("I"))
        except (struct.error, KeyError) as problem:
            raise ValueError(f"the metadata of {path} are damaged") from problem


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.place = data, len(GGUF)

    def number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.place)
        self.place += struct.calcsize(f"<{kind}")
        return value

    def string(self) -> bytes:
        length = self.number("Q")
        self.place += length
        return self.data[self.place - length : self.place]

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string().decode("utf-8", "replace")
        return self._skipped() if kind == ARRAY else self.number(NUMBERS[kind])

    def _skipped(self) -> Array:
        kind, length = self.number("I"), self.number("Q")
        if kind in NUMBERS:
            self.place += length * struct.calcsize(f"<{NUMBERS[kind]}")
        elif kind == STRING:
            for _ in range(length):
                size = self.number("Q")  # moves `place`
                self.place += size
        else:
            for _ in range(length):
                self.value(kind)
        return Array(length)
