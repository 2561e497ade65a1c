"""Attention for long passes of prompts on a GPU, in Triton: the arithmetic of `triton/attention.py` for many queries at once.

There a tile's keys are the rows of a product, because a round has few queries. Here the queries are, so that weights go from
one product into the next in registers. Both sum in the same order: over a head's numbers for a score, over a tile's keys for
everything else, always by tensor cores, and over tiles and chunks one after the other. So a token's bits are the same.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import Attention, Pass
from TIDE.kernels.triton import long_passes
from TIDE.kernels.triton.launch import begin, kernel, looped
from TIDE.kernels.triton.tiles import card_of, prompt_tile

LEAST = 32  # tokens of a group
LOG2E = tl.constexpr(1.4426950408889634)


def factor_of(attention: Attention) -> float:
    """Return what products of queries and keys are multiplied with: capped ones become scores, others powers of two."""
    assert attention.scaling > 0, "the highest score is that of the highest product"
    return attention.scaling if attention.cap else attention.scaling * LOG2E.value


def suits(tokens: Pass, queries: torch.Tensor, shared: int) -> bool:
    """Return True if groups are as large as this kernel wants them."""
    groups = tokens.groups
    return isinstance(groups, torch.Tensor) and groups.shape[1] >= LEAST and queries.element_size() == 2 and shared <= 64


def attend_prompts(
    attention: Attention, tokens: Pass, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, strides, chunk: int
) -> torch.Tensor:
    """Return what the tokens of a pass see, (n, heads * head_dim)."""
    dim, kv_heads, card = attention.head_dim, keys.shape[1], card_of(queries.device)
    heads, block = queries.shape[1] // dim, max(16, triton.next_power_of_2(dim))
    shared, padded = heads // kv_heads, triton.next_power_of_2(heads // kv_heads)
    found = long_passes.attend(attention, tokens, queries, keys, values, factor_of(attention), padded, chunk)
    if found is not None:
        return found
    tile, out = prompt_tile(card, block), torch.empty_like(queries)
    each = max(1, min(tile.queries // padded, tokens.groups.shape[1]))
    groups = tokens.groups.reshape(-1, each)
    _attend_prompts[(len(groups), kv_heads)](
        queries, keys, values, tokens.rows, tokens.positions, tokens.tables, groups, out, factor_of(attention), each, heads,
        *strides, attention.window, attention.cap, dim, block, shared, padded, max(16, each * padded), tile.keys, chunk,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


@kernel
def _attend_prompts(
    queries, keys, values, rows, positions, tables, groups, out, factor, each, heads,
    stride_table, stride_block, stride_head, stride_column,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
    HEADS: tl.constexpr, M: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a group that share a key head: row m is head m % HEADS of the token m // HEADS.

    All tokens see the tiles before `clear` whole, so those need no masks. One loop has the tiles of all chunks, because a loop
    that begins waits for its first tiles; what a chunk has is merged when the next one begins.
    """
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
    table, base = tables + row * stride_table, own.to(tl.int64) * stride_head
    at = (token * heads + own * SHARED + head)[:, None].to(tl.int64) * DIM + dim[None, :]
    known = is_there[:, None] & (dim < DIM)[None, :]
    asked = tl.load(queries + at, mask=known, other=0.0)
    peak, total, mixed = tl.full((M,), float("-inf"), tl.float32), tl.zeros((M,), tl.float32), tl.zeros((M, BLOCK), tl.float32)
    own_peak, own_totals, own_mixed = _no_chunk(M, BLOCK)
    if WINDOW == 0:
        clear = (tl.min(tl.where(token >= 0, newest, top), 0) + 1) // TILE * TILE
        for tile in range(0, clear, TILE):
            peak, total, mixed, own_peak, own_totals, own_mixed = _tile(
                asked, keys + base, values + base, table, tile, top, newest, oldest, factor, stride_block, stride_column,
                peak, total, mixed, own_peak, own_totals, own_mixed, SIZE, WINDOW, CAP, DIM, BLOCK, M, TILE, CHUNK, True,
            )  # fmt: skip
        for tile in tl.range(clear, top + 1, TILE, num_stages=1):  # few, and registers are scarce
            peak, total, mixed, own_peak, own_totals, own_mixed = _tile(
                asked, keys + base, values + base, table, tile, top, newest, oldest, factor, stride_block, stride_column,
                peak, total, mixed, own_peak, own_totals, own_mixed, SIZE, WINDOW, CAP, DIM, BLOCK, M, TILE, CHUNK, False,
            )  # fmt: skip
    else:
        oldest = tl.maximum(oldest, newest + 1 - WINDOW)
        first = tl.min(tl.where(token >= 0, oldest, top), 0) // CHUNK * CHUNK
        for tile in range(first, top + 1, TILE):
            peak, total, mixed, own_peak, own_totals, own_mixed = _tile(
                asked, keys + base, values + base, table, tile, top, newest, oldest, factor, stride_block, stride_column,
                peak, total, mixed, own_peak, own_totals, own_mixed, SIZE, WINDOW, CAP, DIM, BLOCK, M, TILE, CHUNK, False,
            )  # fmt: skip
    _, total, mixed = _merged(peak, total, mixed, own_peak, own_totals, own_mixed)
    looped(PDL)
    tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=known)


@triton.jit
def _tile(
    asked, keys, values, table, tile, top, newest, oldest, factor, stride_block, stride_column,
    peak, total, mixed, own_peak, own_totals, own_mixed,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, CLEAR: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of a tile, up to position `top`. It lies in one block. CLEAR: all tokens see all of it.

    Masks that are not needed are not made: they cost registers, and those are what this loop has least of.

    Args:
        peak, total, mixed: of the chunks before.
        own_peak, own_totals, own_mixed: of the chunk that the tile is in, or of the one before if it begins here.
    """
    dim, position, unit = tl.arange(0, BLOCK), tile + tl.arange(0, TILE), in_powers(factor, CAP)
    block = tl.load(table + tile // SIZE).to(tl.int64)
    where = (block * stride_block + position % SIZE * stride_column)[:, None] + dim[None, :]
    if CLEAR and DIM == BLOCK:
        key, value = tl.load(keys + where), tl.load(values + where)
    else:
        written = (position <= top)[:, None] & (dim < DIM)[None, :]
        key, value = tl.load(keys + where, mask=written, other=0.0), tl.load(values + where, mask=written, other=0.0)
    scores = capped(tl.dot(asked, tl.trans(key), input_precision="ieee"), factor, CAP)
    if tile % CHUNK == 0:
        peak, total, mixed = _merged(peak, total, mixed, own_peak, own_totals, own_mixed)
        own_peak, own_totals, own_mixed = _no_chunk(M, BLOCK)
    if not CLEAR:
        seen = position[None, :] <= newest[:, None]
        if WINDOW != 0:
            seen &= position[None, :] >= oldest[:, None]
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(own_peak, tl.max(scores, 1) * unit)
    safe, ones = tl.where(higher == float("-inf"), 0.0, higher), tl.full((TILE, 16), 1.0, asked.dtype)
    weights, kept = tl.exp2(tl.fma(scores, unit, -safe[:, None])).to(value.dtype), tl.exp2(own_peak - safe)
    own_totals = tl.dot(weights, ones, own_totals * kept[:, None], input_precision="ieee")
    own_mixed = tl.dot(weights, value, own_mixed * kept[:, None], input_precision="ieee")
    return peak, total, mixed, higher, own_totals, own_mixed


@triton.jit
def _no_chunk(M: tl.constexpr, BLOCK: tl.constexpr):
    return tl.full((M,), float("-inf"), tl.float32), tl.zeros((M, 16), tl.float32), tl.zeros((M, BLOCK), tl.float32)


@triton.jit
def _merged(peak, total, mixed, own_peak, own_totals, own_mixed):
    """Join what a softmax has so far and what it has of one more chunk."""
    higher = tl.maximum(peak, own_peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(peak - safe), tl.exp2(own_peak - safe)
    total = tl.fma(total, kept, tl.max(own_totals, 1) * added)
    return higher, total, tl.fma(mixed, kept[:, None], own_mixed * added[:, None])


@triton.jit
def capped(scores, factor, CAP: tl.constexpr):
    """Return the scores of products; without CAP they are the products, for whoever takes powers multiplies them."""
    if CAP > 0:
        scores = CAP * (2 * tl.sigmoid(2 * (scores * factor) / CAP) - 1)  # CAP * tanh(scores / CAP)
    return scores


@triton.jit
def in_powers(factor, CAP: tl.constexpr):
    """Return what scores are multiplied with to be powers of two."""
    if CAP > 0:
        return LOG2E
    else:
        return factor
