"""The fused layer on a GPU, in Triton. What each function computes is said by its namesake in `reference.py`.

Weights are streamed once for up to 16 tokens (`triton_products.py`). In attention a program takes one token and the query heads
of one key head past a stretch of `SPLIT` keys.

A token's bits do not depend on what is computed beside it: tiles have one shape whatever the number of tokens, sums run in
one order, and stretches of keys are counted from the row's first token. Results are rounded where the model's own layers
round them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import Layer, Pass, input_norm, mlp_norm
from TIDE.kernels.triton_products import EMPTY, _gained, _tile, _two_products, counted, gated, linear, norm

SPLIT, TILE = 64, 64  # keys of a program, and of one turn of its loop (in fp32 a quarter)


# ---- queries, keys and values ---------------------------------------------------------------------------------------------


@counted
def _project(
    x, wq, wk, wv, bq, bk, bv, cos, sin, queries, keys, values, rows, start, tokens, per_row, width,
    heads, kv_heads, stride_row, stride_head, stride_column,
    DIM: tl.constexpr, ROTARY: tl.constexpr, BY_COLUMN: tl.constexpr, HAS_BIAS: tl.constexpr,
    HALF: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Pairs of outputs of one head: those that are turned together. Without ROTARY they are any two."""
    head, pair, place = tl.program_id(0), tl.program_id(1) * HALF + tl.arange(0, HALF), tl.arange(0, 16)
    weight, bias, own = wq, bq, head
    if head >= heads:
        weight, bias, own = wk, bk, head - heads
    if head >= heads + kv_heads:
        weight, bias, own = wv, bv, head - heads - kv_heads
    inside, half = pair < DIM // 2, ROTARY // 2
    one = tl.where(pair < half, pair, pair + half)
    two = one + tl.where(pair < half, half, (DIM - ROTARY) // 2)
    a, b = _two_products(x, weight, own * DIM + one, weight, own * DIM + two, inside, tokens, width, HALF, BK, EVEN)
    if HAS_BIAS:
        a += tl.load(bias + own * DIM + one, mask=inside, other=0.0).to(tl.float32)[:, None]
        b += tl.load(bias + own * DIM + two, mask=inside, other=0.0).to(tl.float32)[:, None]
    a, b = a.to(queries.dtype.element_ty), b.to(queries.dtype.element_ty)
    known = inside[:, None] & (place < tokens)[None, :]
    if ROTARY > 0:
        turned = tl.where(head < heads + kv_heads, half, 0)  # values are not
        turns = (place < tokens)[None, :] & (pair < turned)[:, None]
        angle = place + tl.load(start) if BY_COLUMN else place
        a, b = _turned(a, b, cos, sin, angle[None, :] * ROTARY, one[:, None], two[:, None], turns)
    if head < heads:
        at = queries + (place[None, :] * heads + own) * DIM
    else:
        row = tl.load(rows + place // per_row, mask=place < tokens, other=0).to(tl.int64)
        column = place % per_row + tl.load(start)
        at = keys + (row * stride_row + own * stride_head + column * stride_column)[None, :]
        if head >= heads + kv_heads:
            at = values + (row * stride_row + own * stride_head + column * stride_column)[None, :]
    tl.store(at + one[:, None], a, mask=known)
    tl.store(at + two[:, None], b, mask=known)


@triton.jit
def _turned(a, b, cos, sin, at, one, two, turns):
    """A pair of outputs, turned; each product and each sum is rounded, as in the model."""
    cos_a, sin_a = tl.load(cos + at + one, mask=turns, other=1.0), tl.load(sin + at + one, mask=turns, other=0.0)
    cos_b, sin_b = tl.load(cos + at + two, mask=turns, other=1.0), tl.load(sin + at + two, mask=turns, other=0.0)
    first = _times(a, cos_a) - _times(b, sin_a)
    second = _times(b, cos_b) + _times(a, sin_b)
    return first.to(a.dtype), second.to(a.dtype)


@triton.jit
def _times(a, b):
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype).to(tl.float32)


@counted
def _norm_and_turn(
    queries, keys, q_norm, k_norm, cos, sin, rows, start, per_row, eps, heads, stride_row, stride_head, stride_column,
    OFFSET: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, BY_COLUMN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token, in place: queries where `_project` put them, keys in the cache."""
    token, head, pair = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    inside, half = pair < DIM // 2, ROTARY // 2
    one = tl.where(pair < half, pair, pair + half)
    two = one + tl.where(pair < half, half, (DIM - ROTARY) // 2)
    at, weight = queries + (token * heads + head) * DIM, q_norm
    if head >= heads:
        row, column = tl.load(rows + token // per_row).to(tl.int64), token % per_row + tl.load(start)
        at, weight = keys + row * stride_row + (head - heads) * stride_head + column * stride_column, k_norm
    a, b = tl.load(at + one, mask=inside, other=0.0), tl.load(at + two, mask=inside, other=0.0)
    scale = tl.rsqrt((_squares(a) + _squares(b)) / DIM + eps)
    kind = queries.dtype.element_ty
    a = _gained(a.to(tl.float32) * scale, tl.load(weight + one, mask=inside, other=0.0), 0.0, OFFSET, False, kind)
    b = _gained(b.to(tl.float32) * scale, tl.load(weight + two, mask=inside, other=0.0), 0.0, OFFSET, False, kind)
    if ROTARY > 0:
        angle = token + tl.load(start) if BY_COLUMN else token
        a, b = _turned(a, b, cos, sin, angle * ROTARY, one, two, pair < half)
    tl.store(at + one, a, mask=inside)
    tl.store(at + two, b, mask=inside)


@triton.jit
def _squares(x):
    return tl.sum(x.to(tl.float32) * x.to(tl.float32), 0)


# ---- attention --------------------------------------------------------------------------------------------------------------


@counted
def _attend(
    queries, keys, values, rows, origins, start, out, peaks, sums, tokens, per_row, scaling,
    heads, kv_heads, stride_row, stride_head, stride_column,
    WINDOW: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, ONLY: tl.constexpr,
):  # fmt: skip
    """A token's queries of one key head and a stretch of keys; ONLY: there is one stretch, so the result is whole."""
    token, own, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, group = tl.load(rows + token // per_row).to(tl.int64), heads // kv_heads
    origin, place, dim = tl.load(origins + token // per_row), tl.arange(0, GROUP), tl.arange(0, BLOCK)
    newest = token % per_row + tl.load(start) - origin  # positions count from the row's first token
    oldest = newest * 0
    if WINDOW != 0:
        oldest = tl.maximum(oldest, newest + 1 - WINDOW)
    used, real = (place < group)[:, None], (dim < DIM)[None, :]
    head = own * group + place
    at = (token * heads + head)[:, None] * DIM + dim[None, :]
    asked = tl.load(queries + at, mask=used & real, other=0.0)
    cache = row * stride_row + own * stride_head + origin.to(tl.int64) * stride_column
    peak, total = tl.full((GROUP,), float("-inf"), tl.float32), tl.zeros((GROUP,), tl.float32)
    mixed = tl.zeros((GROUP, BLOCK), tl.float32)
    for tile in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, newest + 1), TILE):
        position = tile + tl.arange(0, TILE)
        seen = (position <= newest) & (position >= oldest)
        where = cache + position[:, None] * stride_column + dim[None, :]
        key = tl.load(keys + where, mask=seen[:, None] & real, other=0.0)
        value = tl.load(values + where, mask=seen[:, None] & real, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights, kept = tl.exp(scores - safe[:, None]), tl.exp(peak - safe)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = higher
    if ONLY:
        tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=used & real)
    else:
        part = split * tokens * heads
        tl.store(out + part * DIM + at, mixed, mask=used & real)
        tl.store(peaks + part + token * heads + head, peak, mask=place < group)
        tl.store(sums + part + token * heads + head, total, mask=place < group)


@counted
def _join(
    parts, peaks, sums, out, start, origins, per_row, tokens, heads, DIM: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr
):
    """The stretches of one head of one token, one after the other."""
    token, head, dim = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    newest = token % per_row + tl.load(start) - tl.load(origins + token // per_row)
    at = token * heads + head
    peak, total, mixed = float("-inf"), 0.0, tl.zeros((BLOCK,), tl.float32)
    for split in range(0, newest // SPLIT + 1):
        part = split * tokens * heads + at
        own = tl.load(peaks + part)
        higher = tl.maximum(peak, own)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(peak - safe), tl.exp(own - safe)
        total = total * kept + tl.load(sums + part) * added
        mixed = mixed * kept + tl.load(parts + part * DIM + dim, mask=dim < DIM, other=0.0) * added
        peak = higher
    tl.store(out + at * DIM + dim, (mixed / total).to(out.dtype.element_ty), mask=dim < DIM)


def project(layer: Layer, tokens: Pass, h: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(tokens, heads * dim) queries of normed states; keys and values go into the cache."""
    dim, (height, width), kv_heads = layer.head_dim, layer.q.shape, keys.shape[1]
    half = 32 if height >= 2048 and dim >= 64 else 16
    tile = _tile(layer.q, 2 * half, 256, 4)
    queries, heads, turned = h.new_empty(len(h), height), height // dim, tokens.cos.shape[1] if layer.rotary else 0
    places = tokens.rows, tokens.start
    biases = (layer.q_bias, layer.k_bias, layer.v_bias) if len(layer.q_bias) else (h, h, h)
    first, later = (0, turned) if len(layer.q_norm) else (turned, 0)
    by_column = len(tokens.cos) > len(h)
    _project[(heads + 2 * kv_heads, triton.cdiv(dim // 2, half))](
        h, layer.q, layer.k, layer.v, *biases, tokens.cos, tokens.sin, queries, keys, values, *places,
        len(h), tokens.width, width, heads, kv_heads, *keys.stride()[:3],
        dim, first, by_column, len(layer.q_bias) > 0, half, tile.columns, tile.even, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    if len(layer.q_norm):
        _norm_and_turn[(len(h), heads + kv_heads)](
            queries, keys, layer.q_norm, layer.k_norm, tokens.cos, tokens.sin, *places, tokens.width, layer.eps, heads,
            *keys.stride()[:3], layer.norm_offset, dim, later, by_column, triton.next_power_of_2(dim // 2), num_warps=1,
        )  # fmt: skip
    return queries


def attend(
    layer: Layer, tokens: Pass, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, most: int
) -> torch.Tensor:
    """(tokens, heads * dim) queries -> what they see; no row has more than `most` tokens."""
    dim, kv_heads, heads, splits = layer.head_dim, keys.shape[1], queries.shape[1] // layer.head_dim, triton.cdiv(most, SPLIT)
    out, block, tile = (
        torch.empty_like(queries),
        max(16, triton.next_power_of_2(dim)),
        TILE if queries.element_size() == 2 else TILE // 4,
    )
    parts = out if splits == 1 else queries.new_empty(splits, *queries.shape, dtype=torch.float32)
    peaks, sums = queries.new_empty(2, splits, len(queries), heads, dtype=torch.float32)
    _attend[(len(queries), kv_heads, splits)](
        queries, keys, values, tokens.rows, tokens.origins, tokens.start, parts, peaks, sums, len(queries), tokens.width,
        layer.scaling, heads, kv_heads, *keys.stride()[:3],
        layer.window, dim, max(16, triton.next_power_of_2(heads // kv_heads)), SPLIT, tile, block, splits == 1,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _join[(len(queries), heads)](
            parts, peaks, sums, out, tokens.start, tokens.origins, tokens.width, len(queries), heads,
            dim, SPLIT, block, num_warps=1,
        )  # fmt: skip
    return out


# ---- the layer --------------------------------------------------------------------------------------------------------------


def decoder_layer(layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None = None) -> None:
    """As in `reference.py`, with `rows`, `origins` and `start` on the device; no row has more than `most` tokens."""
    x = tokens.x
    h = norm(x, input_norm(layer))
    queries = project(layer, tokens, h, keys, values)
    seen = attend(layer, tokens, queries, keys, values, most or keys.shape[2])
    linear(seen, layer.o, layer.o_bias, x, layer.residual)
    h = norm(x, mlp_norm(layer))
    linear(gated(h, layer.gate, layer.up, layer.activation), layer.down, EMPTY, x, layer.residual)
