"""Arrays in tiles, as the copy engine of GPUs of compute capability 9.0 reads them. Describing one takes the host ten
microseconds, so what does not depend on its place is kept."""

from __future__ import annotations

import copy
import functools

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Names of Triton 3.6, and later ones.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def tiles_of(array: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the tiles of a contiguous array, of which all dimensions but the last one are rows."""
    assert array.data_ptr() % 16 == 0, "the copy engine reads from multiples of 16 bytes"
    width = array.shape[-1]
    own = copy.copy(_tiles(array.numel() // width, width, array.dtype, rows, columns))
    own.base = array
    return own


@functools.lru_cache(4096)
def _tiles(count: int, width: int, dtype: torch.dtype, rows: int, columns: int) -> TensorDescriptor:
    """Return the tiles of an array without the array, whose memory is not to be held."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16 if dtype == torch.bfloat16 else gl.float16)
    return TensorDescriptor(torch.empty(0, dtype=dtype), [count, width], [width, 1], [rows, columns], layout)
