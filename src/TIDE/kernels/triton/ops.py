"""The decoder layer on a GPU, in Triton. Functions of the same names in `reference/layers.py` define what each computes.

Weights are streamed once for up to 128 tokens (`triton/products.py`), K/V once for all tokens of a row (`triton/attention.py`).

A token's bits do not depend on the tokens beside it: sums run in one order whatever the number of tokens. Results are rounded
where the model's own layers round them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import Attention, Layer, Pass
from TIDE.kernels.layer_steps import run_layer
from TIDE.kernels.triton import long_passes
from TIDE.kernels.triton.attention import attend, strides
from TIDE.kernels.triton.launch import begin, fetch, kernel, looped
from TIDE.kernels.triton.products import _first, _gained, _two_products, add_linear, add_mlp, linear, mlp_inner, norm
from TIDE.kernels.triton.tiles import card_of, project_tile

__all__ = ["add_linear", "add_mlp", "attend", "decoder_layer", "linear", "mlp_inner", "norm", "project"]


# ---- queries, keys and values ---------------------------------------------------------------------------------------------


@kernel
def _project(
    x, wq, wk, wv, bq, bk, bv, cos, sin, queries, keys, values, rows, columns, angles, tables, tokens, asking, width,
    heads, kv_heads, stride_table, stride_block, stride_head, stride_column, SIZE: tl.constexpr,
    DIM: tl.constexpr, ROTARY: tl.constexpr, HAS_BIAS: tl.constexpr,
    HALF: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute pairs of outputs of one head: those that are rotated together. Without ROTARY they are any two. Queries are those
    of the first `asking` tokens."""
    head, pair, place = tl.program_id(1), tl.program_id(2) * HALF + tl.arange(0, HALF), tl.arange(0, TN)
    weight, bias, own = wq, bq, head
    if head >= heads:
        weight, bias, own = wk, bk, head - heads
    if head >= heads + kv_heads:
        weight, bias, own = wv, bv, head - heads - kv_heads
    inside, half = pair < DIM // 2, ROTARY // 2
    one = tl.where(pair < half, pair, pair + half)
    two = one + tl.where(pair < half, half, (DIM - ROTARY) // 2)
    starts = own * DIM + one, own * DIM + two
    fetch(weight, starts[0], inside, width, BK, PDL)
    fetch(weight, starts[1], inside, width, BK, PDL)
    begin(PDL, LOOPS=True)
    tokens = tl.where(head < heads, asking, tokens)
    if not ONCE:
        first = _first(TN)
        if first >= tokens:
            return
        x, queries, tokens = x + first * width, queries + first * heads * DIM, tokens - first
        rows, columns, angles = rows + first, columns + first, angles + first
    a, b = _two_products(x, weight, starts[0], weight, starts[1], inside, tokens, width, HALF, BK, TN, EVEN, ONCE)
    looped(PDL)
    if HAS_BIAS:
        a += tl.load(bias + own * DIM + one, mask=inside, other=0.0).to(tl.float32)[:, None]
        b += tl.load(bias + own * DIM + two, mask=inside, other=0.0).to(tl.float32)[:, None]
    a, b = a.to(queries.dtype.element_ty), b.to(queries.dtype.element_ty)
    known = inside[:, None] & (place < tokens)[None, :]
    if ROTARY > 0:
        last = tl.where(head < heads + kv_heads, half, 0)  # values are not rotated
        rotates = (place < tokens)[None, :] & (pair < last)[:, None]
        angle = tl.load(angles + place, mask=place < tokens, other=0)
        a, b = _rotated(a, b, cos, sin, angle[None, :] * ROTARY, one[:, None], two[:, None], rotates)
    if head < heads:
        at = queries + (place[None, :] * heads + own) * DIM
    else:
        row = tl.load(rows + place, mask=place < tokens, other=0)
        column = tl.load(columns + place, mask=place < tokens, other=0)
        where = _place(tables, row, column, stride_table, stride_block, stride_column, SIZE) + own * stride_head
        at = keys + where[None, :]
        if head >= heads + kv_heads:
            at = values + where[None, :]
    tl.store(at + one[:, None], a, mask=known)
    tl.store(at + two[:, None], b, mask=known)


@triton.jit
def _place(tables, row, column, stride_table, stride_block, stride_column, SIZE: tl.constexpr):
    """Return where a row has K/V of a column, in its first head; a block has SIZE columns, or is a row if SIZE is 0."""
    if SIZE == 0:
        return row.to(tl.int64) * stride_block + column * stride_column
    block = tl.load(tables + row * stride_table + column // SIZE).to(tl.int64)
    return block * stride_block + column % SIZE * stride_column


@triton.jit
def _rotated(a, b, cos, sin, at, one, two, rotates):
    """Rotate a pair of outputs; each product and each sum is rounded, as in the model."""
    cos_a, sin_a = tl.load(cos + at + one, mask=rotates, other=1.0), tl.load(sin + at + one, mask=rotates, other=0.0)
    cos_b, sin_b = tl.load(cos + at + two, mask=rotates, other=1.0), tl.load(sin + at + two, mask=rotates, other=0.0)
    first = _times(a, cos_a) - _times(b, sin_a)
    second = _times(b, cos_b) + _times(a, sin_b)
    return first.to(a.dtype), second.to(a.dtype)


@triton.jit
def _times(a, b):
    """Multiply with a cosine or sine; the product has its dtype, which is fp32 in some models of half precision."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(b.dtype).to(tl.float32)


@kernel
def _norm_and_rotate(
    queries, keys, q_norm, k_norm, cos, sin, rows, columns, angles, tables, asking, eps, heads,
    stride_table, stride_block, stride_head, stride_column, SIZE: tl.constexpr,
    OFFSET: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one head of one token in place: queries where `_project` put them, keys in the cache."""
    begin(PDL)
    token, head, pair = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    if (head < heads) & (token >= asking):
        return
    inside, half = pair < DIM // 2, ROTARY // 2
    one = tl.where(pair < half, pair, pair + half)
    two = one + tl.where(pair < half, half, (DIM - ROTARY) // 2)
    at, weight = queries + (token * heads + head) * DIM, q_norm
    if head >= heads:
        row, column = tl.load(rows + token), tl.load(columns + token)
        where = _place(tables, row, column, stride_table, stride_block, stride_column, SIZE)
        at, weight = keys + where + (head - heads) * stride_head, k_norm
    a, b = tl.load(at + one, mask=inside, other=0.0), tl.load(at + two, mask=inside, other=0.0)
    scale = tl.rsqrt((_squares(a) + _squares(b)) / DIM + eps)
    kind = queries.dtype.element_ty
    a = _gained(a.to(tl.float32) * scale, tl.load(weight + one, mask=inside, other=0.0), 0.0, OFFSET, False, kind)
    b = _gained(b.to(tl.float32) * scale, tl.load(weight + two, mask=inside, other=0.0), 0.0, OFFSET, False, kind)
    if ROTARY > 0:
        a, b = _rotated(a, b, cos, sin, tl.load(angles + token) * ROTARY, one, two, pair < half)
    tl.store(at + one, a, mask=inside)
    tl.store(at + two, b, mask=inside)


@triton.jit
def _squares(x):
    return tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)


@kernel
def _norm_all_and_rotate(
    queries, keys, q_norm, k_norm, cos, sin, rows, columns, angles, tables, asking, eps, heads, kv_heads,
    stride_table, stride_block, stride_head, stride_column, SIZE: tl.constexpr,
    OFFSET: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm over all heads of a token, then rotate: a program takes its queries or its keys."""
    begin(PDL)
    token, head, pair = tl.program_id(0), tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    if (tl.program_id(1) == 0) & (token >= asking):
        return
    half = ROTARY // 2
    one = tl.where(pair < half, pair, pair + half)
    two = one + tl.where(pair < half, half, (DIM - ROTARY) // 2)
    at, weight, count = queries + (token * heads + head) * DIM, q_norm, heads
    if tl.program_id(1) == 1:
        row, column = tl.load(rows + token), tl.load(columns + token)
        where = _place(tables, row, column, stride_table, stride_block, stride_column, SIZE)
        at, weight, count = keys + where + head * stride_head, k_norm, kv_heads
    inside = (pair < DIM // 2) & (head < count)
    a, b = tl.load(at + one, mask=inside, other=0.0), tl.load(at + two, mask=inside, other=0.0)
    scale = tl.rsqrt(tl.sum(_squares(a) + _squares(b), 0) / (tl.maximum(count, 1) * DIM) + eps)
    kind = queries.dtype.element_ty
    gain_a = tl.load(weight + head * DIM + one, mask=inside, other=0.0)
    gain_b = tl.load(weight + head * DIM + two, mask=inside, other=0.0)
    a = _gained(a.to(tl.float32) * scale, gain_a, 0.0, OFFSET, False, kind)
    b = _gained(b.to(tl.float32) * scale, gain_b, 0.0, OFFSET, False, kind)
    if ROTARY > 0:
        a, b = _rotated(a, b, cos, sin, tl.load(angles + token) * ROTARY, one, two, inside & (pair < half))
    tl.store(at + one, a, mask=inside)
    tl.store(at + two, b, mask=inside)


def project(attention: Attention, tokens: Pass, h: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    dim, height, width = attention.head_dim, attention.q.rows, attention.q.columns
    heads, kv_heads, rotary = attention.heads, attention.kv_heads, tokens.cos.shape[1] if attention.rotary else 0
    asking = len(h[: tokens.asking])
    queries = h.new_empty(asking, height)
    has_norm, has_bias = len(attention.k_norm.weight) > 0, len(attention.k_bias) > 0
    turns = 0 if has_norm else rotary
    if not long_passes.project(attention, tokens, h, queries, keys, values, strides(tokens, keys), turns):
        weights = attention.q.values, attention.k.values, attention.v.values
        tile = project_tile(card_of(h.device), height, width, dim, h.element_size(), len(h))
        biases = (attention.q_bias, attention.k_bias, attention.v_bias) if has_bias else (h, h, h)
        places = tokens.rows, tokens.columns, tokens.angles, tokens.tables
        _project[(tile.groups, heads + 2 * kv_heads, triton.cdiv(dim // 2, tile.rows))](
            h, *weights, *biases, tokens.cos, tokens.sin, queries, keys, values, *places,
            len(h), asking, width, heads, kv_heads, *strides(tokens, keys),
            dim, turns, has_bias, *tile.constants, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    if has_norm:
        _launch_norms(attention, tokens, len(h), queries, keys, rotary)
    return queries


def _launch_norms(
    attention: Attention, tokens: Pass, count: int, queries: torch.Tensor, keys: torch.Tensor, rotary: int
) -> None:
    """Norm and rotate queries and the keys of `count` tokens. The two norms differ in their weights only."""
    dim, kv_heads, own = attention.head_dim, keys.shape[1], attention.k_norm
    heads, own_strides = queries.shape[1] // dim, strides(tokens, keys)
    assert not own.layer_norm and not len(own.bias), "norms of queries and keys are RMS norms"
    weights = attention.q_norm.weight if heads else own.weight, own.weight
    places = tokens.rows, tokens.columns, tokens.angles, tokens.tables
    given = queries, keys, *weights, tokens.cos, tokens.sin, *places, len(queries), own.eps, heads
    pairs = triton.next_power_of_2(dim // 2)
    if len(own.weight) == dim:
        _norm_and_rotate[(count, heads + kv_heads)](*given, *own_strides, own.offset, dim, rotary, pairs, num_warps=1)
    else:
        most = triton.next_power_of_2(max(heads, kv_heads))
        _norm_all_and_rotate[(count, 2)](*given, kv_heads, *own_strides, own.offset, dim, rotary, most, pairs, num_warps=8)


# ---- the layer --------------------------------------------------------------------------------------------------------------


def decoder_layer(layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None = None) -> None:
    """All arrays are on the device; no token attends to more than `most` columns."""
    run_layer(sys.modules[__name__], layer, tokens, keys, values, most)
