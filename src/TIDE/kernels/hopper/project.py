"""Queries, keys and values of long passes on GPUs of compute capability 9.0, in Gluon: the same bits as `project` in
`triton/ops.py`, by programs that stay (`hopper/products.py`).

A tile of the result is one head of two or three times 64 tokens. Its two sets of rows are the halves of the head, which are
rotated together. Queries come first, then keys and values, whose tokens may be more.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from TIDE.kernels.hopper.products import PART, STEP, let_pass, load_tiles, products_of, stage_barriers
from TIDE.kernels.hopper.tiles import tiles_of
from TIDE.kernels.layer import Attention, Pass
from TIDE.kernels.triton.tiles import PartsTile


def project_in_parts(
    attention: Attention, tokens: Pass, h: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    strides: tuple[int, ...], rotary: int, tile: PartsTile,
) -> None:  # fmt: skip
    """Write queries of the tokens that ask, and K/V of all, in place; rotary: all numbers of a head, or 0."""
    has_bias, heads = len(attention.k_bias) > 0, attention.heads
    biases = (attention.q_bias, attention.k_bias, attention.v_bias) if has_bias else (h, h, h)
    weights = attention.q if heads else attention.k, attention.k, attention.v
    _project[(tile.programs,)](
        tiles_of(h, PART.value, STEP.value), *(tiles_of(own.values, tile.rows, STEP.value) for own in weights), *biases,
        tokens.cos, tokens.sin, queries, keys, values, tokens.rows, tokens.columns, tokens.angles, tokens.tables,
        len(h), len(queries), h.shape[1], heads, keys.shape[1], *strides,
        rotary > 0, has_bias, tile.parts, tile.rows, tile.stages, num_warps=4,
    )  # fmt: skip


@gluon.jit(
    do_not_specialize=["tokens", "asking", "stride_table"],
    do_not_specialize_on_alignment=["rows", "columns", "angles", "tables"],
)
def _project(
    x_tiles, q_tiles, k_tiles, v_tiles, q_bias, k_bias, v_bias, cos, sin, queries, keys, values, rows, columns, angles, tables,
    tokens, asking, width, heads, kv_heads, stride_table, stride_block, stride_head, stride_column, SIZE: gl.constexpr,
    ROTATES: gl.constexpr, HAS_BIAS: gl.constexpr, PARTS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = queries.dtype.element_ty
    states = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PART, STEP], x_tiles.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES * 2, HALF, STEP], k_tiles.layout)
    ready, free = stage_barriers(PARTS, STAGES)
    tiles = (x_tiles, q_tiles, k_tiles, v_tiles, states, weights, ready, free, tokens, asking, width, heads, kv_heads)
    biases, places = (q_bias, k_bias, v_bias), (rows, columns, angles, tables, stride_table, stride_block, stride_column)
    given = (cos, sin, queries, keys, values, stride_head, states, weights, ready, free, tokens, asking, width, heads, kv_heads)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_part, (given, biases, places, 0, SIZE, ROTATES, HAS_BIAS, PARTS, HALF, STAGES)),
                (_part, (given, biases, places, 1, SIZE, ROTATES, HAS_BIAS, PARTS, HALF, STAGES)),
                (_load, (tiles, PARTS, HALF, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_part, (given, biases, places, 0, SIZE, ROTATES, HAS_BIAS, PARTS, HALF, STAGES)),
                (_part, (given, biases, places, 1, SIZE, ROTATES, HAS_BIAS, PARTS, HALF, STAGES)),
                (_part, (given, biases, places, 2, SIZE, ROTATES, HAS_BIAS, PARTS, HALF, STAGES)),
                (_load, (tiles, PARTS, HALF, STAGES)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


@gluon.jit
def _count(tokens, asking, heads, kv_heads, PARTS: gl.constexpr):
    """Return how many tiles the result has."""
    return heads * gl.cdiv(asking, PARTS * PART) + 2 * kv_heads * gl.cdiv(tokens, PARTS * PART)


@gluon.jit
def _places(tile, tokens, asking, heads, PARTS: gl.constexpr):
    """Return a tile's head, keys' behind those of queries and values' behind both, and its first token."""
    groups = gl.cdiv(asking, PARTS * PART)
    head, token = tile // gl.maximum(groups, 1), tile % gl.maximum(groups, 1) * (PARTS * PART)
    if tile >= heads * groups:
        tile -= heads * groups
        groups = gl.cdiv(tokens, PARTS * PART)
        head, token = heads + tile // groups, tile % groups * (PARTS * PART)
    return head, token


@gluon.jit
def _load(given, PARTS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr):
    x_tiles, q_tiles, k_tiles, v_tiles, states, weights, ready, free, tokens, asking, width, heads, kv_heads = given
    at = 0
    for tile in range(gl.program_id(0), _count(tokens, asking, heads, kv_heads, PARTS), gl.num_programs(0)):
        head, token = _places(tile, tokens, asking, heads, PARTS)
        if head < heads:
            first = head * 2 * HALF
            load_tiles(
                x_tiles, q_tiles, q_tiles, token, first, first + HALF, width, states, weights, ready, free, at,
                PARTS, HALF, STAGES,
            )  # fmt: skip
        elif head < heads + kv_heads:
            first = (head - heads) * 2 * HALF
            load_tiles(
                x_tiles, k_tiles, k_tiles, token, first, first + HALF, width, states, weights, ready, free, at,
                PARTS, HALF, STAGES,
            )  # fmt: skip
        else:
            first = (head - heads - kv_heads) * 2 * HALF
            load_tiles(
                x_tiles, v_tiles, v_tiles, token, first, first + HALF, width, states, weights, ready, free, at,
                PARTS, HALF, STAGES,
            )  # fmt: skip
        at += gl.cdiv(width, STEP)


@gluon.jit
def _part(
    given, biases, places, OWN: gl.constexpr, SIZE: gl.constexpr, ROTATES: gl.constexpr, HAS_BIAS: gl.constexpr,
    PARTS: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute one head of 64 tokens of each tile."""
    cos, sin, queries, keys, values, stride_head, states, weights, ready, free, tokens, asking, width, heads, kv_heads = given
    rows, columns, angles, tables, stride_table, stride_block, stride_column = places
    q_bias, k_bias, v_bias = biases
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    none = gl.zeros((PART, HALF), gl.float32, layout=SUMS)
    pair = gl.arange(0, HALF, layout=gl.SliceLayout(0, SUMS))
    at = 0
    for tile in range(gl.program_id(0), _count(tokens, asking, heads, kv_heads, PARTS), gl.num_programs(0)):
        head, token = _places(tile, tokens, asking, heads, PARTS)
        end = gl.where(head < heads, asking, tokens)
        token += OWN * PART
        if token < end:
            a, b = products_of(states, weights, ready, free, at, width, none, OWN, PARTS, STAGES)
            place = token + gl.arange(0, PART, layout=gl.SliceLayout(1, SUMS))
            there = place < end
            own, bias = head, q_bias
            if head >= heads:
                own, bias = head - heads, k_bias
            if head >= heads + kv_heads:
                own, bias = head - heads - kv_heads, v_bias
            if HAS_BIAS:
                a += gl.load(bias + own * 2 * HALF + pair).to(gl.float32)[None, :]
                b += gl.load(bias + own * 2 * HALF + HALF + pair).to(gl.float32)[None, :]
            a, b = a.to(queries.dtype.element_ty), b.to(queries.dtype.element_ty)
            known = there[:, None] & (pair >= 0)[None, :]
            if ROTATES and head < heads + kv_heads:
                angle = gl.load(angles + place, mask=there, other=0)
                turn = (angle * (2 * HALF))[:, None] + pair[None, :]
                a, b = _rotated(a, b, cos, sin, turn, known, HALF)
            if head < heads:
                spot = queries + ((place.to(gl.int64) * heads + own) * (2 * HALF))[:, None] + pair[None, :]
                gl.store(spot, a, mask=known)
                gl.store(spot + HALF, b, mask=known)
            else:
                row, column = gl.load(rows + place, mask=there, other=0), gl.load(columns + place, mask=there, other=0)
                if SIZE == 0:
                    where = row.to(gl.int64) * stride_block + column * stride_column
                else:
                    block = gl.load(tables + row * stride_table + column // SIZE).to(gl.int64)
                    where = block * stride_block + column % SIZE * stride_column
                kept = keys
                if head >= heads + kv_heads:
                    kept = values
                spot = kept + (where + own * stride_head)[:, None] + pair[None, :]
                gl.store(spot, a, mask=known)
                gl.store(spot + HALF, b, mask=known)
        else:
            let_pass(ready, free, at, width, STAGES)
        at += gl.cdiv(width, STEP)


@gluon.jit
def _rotated(a, b, cos, sin, turn, known, HALF: gl.constexpr):
    """Rotate a pair of outputs; each product and each sum is rounded, as in the model."""
    first = _times(a, gl.load(cos + turn, mask=known, other=1.0)) - _times(b, gl.load(sin + turn, mask=known, other=0.0))
    cos_b, sin_b = gl.load(cos + turn + HALF, mask=known, other=1.0), gl.load(sin + turn + HALF, mask=known, other=0.0)
    second = _times(b, cos_b) + _times(a, sin_b)
    return first.to(a.dtype), second.to(a.dtype)


@gluon.jit
def _times(a, b):
    """Multiply with a cosine or sine; the product has its dtype, which is fp32 in some models of half precision."""
    return (a.to(gl.float32) * b.to(gl.float32)).to(b.dtype).to(gl.float32)
