"""Keyed noise on a GPU, in Triton: the bits of `reference/noise.py`, which defines it.

The hash is in uint32, where sums and products wrap as they do there under a mask; Triton's debug mode is told not to mind.
Polynomials stay below 2^31, and saying so makes each of their products one of 32 by 32 bits. Nothing is rounded but the
conversions to fp32.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.reference import noise as own
from TIDE.kernels.triton.launch import begin, kernel

WORD, UNIT = tl.constexpr(own.WORD), tl.constexpr(own.UNIT)
MIX_0, MIX_1 = map(tl.constexpr, own.MIX)
APART_0, APART_1, APART_2, APART_3 = map(tl.constexpr, own.APART)
LOG_0, LOG_1, LOG_2, LOG_3, LOG_4, LOG_5, LOG_6 = map(tl.constexpr, own.LOG2)
HALF_0, HALF_1, HALF_2, HALF_3, HALF_4, HALF_5 = map(tl.constexpr, own.HALF)
LN2, LNLN2 = tl.constexpr(own.LN2), tl.constexpr(own.LNLN2)
AT_ONCE = 1024  # triples of one program


@triton.jit
def keys(low, high, position):
    """Return two words for the words of a seed and a position; all are uint32."""
    first = _mix(low ^ _mix(tl.add(high, APART_0, sanitize_overflow=False)))
    second = _mix(high ^ _mix(tl.add(low, APART_1, sanitize_overflow=False)))
    moved = tl.mul(position, APART_2, sanitize_overflow=False)
    beside = _mix(tl.add(position, APART_3, sanitize_overflow=False))
    return _mix(tl.add(first, moved, sanitize_overflow=False)), _mix(second ^ beside)


@triton.jit
def noise_of(first, second, ids):
    """Return the noise of token ids, uint32, given the two words of their seed and position."""
    words = _mix(tl.add(_mix(ids ^ first), second, sanitize_overflow=False))
    is_upper = words < 0x80000000
    m = tl.where(is_upper, words, WORD - words) + 1
    y = 0x80000000 - _log2(m)
    t = (m >> 9).to(tl.int64)
    p = (t * HALF_5 >> 23) + HALF_4
    p = (t * p.to(tl.int32) >> 23) + HALF_3
    p = (t * p.to(tl.int32) >> 23) + HALF_2
    p = (t * p.to(tl.int32) >> 23) + HALF_1
    p = (t * p.to(tl.int32) >> 23) + HALF_0
    upper = (y * LN2 >> 30) - (t * p.to(tl.int32) >> 27)
    lower = -((_log2(y.to(tl.uint32)) - 0x68000000) * LN2 >> 30) - LNLN2
    return tl.where(is_upper, upper, lower).to(tl.int32).to(tl.float32) * UNIT


@triton.jit
def _mix(x):
    x = tl.mul(x ^ (x >> 16), MIX_0, sanitize_overflow=False)
    x = tl.mul(x ^ (x >> 15), MIX_1, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def _log2(x):
    """Return log2 of uint32 from 1 to 2^31 in units of 2^-26."""
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    f = (bits & 0x7FFFFF).to(tl.int64)
    p = (f * LOG_6 >> 23) + LOG_5
    p = (f * p.to(tl.int32) >> 23) + LOG_4
    p = (f * p.to(tl.int32) >> 23) + LOG_3
    p = (f * p.to(tl.int32) >> 23) + LOG_2
    p = (f * p.to(tl.int32) >> 23) + LOG_1
    p = (f * p.to(tl.int32) >> 23) + LOG_0
    return (((bits >> 23).to(tl.int64) - 127) << 26) + (f * p.to(tl.int32) >> 27)


@kernel
def _noise(seeds, positions, ids, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    seed = tl.load(seeds + at, mask=inside, other=0)
    position = tl.load(positions + at, mask=inside, other=0).to(tl.uint32)
    first, second = keys(seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position)
    tl.store(out + at, noise_of(first, second, tl.load(ids + at, mask=inside, other=0).to(tl.uint32)), mask=inside)


def noise(seeds: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return noise in fp32 for int64 tensors that broadcast; seeds are taken by their 64 bits."""
    seeds, positions, ids = (each.contiguous() for each in torch.broadcast_tensors(seeds, positions, ids))
    out = torch.empty_like(ids, dtype=torch.float32)
    _noise[(triton.cdiv(out.numel(), AT_ONCE),)](seeds, positions, ids, out, out.numel(), AT_ONCE, num_warps=4)
    return out
