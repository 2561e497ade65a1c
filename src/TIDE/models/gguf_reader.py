"""Reading the metadata of a GGUF file once.

transformers opens a file for the config, the tokenizer and the weights. Each time gguf makes an array of every string and every
number of the vocabulary, and for every module a table of all tensor names: most of the time of a load. Inside `parsed_once()` a
file has one reader, which splits the vocabulary in one walk, and there is one table. Values and weights are the same.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType

ARRAY_HEADER = 12  # bytes: the type of the elements, and their number

_lock = threading.RLock()  # the names of a package are replaced for all threads


class Reader(GGUFReader):
    """A reader whose arrays have views of their elements instead of memory maps, which take microseconds each."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + ARRAY_HEADER
        if kind == GGUFValueType.STRING:
            parts, end = self._strings(start, count)
        elif number := self.gguf_scalar_to_np.get(kind):
            values = np.asarray(self._get(start, number, count))
            parts, end = list(values.reshape(-1, 1)), start + values.nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return end - orig_offs, parts, list(range(count)), [GGUFValueType.ARRAY, kind][: 1 + count]

    def _strings(self, start: int, count: int) -> tuple[list[Any], int]:
        data, parts = self.data.data, []
        for _ in range(count):
            (length,) = struct.unpack_from("=Q", data, start)
            parts.append(data[start + 8 : start + 8 + length])
            start += 8 + length
        return parts, start


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Let all calls inside share the reader of a file and gguf's tables of tensor names."""
    reader = functools.cache(Reader)
    shared = {
        "GGUFReader": lambda path: reader(os.path.realpath(path)),
        "get_tensor_name_map": functools.cache(gguf.get_tensor_name_map),
    }
    with _lock:
        before = {name: getattr(gguf, name) for name in shared}
        try:
            vars(gguf).update(shared)
            yield
        finally:
            vars(gguf).update(before)


def sizes(path: Path) -> tuple[int, int]:
    """Return the bytes of a file, and the number of its weights."""
    try:
        tensors = gguf.GGUFReader(path).tensors
    except (ValueError, IndexError, KeyError, struct.error) as problem:
        raise ValueError(f"{path} is not a GGUF file, or it is damaged ({problem}). Download it again.") from problem
    return path.stat().st_size, sum(tensor.n_elements for tensor in tensors)
