"""Products and norms for up to 16 tokens on a GPU, in Triton. What each computes is said by its namesake in `reference.py`.

A program takes a block of a weight's rows past all tokens of a pass, which stand in 16 places. The tile has one shape whatever
the number of tokens, and sums run in one order, so a token's bits do not depend on what stands beside it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import MOST_TOKENS, Norm

EMPTY = torch.zeros(0)
# One binary for any number of tokens, and for any place of a round's small buffers.
counted = triton.jit(
    do_not_specialize=["tokens", "per_row", "drafts"],
    do_not_specialize_on_alignment=["start", "starts", "rows", "best", "token", "score", "scores"],
)


@triton.jit
def _product(x, weight, rows, inside, tokens, width, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """(BN, 16) products of some rows of a weight with all tokens."""
    place = tl.arange(0, 16)
    total = tl.zeros((BN, 16), tl.float32)
    start = rows.to(tl.int64)[:, None] * width
    for k in range(0, width, BK):
        column = k + tl.arange(0, BK)
        known = (place < tokens)[None, :] if EVEN else (place < tokens)[None, :] & (column < width)[:, None]
        there = inside[:, None] if EVEN else inside[:, None] & (column < width)[None, :]
        states = tl.load(x + place[None, :] * width + column[:, None], mask=known, other=0.0)
        values = tl.load(weight + start + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")
        total = tl.dot(values, states, total, input_precision="ieee")
    return total


@counted
def _linear(
    x, weight, bias, out, start, tokens, height, width, scale,
    HAS_BIAS: tl.constexpr, HAS_BASE: tl.constexpr, HAS_START: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    rows, place = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16)
    if HAS_START:
        out += (tl.load(start).to(tl.int64) + 1) * height
    inside = rows < height
    total = _product(x, weight, rows, inside, tokens, width, BN, BK, EVEN)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    at, known = place[None, :] * height + rows[:, None], inside[:, None] & (place < tokens)[None, :]
    if HAS_BASE:
        added = (total.to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
        total = tl.load(out + at, mask=known, other=0.0).to(tl.float32) + added
    tl.store(out + at, total.to(kind), mask=known)


@triton.jit
def _two_products(
    x, weight, rows, other, other_rows, inside, tokens, width, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """`_product` for two sets of rows at once."""
    place = tl.arange(0, 16)
    first, second = tl.zeros((BN, 16), tl.float32), tl.zeros((BN, 16), tl.float32)
    start, other_start = rows.to(tl.int64)[:, None] * width, other_rows.to(tl.int64)[:, None] * width
    for k in range(0, width, BK):
        column = k + tl.arange(0, BK)
        known = (place < tokens)[None, :] if EVEN else (place < tokens)[None, :] & (column < width)[:, None]
        there = inside[:, None] if EVEN else inside[:, None] & (column < width)[None, :]
        states = tl.load(x + place[None, :] * width + column[:, None], mask=known, other=0.0)
        values = tl.load(weight + start + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")
        others = tl.load(other + other_start + column[None, :], mask=there, other=0.0, eviction_policy="evict_first")
        first = tl.dot(values, states, first, input_precision="ieee")
        second = tl.dot(others, states, second, input_precision="ieee")
    return first, second


@counted
def _gated(
    x, gate, up, out, tokens, height, width,
    ACTIVATION: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    rows, place = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16)
    inside = rows < height
    kind = out.dtype.element_ty
    opened, raised = _two_products(x, gate, rows, up, rows, inside, tokens, width, BN, BK, EVEN)
    opened = _activated(opened.to(kind).to(tl.float32), ACTIVATION).to(kind).to(tl.float32)
    raised = raised.to(kind).to(tl.float32)
    known = inside[:, None] & (place < tokens)[None, :]
    tl.store(out + place[None, :] * height + rows[:, None], (opened * raised).to(kind), mask=known)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == 0:
        return x * tl.sigmoid(x)
    if ACTIVATION == 1:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _norm(
    x, weight, bias, out, width, eps, OFFSET: tl.constexpr, CENTRED: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    column = tl.arange(0, BLOCK)
    at, known = tl.program_id(0) * width + column, column < width
    states = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    if CENTRED:
        states = tl.where(known, states - tl.sum(states, 0) / width, 0.0)
    states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    factor, shift = tl.load(weight + column, mask=known, other=0.0), 0.0
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    tl.store(out + at, _gained(states, factor, shift, OFFSET, CENTRED, out.dtype.element_ty), mask=known)


def norm(x: torch.Tensor, own: Norm) -> torch.Tensor:
    out, width, has_bias = torch.empty_like(x), x.shape[1], len(own.bias) > 0
    _norm[(len(x),)](
        x, own.weight, own.bias if has_bias else own.weight, out, width, own.eps, own.offset, own.centred, has_bias,
        triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
    return out


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor = EMPTY, base: torch.Tensor | None = None, scale: float = 1.0
) -> torch.Tensor:
    out = x.new_empty(len(x), len(weight)) if base is None else base
    _launch_linear(x, weight, bias, out, scale=scale, has_base=base is not None)
    return out


def _launch_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
    start: torch.Tensor | None = None,
    scale: float = 1.0,
    has_base: bool = False,
) -> None:
    (height, width), tile = weight.shape, _tile(weight, 32, 256, 5)
    _linear[(triton.cdiv(height, tile.rows),)](
        x, weight, bias if len(bias) else x, out, x if start is None else start, len(x), height, width, scale,
        len(bias) > 0, has_base, start is not None, tile.rows, tile.columns, tile.even, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip


def gated(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, activation: int) -> torch.Tensor:
    (height, width), tile = gate.shape, _tile(gate, 64, 128, 3)
    out = x.new_empty(len(x), height)
    _gated[(triton.cdiv(height, tile.rows),)](
        x, gate, up, out, len(x), height, width, activation, tile.rows, tile.columns, tile.even,
        num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    return out


class Tile(NamedTuple):
    """What a program takes of a weight at a time. It goes by the weight alone, never by the tokens."""

    rows: int
    columns: int
    stages: int  # tiles on their way
    even: bool  # the columns come out even


def _tile(weight: torch.Tensor, rows: int, columns: int, stages: int) -> Tile:
    """The tile that is best for large weights. Small ones have fewer rows, so that there is work for all of the GPU; GPUs with
    little shared memory have fewer tiles on their way."""
    height, width = weight.shape
    while rows > 16 and height < 128 * rows:
        rows //= 2
    columns = 2 * columns // weight.element_size()
    fits = _shared_memory(weight.device) // ((2 * rows + MOST_TOKENS) * columns * weight.element_size())
    return Tile(rows, columns, min(stages, 1 + fits), width % columns == 0)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return properties.shared_memory_per_block_optin if properties is not None else 1 << 20


@triton.jit
def _gained(states, factor, shift, OFFSET: tl.constexpr, CENTRED: tl.constexpr, kind: tl.constexpr):
    """Normed states times the weight of the norm. Layer norms and norms around 1 (Gemma) are rounded once, the others before
    it too."""
    if CENTRED:
        return (states * factor.to(tl.float32) + shift).to(kind)
    if OFFSET != 0:
        return (states * (factor.to(tl.float32) + OFFSET)).to(kind)
    return (states.to(kind).to(tl.float32) * factor.to(tl.float32)).to(kind)
