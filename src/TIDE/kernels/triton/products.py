"""Products and norms on a GPU, in Triton. Functions of the same names in `reference/layers.py` define them.

A program multiplies a block of a weight's rows with all tokens of a pass, padded to 16, 32, 64 or 128; beyond 128, with a group
of 128 or 256. Groups are the first dimension of the grid, so programs that need the same rows run side by side and one of them
reads the rows from memory. Whatever the tile, products are summed in the order of columns, so a token's bits do not depend on
the tokens beside it.

    BN, BK      rows and columns of a weight's tile
    TN          tokens of a tile
    EVEN        columns need no mask
    ONCE        there is one group, so nothing is read twice
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import MLP, Norm
from TIDE.kernels.triton import long_passes
from TIDE.kernels.triton.launch import begin, fetch, kernel, looped
from TIDE.kernels.triton.tiles import card_of, gated_tile, linear_tile
from TIDE.kernels.weights import Weight

EMPTY = torch.zeros(0)


@triton.jit
def _product(
    x, weight, rows, inside, tokens, width,
    BN: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """(BN, TN) products of some rows of a weight with a group's tokens."""
    place = tl.arange(0, TN)
    total = tl.zeros((BN, TN), tl.float32)
    KEPT: tl.constexpr = "evict_first" if ONCE else ""
    start = rows.to(tl.int64)[:, None] * width
    for k in range(0, width, BK):
        column = k + tl.arange(0, BK)
        known = (place < tokens)[None, :] if EVEN else (place < tokens)[None, :] & (column < width)[:, None]
        there = inside[:, None] if EVEN else inside[:, None] & (column < width)[None, :]
        states = tl.load(x + place[None, :] * width + column[:, None], mask=known, other=0.0)
        values = tl.load(weight + start + column[None, :], mask=there, other=0.0, eviction_policy=KEPT)
        total = tl.dot(values, states, total, input_precision="ieee")
    return total


@kernel
def _linear(
    x, weight, bias, out, places, tokens, height, width, scale,
    HAS_BIAS: tl.constexpr, HAS_BASE: tl.constexpr, HAS_PLACES: tl.constexpr, ACTIVATION: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    fetch(weight, rows, rows < height, width, BK, PDL)
    begin(PDL, LOOPS=True)
    inside, place = rows < height, tl.arange(0, TN)
    if not ONCE:
        first = _first(TN)
        x, tokens = x + first * width, tokens - first
        if HAS_PLACES:
            places += first
        else:
            out += first * height
    total = _product(x, weight, rows, inside, tokens, width, BN, BK, TN, EVEN, ONCE)
    looped(PDL)
    if HAS_BIAS:
        total += tl.load(bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    if ACTIVATION >= 0:
        total = _activated(total.to(kind).to(tl.float32), ACTIVATION)
    known = inside[:, None] & (place < tokens)[None, :]
    if HAS_PLACES:
        place = tl.load(places + place, mask=place < tokens, other=0)
    at = place[None, :] * height + rows[:, None]
    if HAS_BASE:
        added = (total.to(kind).to(tl.float32) * scale).to(kind).to(tl.float32)
        total = tl.load(out + at, mask=known, other=0.0).to(tl.float32) + added
    tl.store(out + at, total.to(kind), mask=known)


@triton.jit
def _first(TN: tl.constexpr):
    """Return the first token of the program's group; in 64 bits, for it counts rows of large arrays."""
    return tl.program_id(0).to(tl.int64) * TN


@triton.jit
def _two_products(
    x, weight, rows, other, other_rows, inside, tokens, width,
    BN: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr,
):  # fmt: skip
    """`_product` for two sets of rows at once."""
    place = tl.arange(0, TN)
    first, second = tl.zeros((BN, TN), tl.float32), tl.zeros((BN, TN), tl.float32)
    KEPT: tl.constexpr = "evict_first" if ONCE else ""
    start, other_start = rows.to(tl.int64)[:, None] * width, other_rows.to(tl.int64)[:, None] * width
    for k in range(0, width, BK):
        column = k + tl.arange(0, BK)
        known = (place < tokens)[None, :] if EVEN else (place < tokens)[None, :] & (column < width)[:, None]
        there = inside[:, None] if EVEN else inside[:, None] & (column < width)[None, :]
        states = tl.load(x + place[None, :] * width + column[:, None], mask=known, other=0.0)
        values = tl.load(weight + start + column[None, :], mask=there, other=0.0, eviction_policy=KEPT)
        others = tl.load(other + other_start + column[None, :], mask=there, other=0.0, eviction_policy=KEPT)
        first = tl.dot(values, states, first, input_precision="ieee")
        second = tl.dot(others, states, second, input_precision="ieee")
    return first, second


@kernel
def _gated(
    x, gate, up, gate_bias, up_bias, out, tokens, height, width,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    fetch(gate, rows, rows < height, width, BK, PDL)
    fetch(up, rows, rows < height, width, BK, PDL)
    begin(PDL, LOOPS=True)
    inside, place = rows < height, tl.arange(0, TN)
    if not ONCE:
        first = _first(TN)
        x, out, tokens = x + first * width, out + first * height, tokens - first
    kind = out.dtype.element_ty
    opened, raised = _two_products(x, gate, rows, up, rows, inside, tokens, width, BN, BK, TN, EVEN, ONCE)
    looped(PDL)
    if HAS_BIAS:
        opened += tl.load(gate_bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        raised += tl.load(up_bias + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
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


@kernel
def _norm(
    x, weight, bias, out, width, eps, scale,
    OFFSET: tl.constexpr, LAYER_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_BASE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    column = tl.arange(0, BLOCK)
    at, known = tl.program_id(0) * width + column, column < width
    states = tl.load(x + at, mask=known, other=0.0).to(tl.float32)
    if LAYER_NORM:
        states = tl.where(known, states - tl.sum(states, 0) / width, 0.0)
    states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    factor, shift = tl.load(weight + column, mask=known, other=0.0), 0.0
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=known, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
    normed = _gained(states, factor, shift, OFFSET, LAYER_NORM, kind)
    if HAS_BASE:
        added = (normed.to(tl.float32) * scale).to(kind).to(tl.float32)
        normed = (tl.load(out + at, mask=known, other=0.0).to(tl.float32) + added).to(kind)
    tl.store(out + at, normed, mask=known)


def norm(x: torch.Tensor, own: Norm) -> torch.Tensor:
    if not len(own.weight):
        return x
    out = torch.empty_like(x)
    _launch_norm(x, own, out, 1.0, has_base=False)
    return out


def _launch_norm(x: torch.Tensor, own: Norm, out: torch.Tensor, scale: float, has_base: bool) -> None:
    width, has_bias = x.shape[1], len(own.bias) > 0
    _norm[(len(x),)](
        x, own.weight, own.bias if has_bias else own.weight, out, width, own.eps, scale,
        own.offset, own.layer_norm, has_bias, has_base, triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor = EMPTY, activation: int | None = None) -> torch.Tensor:
    out = x.new_empty(len(x), weight.rows)
    _launch_linear(x, weight, bias, out, activation=activation)
    return out


def add_linear(base: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor, out_norm: Norm, scale: float) -> None:
    """One launch; with a norm, which needs whole states, two."""
    if len(out_norm.weight):
        _launch_norm(linear(x, weight, bias), out_norm, base, scale, has_base=True)
    else:
        _launch_linear(x, weight, bias, base, scale=scale, has_base=True)


def _launch_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor,
    out: torch.Tensor,
    places: torch.Tensor | None = None,
    scale: float = 1.0,
    has_base: bool = False,
    activation: int | None = None,
) -> None:
    """Write products to `out`: in place of what is there, or added to it."""
    height, width, values = weight.rows, weight.columns, weight.values
    if places is None and long_passes.linear(x, weight, bias, out, scale, has_base, activation):
        return
    tile = linear_tile(card_of(x.device), height, width, values.element_size(), len(x))
    _linear[(tile.groups, triton.cdiv(height, tile.rows))](
        x, values, bias if len(bias) else x, out, x if places is None else places, len(x), height, width, scale,
        len(bias) > 0, has_base, places is not None, -1 if activation is None else activation, *tile.constants,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def add_mlp(base: torch.Tensor, x: torch.Tensor, mlp: MLP, out_norm: Norm, scale: float) -> None:
    add_linear(base, mlp_inner(x, mlp), mlp.down, mlp.down_bias, out_norm, scale)


def mlp_inner(x: torch.Tensor, mlp: MLP) -> torch.Tensor:
    if not mlp.gate.rows:
        return linear(x, mlp.up, mlp.up_bias, mlp.activation)
    if (found := long_passes.gated(x, mlp)) is not None:
        return found
    height, width, has_bias = mlp.gate.rows, mlp.gate.columns, len(mlp.up_bias) > 0
    tile = gated_tile(card_of(x.device), height, width, mlp.gate.values.element_size(), len(x))
    out = x.new_empty(len(x), height)
    _gated[(tile.groups, triton.cdiv(height, tile.rows))](
        x, mlp.gate.values, mlp.up.values, mlp.gate_bias if has_bias else x, mlp.up_bias if has_bias else x, out, len(x),
        height, width, has_bias, mlp.activation, *tile.constants, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@triton.jit
def _gained(states, factor, shift, OFFSET: tl.constexpr, LAYER_NORM: tl.constexpr, kind: tl.constexpr):
    """Multiply normed states with the weight of the norm. Layer norms and norms with an offset (Gemma) round once, the others
    also before the product, as models do."""
    if LAYER_NORM:
        return (states * (factor.to(tl.float32) + OFFSET) + shift).to(kind)
    if OFFSET != 0:
        return (states * (factor.to(tl.float32) + OFFSET)).to(kind)
    return (states.to(kind).to(tl.float32) * factor.to(tl.float32)).to(kind)
