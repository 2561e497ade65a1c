"""Arrays in tiles, as the copy engine of GPUs of compute capability 9.0 reads them. Describing one takes the host ten
microseconds, so those of weights are kept."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_kept = WeakTensorKeyDictionary()


def tiles_of(array: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the tiles of a contiguous array, of which all dimensions but the last one are rows."""
    width = array.shape[-1]
    return TensorDescriptor(
        array, [array.numel() // width, width], [width, 1], [rows, columns], _layout(array.dtype, rows, columns)
    )


def tiles_of_weight(weight: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return `tiles_of` an array that will be asked for again; they are forgotten when it is gone, or has other memory."""
    kept = _kept.setdefault(weight, {})
    found = kept.get((rows, columns))
    if found is None or found.base.data_ptr() != weight.data_ptr():
        found = kept[rows, columns] = tiles_of(weight.detach(), rows, columns)  # of its memory: the tensor itself may go
    return found


@functools.cache
def _layout(dtype: torch.dtype, rows: int, columns: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
