"""Attention for long passes of prompts on a GPU, in Triton: the arithmetic of `triton_attention.py` for many queries at once.

There a tile's keys are the rows of a product, because a round has few queries. Here the queries are, so that weights go from
one product into the next in registers. Both sum in the same order: over a head's numbers for a score, over a tile's keys for
everything else, always by tensor cores, and over tiles and chunks one after the other. So a token's bits are the same.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.cards import card_of, prompt_tile
from TIDE.kernels.layer import Attention, Pass
from TIDE.kernels.triton_launch import begin, kernel, looped

LEAST = 32  # tokens of a group


def suits(tokens: Pass, queries: torch.Tensor, shared: int) -> bool:
    """Return True if groups are as large as this kernel wants them."""
    groups = tokens.groups
    return isinstance(groups, torch.Tensor) and groups.shape[1] >= LEAST and queries.element_size() == 2 and shared <= 64


def attend_prompts(
    attention: Attention, tokens: Pass, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, strides, chunk: int
) -> torch.Tensor:
    """Return what the tokens of a pass see, (n, heads * head_dim)."""
    dim, kv_heads, out = attention.head_dim, keys.shape[1], torch.empty_like(queries)
    heads, block = queries.shape[1] // dim, max(16, triton.next_power_of_2(dim))
    shared, padded = heads // kv_heads, triton.next_power_of_2(heads // kv_heads)
    tile = prompt_tile(card_of(queries.device), block)
    each = max(1, min(tile.queries // padded, tokens.groups.shape[1]))
    groups = tokens.groups.reshape(-1, each)
    _attend_prompts[(len(groups), kv_heads)](
        queries, keys, values, tokens.rows, tokens.positions, tokens.tables, groups, out, attention.scaling, each, heads,
        *strides, attention.window, attention.cap, dim, block, shared, padded, max(16, each * padded), tile.keys, chunk,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@kernel
def _attend_prompts(
    queries, keys, values, rows, positions, tables, groups, out, scaling, each, heads,
    stride_table, stride_block, stride_head, stride_column,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
    HEADS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a group that share a key head: row m is head m % HEADS of the token m // HEADS."""
    begin(PDL, LOOPS=True)
    group, own = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)  # those that take longest begin
    place, dim = tl.arange(0, M), tl.arange(0, BLOCK)
    member, head = place // HEADS, place % HEADS
    leader = tl.load(groups + group * each)
    if leader < 0:
        return
    token = tl.load(groups + group * each + member, mask=member < each, other=-1)
    row = tl.load(rows + leader).to(tl.int64)
    is_there = (token >= 0) & (head < SHARED)
    newest = tl.load(positions + token, mask=token >= 0, other=-1)
    top, oldest, first = tl.max(newest, 0), newest * 0, 0
    if WINDOW != 0:
        oldest = tl.maximum(oldest, newest + 1 - WINDOW)
        first = tl.min(tl.where(token >= 0, oldest, top), 0) // CHUNK
    table, base = tables + row * stride_table, own.to(tl.int64) * stride_head
    at = (token * heads + own * SHARED + head)[:, None].to(tl.int64) * DIM + dim[None, :]
    known = is_there[:, None] & (dim < DIM)[None, :]
    asked = tl.load(queries + at, mask=known, other=0.0)
    peak, total, mixed = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, BLOCK), tl.float32)
    for chunk in range(first, top // CHUNK + 1):
        own_peak, own_total, own_mixed = _chunk(
            asked, keys + base, values + base, table, chunk, top, newest, oldest, scaling, stride_block, stride_column,
            SIZE, WINDOW, CAP, DIM, BLOCK, M, TILE, CHUNK,
        )  # fmt: skip
        higher = tl.maximum(peak, own_peak)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        kept, added = tl.exp(peak - safe), tl.exp(own_peak - safe)
        total = tl.fma(total, kept, own_total * added)
        mixed = tl.fma(mixed, kept[:, None], own_mixed * added[:, None])
        peak = higher
    looped(PDL)
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=known)


@triton.jit
def _chunk(
    asked, keys, values, table, chunk, top, newest, oldest, scaling, stride_block, stride_column,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of a chunk, up to position `top`. A tile lies in one block.

    Masks that are not needed are not made: they cost registers, and those are what this loop has least of.
    """
    dim, inside, first = tl.arange(0, BLOCK), tl.arange(0, TILE), chunk * CHUNK
    stop = tl.minimum(first + CHUNK, top + 1)
    peak, mixed = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M, BLOCK), tl.float32)
    totals, ones = tl.zeros((M, 16), tl.float32), tl.full((TILE, 16), 1.0, asked.dtype)
    for tile in range(first, stop, TILE):
        position = tile + inside
        block = tl.load(table + tile // SIZE).to(tl.int64)
        where = block * stride_block + position % SIZE * stride_column
        written = (position < stop)[:, None]
        if DIM != BLOCK:
            written &= (dim < DIM)[None, :]
        key = tl.load(keys + where[:, None] + dim[None, :], mask=written, other=0.0)
        value = tl.load(values + where[:, None] + dim[None, :], mask=written, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scaling
        if CAP > 0:
            scores = CAP * (2 * tl.sigmoid(2 * scores / CAP) - 1)  # CAP * tanh(scores / CAP)
        seen = position[None, :] <= newest[:, None]
        if WINDOW != 0:
            seen &= position[None, :] >= oldest[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights, kept = tl.exp(scores - safe[:, None]).to(value.dtype), tl.exp(peak - safe)
        totals = tl.dot(weights, ones, totals * kept[:, None], input_precision="ieee")
        mixed = tl.dot(weights, value, mixed * kept[:, None], input_precision="ieee")
        peak = higher
    return peak, tl.max(totals, 1), mixed
