"""K/V of tokens in layers that they skip, in one launch; `propagate` in `reference/layers.py` defines it.

A program computes one key or value head of one layer for up to 16 tokens. It norms their states on the way, so nothing is
written but K/V.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass, only_kv
from TIDE.kernels.transfer import sent
from TIDE.kernels.triton.launch import begin, kernel, looped
from TIDE.kernels.triton.ops import _place, _rotated, _squares, project, strides
from TIDE.kernels.triton.products import _gained, norm
from TIDE.kernels.triton.tiles import card_of, propagate_tile

FACTS = 10  # per layer: addresses of its weights and its cache, and whether it rotates keys


@kernel
def _propagate(
    x, facts, cos, sin, rows, columns, angles, tables, tokens, width, eps, head_eps, kv_heads,
    stride_table, stride_block, stride_head, stride_column, SIZE: tl.constexpr,
    OFFSET: tl.constexpr, HEAD_OFFSET: tl.constexpr, LAYER_NORM: tl.constexpr, SHIFTED: tl.constexpr, DIM: tl.constexpr,
    ROTARY: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM: tl.constexpr, FACTS: tl.constexpr, HALF: tl.constexpr,
    BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL, LOOPS=True)
    own, place, pair = facts + tl.program_id(2) * FACTS, tl.program_id(0) * 16 + tl.arange(0, 16), tl.arange(0, HALF)
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
    if LAYER_NORM:
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
        normed = _gained(even, factor, shift, OFFSET, LAYER_NORM, kind)
        mask = inside[:, None] & there[None, :]
        first = tl.load(weight + (head * DIM + one)[:, None] * width + column[None, :], mask=mask, other=0.0)
        second = tl.load(weight + (head * DIM + two)[:, None] * width + column[None, :], mask=mask, other=0.0)
        a = tl.dot(first, normed, a, input_precision="ieee")
        b = tl.dot(second, normed, b, input_precision="ieee")
    looped(PDL)
    if HAS_BIAS:
        bias = tl.load(own + tl.where(is_value, 4, 3)).to(tl.pointer_type(kind)) + head * DIM
        a += tl.load(bias + one, mask=inside, other=0.0).to(tl.float32)[:, None]
        b += tl.load(bias + two, mask=inside, other=0.0).to(tl.float32)[:, None]
    a, b = a.to(kind), b.to(kind)

    if HAS_NORM and not is_value:
        norms = tl.load(own + 5).to(tl.pointer_type(kind))
        even = tl.rsqrt((_squares(a) + _squares(b)) / DIM + head_eps)[None, :]
        a = _gained(
            a.to(tl.float32) * even, tl.load(norms + one, mask=inside, other=0.0)[:, None], 0.0, HEAD_OFFSET, False, kind
        )
        b = _gained(
            b.to(tl.float32) * even, tl.load(norms + two, mask=inside, other=0.0)[:, None], 0.0, HEAD_OFFSET, False, kind
        )
    if ROTARY > 0:
        last = tl.where(is_value, 0, half * tl.load(own + 8).to(tl.int32))
        rotates = known & (pair < last)[:, None]
        angle = tl.load(angles + place, mask=place < tokens, other=0)
        a, b = _rotated(a, b, cos, sin, angle[None, :] * ROTARY, one[:, None], two[:, None], rotates)

    row = tl.load(rows + place, mask=place < tokens, other=0)
    placed = tl.load(columns + place, mask=place < tokens, other=0)
    at = _place(tables, row, placed, stride_table, stride_block, stride_column, SIZE) + head * stride_head
    out = tl.load(own + tl.where(is_value, 7, 6)).to(tl.pointer_type(kind)) + at[None, :]
    tl.store(out + one[:, None], a, mask=inside[:, None] & known)
    tl.store(out + two[:, None], b, mask=inside[:, None] & known)


def propagate(layers: list[Layer], tokens: Pass, caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """One launch for layers that are alike; one by one for many tokens, norms over all heads, or none before attention."""
    first, own, (keys, _) = layers[0], layers[0].attention, caches[0]
    is_odd = not len(first.attention_norm.weight) or len(own.k_norm.weight) > own.head_dim
    if is_odd or len(tokens.x) > MOST_TOKENS:  # weights are read once for every sixteen tokens
        for layer, cache in zip(layers, caches, strict=True):
            project(only_kv(layer.attention), tokens, norm(tokens.x, layer.attention_norm), *cache)
        return
    before, dim, width, kv_heads = first.attention_norm, own.head_dim, tokens.x.shape[1], keys.shape[1]
    half = max(16, triton.next_power_of_2(dim // 2))
    tile = propagate_tile(card_of(keys.device), half, width, keys.element_size(), len(tokens.x))
    _propagate[(tile.groups, 2 * kv_heads, len(layers))](
        tokens.x, _facts(layers, caches), tokens.cos, tokens.sin, tokens.rows, tokens.columns, tokens.angles, tokens.tables,
        len(tokens.x), width, before.eps, own.k_norm.eps, kv_heads, *strides(tokens, keys),
        before.offset, own.k_norm.offset, before.layer_norm, len(before.bias) > 0, dim, tokens.cos.shape[1],
        len(own.k_bias) > 0, len(own.k_norm.weight) > 0, FACTS, half, tile.columns,
        num_warps=4, num_stages=tile.stages,
    )  # fmt: skip


def _facts(layers: list[Layer], caches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """(layers, FACTS)"""
    found = []
    for layer, cache in zip(layers, caches, strict=True):
        own, before = layer.attention, layer.attention_norm
        held = before.weight, own.k, own.v, own.k_bias, own.v_bias, own.k_norm.weight, *cache
        found.append([*(x.data_ptr() for x in held), int(own.rotary), before.bias.data_ptr()])
    return sent(torch.tensor(found), layers[0].attention.k.device)
