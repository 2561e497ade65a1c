"""Attention on a GPU, in Triton: all tokens of a row that are in a pass read its K/V once.

    tile        keys that a program loads at a time
    chunk       CHUNK keys, counted from the row's first token; each has a softmax of its own
    group       tokens of one row: their queries of one key head lie side by side in a product

A program takes a group and a key head, and one chunk or all of them. Chunks are merged one after the other, by the program that
ends last or by the one that has them all. So a token's bits depend neither on the tokens in its group nor on how the chunks are
spread over programs: keys that it does not see change nothing, not even a rounding. Tokens of a tree have a program each: one
finds the newest columns through its ancestors, in the order of positions, and so has the bits of the same tokens in a row.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from TIDE.kernels.layer import Attention, Pass
from TIDE.kernels.triton.launch import begin, kernel, looped
from TIDE.kernels.triton.prompt_attention import attend_prompts, capped, factor_of, in_powers, suits
from TIDE.kernels.triton.tiles import attention_tile, card_of, keeps_busy, most_queries

CHUNK = 512
MERGED = 16  # chunks whose parts are loaded at a time
COUNTERS = 4096  # more programs than a card needs to be busy


@kernel
def _attend(
    queries, keys, values, rows, columns, positions, tables, groups, roots, ancestors, out, parts, peaks, sums, arrived,
    factor, chunks, together, each, heads, kv_heads, stride_group, stride_member, stride_ancestors, stride_table,
    stride_block, stride_head, stride_column,
    SIZE: tl.constexpr, WINDOW: tl.constexpr, BEGIN: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    MERGED: tl.constexpr, IN_TURN: tl.constexpr, WHOLE: tl.constexpr, TREE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of a group that share a key head.

    SHARED queries have one key head, padded to HEADS. Column n of a product is head n % HEADS of the token n // HEADS; of N
    columns the first COLUMNS may be there.
    """
    begin(PDL, LOOPS=True)
    group, own, column = tl.program_id(0), tl.program_id(1), tl.arange(0, N)
    member, head = column // HEADS, column % HEADS
    if IN_TURN:  # what is known is not loaded: a load that waits for another one takes as long as a tile
        row, before = (group % stride_member).to(tl.int64), group // stride_member * each
        leader = before * stride_member + group % stride_member
        there = tl.minimum(each, together - before)
        token = tl.where(member < there, leader + member * stride_member, -1)
    else:
        there = each
        token = tl.load(groups + group * stride_group + member * stride_member, mask=member < each, other=-1)
        leader = tl.load(groups + group * stride_group)
        if leader < 0:
            return
        row = tl.load(rows + leader).to(tl.int64)
    is_there = (token >= 0) & (head < SHARED)
    newest = tl.load(positions + token, mask=token >= 0, other=-1)  # positions count from the row's first token
    top = tl.max(newest, 0)
    oldest, first = newest * 0, 0
    LIMITED: tl.constexpr = WINDOW != 0 or BEGIN != 0
    if BEGIN != 0:
        oldest = tl.minimum(newest, BEGIN)
    if WINDOW != 0:
        oldest = tl.maximum(oldest, newest + 1 - WINDOW)
        first = tl.min(tl.where(token >= 0, oldest, top), 0) // CHUNK
    last, dim = top // CHUNK, tl.arange(0, BLOCK)
    table, base = tables + row * stride_table, own.to(tl.int64) * stride_head
    if SIZE == 0:
        origin = (tl.load(columns + leader) - tl.load(positions + leader)).to(tl.int64)
        base += row * stride_block + origin * stride_column
    root, line = leader, ancestors  # of the only token of a group, if it is in a tree
    if TREE:
        root, line = tl.load(roots + leader), ancestors + leader * stride_ancestors
    at = (token * heads + own * SHARED + head)[None, :].to(tl.int64) * DIM + dim[:, None]
    known = is_there[None, :] & (dim < DIM)[:, None]
    asked = tl.load(queries + at, mask=known, other=0.0)
    if WHOLE:
        peak, total, mixed = _nothing(BLOCK, N)
        for chunk in range(first, last + 1):
            of_chunk = _chunk(
                asked, keys + base, values + base, table, root, line, chunk, top, newest, oldest, factor, stride_table,
                stride_block, stride_column, SIZE, LIMITED, CAP, DIM, BLOCK, N, TILE, CHUNK, TREE,
            )  # fmt: skip
            peak, total, mixed = _merged(peak, total, mixed, of_chunk[0], of_chunk[1], of_chunk[2])
        looped(PDL)
        tl.store(out + at, (mixed / total[None, :]).to(out.dtype.element_ty), mask=known)
    else:
        chunk, last = first + tl.program_id(2), tl.minimum(last, first + chunks - 1)  # no more can arrive
        if chunk > last:
            return
        peak, total, mixed = _chunk(
            asked, keys + base, values + base, table, root, line, chunk, top, newest, oldest, factor, stride_table,
            stride_block, stride_column, SIZE, LIMITED, CAP, DIM, BLOCK, N, TILE, CHUNK, TREE,
        )  # fmt: skip
        looped(PDL)
        if first == last:
            tl.store(out + at, (mixed / total[None, :]).to(out.dtype.element_ty), mask=known)
            return
        counter, wide = group * kv_heads + own, each * SHARED
        part = counter.to(tl.int64) * chunks * wide
        here = part + (chunk - first) * wide + member * SHARED + head
        tl.store(parts + here[None, :] * DIM + dim[:, None], mixed, mask=known)
        tl.store(peaks + here, peak, mask=is_there)
        tl.store(sums + here, total, mask=is_there)
        tl.debug_barrier()  # all of it is written before the program says so
        if tl.atomic_add(arrived + counter, 1) == last - first:
            tl.store(arrived + counter, 0)
            if IN_TURN:
                of_group = out + (leader * heads + own * SHARED).to(tl.int64) * DIM
                _merge(
                    of_group, groups, parts + part * DIM, peaks + part, sums + part, last - first + 1, stride_member * heads,
                    heads, there, wide, DIM, BLOCK, SHARED, HEADS, COLUMNS, MERGED, IN_TURN,
                )  # fmt: skip
            else:
                _merge(
                    out + own.to(tl.int64) * SHARED * DIM, groups + group * stride_group, parts + part * DIM, peaks + part,
                    sums + part, last - first + 1, stride_member, heads, there, wide, DIM, BLOCK, SHARED, HEADS, COLUMNS,
                    MERGED, IN_TURN,
                )  # fmt: skip


@triton.jit
def _chunk(
    asked, keys, values, table, root, line, chunk, top, newest, oldest, factor, stride_table, stride_block, stride_column,
    SIZE: tl.constexpr, LIMITED: tl.constexpr, CAP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Attend to the keys of a chunk, up to position `top`. A tile lies in one block, but for what is behind a tree's root."""
    dim, inside = tl.arange(0, BLOCK), tl.arange(0, TILE)
    real, first = (dim < DIM)[None, :], chunk * CHUNK
    stop = tl.minimum(first + CHUNK, top + 1)
    if SIZE != 0 and not TREE:
        number = tl.arange(0, CHUNK // SIZE)
        blocks = tl.load(table + first // SIZE + number, mask=first // SIZE + number < stride_table, other=0).to(tl.int64)
    unit = in_powers(factor, CAP)
    peak, _, mixed = _nothing(BLOCK, N)
    totals, ones = tl.zeros((16, N), tl.float32), tl.full((16, TILE), 1.0, asked.dtype)  # sums of weights, in one order
    for tile in range(first, stop, TILE):
        position = tile + inside
        where = position.to(tl.int64) * stride_column
        if TREE:
            behind = (position > root) & (position < stop)
            column = tl.where(behind, tl.load(line + position - root - 1, mask=behind, other=0), position)
            block = tl.load(table + column // SIZE, mask=position < stop, other=0).to(tl.int64)
            where = block * stride_block + column % SIZE * stride_column
        elif SIZE != 0:
            block = tl.sum(tl.where(number == (tile - first) // SIZE, blocks, 0), 0)
            where = block * stride_block + position % SIZE * stride_column
        written = (position < stop)[:, None] & real
        key = tl.load(keys + where[:, None] + dim[None, :], mask=written, other=0.0)
        value = tl.load(values + where[:, None] + dim[None, :], mask=written, other=0.0)
        scores = capped(tl.dot(key, asked, input_precision="ieee"), factor, CAP)
        seen = position[:, None] <= newest[None, :]
        if LIMITED:
            seen &= position[:, None] >= oldest[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 0) * unit)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights, kept = tl.exp2(tl.fma(scores, unit, -safe[None, :])).to(value.dtype), tl.exp2(peak - safe)
        totals = tl.dot(ones, weights, totals * kept[None, :], input_precision="ieee")
        mixed = tl.dot(tl.trans(value), weights, mixed * kept[None, :], input_precision="ieee")
        peak = higher
    return peak, tl.max(totals, 0), mixed


@triton.jit
def _merge(
    out, groups, parts, peaks, sums, count, stride_member, heads, there, wide, DIM: tl.constexpr, BLOCK: tl.constexpr,
    SHARED: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, MERGED: tl.constexpr, IN_TURN: tl.constexpr,
):  # fmt: skip
    """Merge the chunks of a group, which other programs have left in memory, in their order."""
    column, dim = tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    member, head = column // HEADS, column % HEADS
    is_there, real, own = (member < there) & (head < SHARED), (dim < DIM)[:, None], member * SHARED + head
    peak, total, mixed = _nothing(BLOCK, COLUMNS)
    for some in range(0, count, MERGED):
        for number in tl.static_range(MERGED):
            inside, here = is_there & (column * 0 + some + number < count), (some + number) * wide + own
            where = here[None, :].to(tl.int64) * DIM + dim[:, None]
            own_peak = tl.load(peaks + here, mask=inside, other=float("-inf"), cache_modifier=".cg")
            own_total = tl.load(sums + here, mask=inside, other=0.0, cache_modifier=".cg")
            own_mixed = tl.load(parts + where, mask=inside[None, :] & real, other=0.0, cache_modifier=".cg")
            peak, total, mixed = _merged(peak, total, mixed, own_peak, own_total, own_mixed)
    if IN_TURN:
        start = member * stride_member
    else:
        token = tl.load(groups + member * stride_member, mask=is_there, other=-1)
        start, is_there = token * heads, is_there & (token >= 0)
    at = (start + head)[None, :].to(tl.int64) * DIM + dim[:, None]
    tl.store(out + at, (mixed / total[None, :]).to(out.dtype.element_ty), mask=is_there[None, :] & real)


@triton.jit
def _nothing(BLOCK: tl.constexpr, N: tl.constexpr):
    return tl.full((N,), float("-inf"), tl.float32), tl.zeros((N,), tl.float32), tl.zeros((BLOCK, N), tl.float32)


@triton.jit
def _merged(peak, total, mixed, own_peak, own_total, own_mixed):
    """Join what a softmax has so far and what it has of one more chunk."""
    higher = tl.maximum(peak, own_peak)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    kept, added = tl.exp2(peak - safe), tl.exp2(own_peak - safe)
    total = tl.fma(total, kept, own_total * added)
    return higher, total, tl.fma(mixed, kept[None, :], own_mixed * added[None, :])


def attend(
    attention: Attention,
    tokens: Pass,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    most: int,
    begins_at: int = 0,
) -> torch.Tensor:
    """Return what the tokens of a pass see, (n, heads * head_dim); no token stands at a position beyond `most`."""
    dim, kv_heads, card = attention.head_dim, keys.shape[1], card_of(queries.device)
    heads, out, block = queries.shape[1] // dim, torch.empty_like(queries), max(16, triton.next_power_of_2(dim))
    shared, padded = heads // kv_heads, triton.next_power_of_2(heads // kv_heads)
    in_tree = tokens.ancestors is not None
    assert tokens.is_paged or not in_tree, "trees are in blocks"
    if tokens.is_paged and not in_tree and not begins_at and suits(tokens, queries, padded):
        return attend_prompts(attention, tokens, queries, keys, values, strides(tokens, keys), CHUNK)
    groups, in_turn = tokens.groups, isinstance(tokens.groups, int) and not in_tree
    if groups is None or in_tree:
        groups = _alone(len(queries), queries.device)
    together = len(queries) // groups if in_turn else groups.shape[1]
    each = min(together, max(1, most_queries(card, block, queries.element_size()) // padded))
    if in_turn:
        count, places = groups * triton.cdiv(together, each), (0, groups)
    else:
        groups = groups.reshape(-1, each)
        count, places = len(groups), groups.stride()
    columns = triton.next_power_of_2(each) * padded
    wide = max(16, columns)
    tile, chunks = attention_tile(card, block, wide, queries.element_size()), triton.cdiv(most, CHUNK)
    assert not tokens.is_paged or keys.shape[2] % tile.keys == 0, f"a tile of {tile.keys} keys is in more than one block"
    if attention.window:
        chunks = min(chunks, triton.cdiv(attention.window + together, CHUNK) + 1)
    is_whole = chunks == 1 or keeps_busy(card, count * kv_heads)
    room = 1 if is_whole else count * kv_heads * chunks * each * shared
    parts = queries.new_empty(room, 1 if is_whole else dim, dtype=torch.float32)
    peaks, sums = queries.new_empty(2, room, dtype=torch.float32)
    roots, line = tokens.ancestors or (tokens.rows, tokens.rows[:, None])
    _attend[(count, kv_heads, 1 if is_whole else chunks)](
        queries, keys, values, tokens.rows, tokens.columns, tokens.positions, tokens.tables,
        tokens.rows if in_turn else groups, roots, line, out, parts, peaks, sums, _counters(queries.device),
        factor_of(attention), chunks, together, each, heads, kv_heads, *places, line.stride(0), *strides(tokens, keys),
        attention.window, begins_at, attention.cap, dim, block, shared, padded, columns, wide, tile.keys, CHUNK, MERGED,
        in_turn, is_whole, in_tree,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def strides(tokens: Pass, keys: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Return the strides of tables, blocks, heads and columns, and the columns of a block: 0 if a block is a row."""
    assert tokens.is_paged or len(tokens.tables) == len(keys), "with one block to a row, there are as many blocks as rows"
    block, head, column = keys.stride()[:3]
    size = keys.shape[2] if tokens.is_paged else 0
    assert not size or CHUNK % size == 0, f"chunks of {CHUNK} keys are not whole blocks of {size}"
    return tokens.tables.stride(0), block, head, column, size


@functools.cache
def _alone(count: int, device: torch.device) -> torch.Tensor:
    """Return groups of one token each."""
    return torch.arange(count, dtype=torch.int32, device=device)[:, None]


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Return counters of chunks that are done, which kernels leave at 0."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)
