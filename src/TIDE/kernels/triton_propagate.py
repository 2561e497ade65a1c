"""K/V of tokens in layers that they skip, in one launch; its namesake in `reference.py` says what is computed.

A program takes one key or value head of one layer past all tokens, which stand in 16 places. It norms their states on the way,
so nothing is written but K/V.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import Layer, Pass
from TIDE.kernels.triton_ops import _squares, _turned
from TIDE.kernels.triton_products import _gained, counted

FACTS = 10  # of a layer: where its weights and its cache are, whether it turns keys, and the shift of its norm


@counted
def _propagate(
    x, facts, cos, sin, rows, start, tokens, per_row, width, eps, kv_heads, stride_row, stride_head, stride_column,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, SHIFTED: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, FACTS: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    own, place, pair = facts + tl.program_id(0) * FACTS, tl.arange(0, 16), tl.arange(0, HALF)
    is_value = tl.program_id(1) >= kv_heads
    head = tl.program_id(1) - tl.where(is_value, kv_heads, 0)
    kind = x.dtype.element_ty
    gain = tl.load(own).to(tl.pointer_type(kind))
    weight = tl.load(own + tl.where(is_value, 2, 1)).to(tl.pointer_type(kind))
    inside, half = pair < DIM // 2, ROTARY // 2
    one = tl.where(pair < half, pair, pair + half)
    two = one + tl.where(pair < half, half, (DIM - ROTARY) // 2)
    known = (place < tokens)[None, :]

    mean = tl.zeros((16,), tl.float32)
    if CENTRED:
        for k in range(0, width, BK):
            column = k + tl.arange(0, BK)
            states = tl.load(x + place[None, :] * width + column[:, None], mask=known & (column < width)[:, None], other=0.0)
            mean += tl.sum(states.to(tl.float32), 0)
        mean /= width
    squares = tl.zeros((16,), tl.float32)
    for k in range(0, width, BK):
        column = k + tl.arange(0, BK)
        there = known & (column < width)[:, None]
        states = tl.load(x + place[None, :] * width + column[:, None], mask=there, other=0.0).to(tl.float32)
        states = tl.where(there, states - mean[None, :], 0.0)
        squares += tl.sum(states * states, 0)
    scale = tl.rsqrt(squares / width + eps)

    a, b = tl.zeros((HALF, 16), tl.float32), tl.zeros((HALF, 16), tl.float32)
    for k in range(0, width, BK):
        column = k + tl.arange(0, BK)
        there = column < width
        states = tl.load(x + place[None, :] * width + column[:, None], mask=known & there[:, None], other=0.0)
        factor = tl.load(gain + column, mask=there, other=0.0)[:, None]
        shift = tl.zeros((BK, 1), tl.float32)
        if SHIFTED:
            shift = tl.load(tl.load(own + 9).to(tl.pointer_type(kind)) + column, mask=there, other=0.0).to(tl.float32)[:, None]
        even = (states.to(tl.float32) - mean[None, :]) * scale[None, :]
        normed = _gained(even, factor, shift, OFFSET, CENTRED, kind)
        mask = inside[:, None] & there[None, :]
        first = tl.load(weight + (head * DIM + one)[:, None] * width + column[None, :], mask=mask, other=0.0)
        second = tl.load(weight + (head * DIM + two)[:, None] * width + column[None, :], mask=mask, other=0.0)
        a = tl.dot(first, normed, a, input_precision="ieee")
        b = tl.dot(second, normed, b, input_precision="ieee")
    if HAS_BIAS:
        bias = tl.load(own + tl.where(is_value, 4, 3)).to(tl.pointer_type(kind)) + head * DIM
        a += tl.load(bias + one, mask=inside, other=0.0).to(tl.float32)[:, None]
        b += tl.load(bias + two, mask=inside, other=0.0).to(tl.float32)[:, None]
    a, b = a.to(kind), b.to(kind)

    if HAS_NORM and not is_value:
        norms = tl.load(own + 5).to(tl.pointer_type(kind))
        even = tl.rsqrt((_squares(a) + _squares(b)) / DIM + eps)[None, :]
        a = _gained(a.to(tl.float32) * even, tl.load(norms + one, mask=inside, other=0.0)[:, None], 0.0, OFFSET, False, kind)
        b = _gained(b.to(tl.float32) * even, tl.load(norms + two, mask=inside, other=0.0)[:, None], 0.0, OFFSET, False, kind)
    if ROTARY > 0:
        turned = tl.where(is_value, 0, half * tl.load(own + 8).to(tl.int32))
        turns = known & (pair < turned)[:, None]
        a, b = _turned(a, b, cos, sin, place[None, :] * ROTARY, one[:, None], two[:, None], turns)

    row = tl.load(rows + place // per_row, mask=place < tokens, other=0).to(tl.int64)
    at = row * stride_row + head * stride_head + (place % per_row + tl.load(start)) * stride_column
    out = tl.load(own + tl.where(is_value, 7, 6)).to(tl.pointer_type(kind)) + at[None, :]
    tl.store(out + one[:, None], a, mask=inside[:, None] & known)
    tl.store(out + two[:, None], b, mask=inside[:, None] & known)


def propagate(layers: list[Layer], tokens: Pass, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    first, (keys, _) = layers[0], caches[0]
    dim, width, kv_heads = first.head_dim, tokens.x.shape[1], keys.shape[1]
    has_bias, has_norm, turned = len(first.k_bias) > 0, len(first.k_norm) > 0, tokens.cos.shape[1]
    half = max(16, triton.next_power_of_2(dim // 2))
    _propagate[(len(layers), 2 * kv_heads)](
        tokens.x, _facts(layers, caches), tokens.cos, tokens.sin, tokens.rows, tokens.start, len(tokens.x), tokens.width,
        width, first.eps, kv_heads, *keys.stride()[:3], first.norm_offset, first.centred, len(first.input_norm_bias) > 0,
        dim, turned, has_bias, has_norm, FACTS, half, 64 if tokens.x.element_size() == 2 else 32, num_warps=4, num_stages=2,
    )  # fmt: skip


def _facts(layers: list[Layer], caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """(layers, FACTS)"""
    found = []
    for own, cache in zip(layers, caches, strict=True):
        held = own.input_norm, own.k, own.v, own.k_bias, own.v_bias, own.k_norm, *cache
        found.append([*(x.data_ptr() for x in held), int(own.rotary), own.input_norm_bias.data_ptr()])
    return torch.tensor(found).to(layers[0].k.device, non_blocking=True)
