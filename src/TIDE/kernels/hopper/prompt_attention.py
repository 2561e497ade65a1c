"""Attention for long passes of prompts on GPUs of compute capability 9.0, in Gluon, Triton's lower layer: the same bits as
`triton/prompt_attention.py`, with loads, products and powers under way at once.

    loader      one warp; it brings tiles of keys and values into shared memory as soon as there is room for them
    half        four warps with 64 queries; there are two of them, and while one makes weights the other one multiplies
    ready       barriers: a tile is in shared memory
    free        barriers: both halves have read it

A half multiplies its queries with a tile's keys, and the weights of the tile before with that one's values; it makes the tile's
weights while the second product runs. Sums of the chunks before wait in shared memory: registers hold those of one chunk.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from TIDE.kernels.hopper.tiles import barrier, load_tile, tiles_of
from TIDE.kernels.layer import Pass

QUERIES = 128  # of a program
TILE = gl.constexpr(64)  # keys, and queries of a half
STAGES = gl.constexpr(3)  # tiles of keys, and of values, in shared memory


def attend_in_halves(
    tokens: Pass, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, factor: float, padded: int, chunk: int
) -> torch.Tensor:
    """Return what the tokens of a pass see, (n, heads * head_dim).

    Args:
        factor: products of queries and keys become powers of two by it.
        padded: queries that share a key head, with padding.
    """
    assert keys.is_contiguous() and values.is_contiguous(), "a tile is found by the number of its first row"
    kv_heads, dim, out = keys.shape[1], keys.shape[3], torch.empty_like(queries)
    heads, groups = queries.shape[1] // dim, tokens.groups.reshape(-1, QUERIES // padded)
    tiles = (tiles_of(own, TILE.value, dim) for own in (keys, values))
    _attend[(len(groups), kv_heads)](
        queries, *tiles, tokens.rows, tokens.positions, tokens.tables, groups, out, factor, heads, kv_heads,
        tokens.tables.stride(0), dim, heads // kv_heads, padded, chunk, num_warps=4,
    )  # fmt: skip
    return out


@gluon.jit(do_not_specialize=["stride_table"], do_not_specialize_on_alignment=["rows", "positions", "tables", "groups"])
def _attend(
    queries, key_tiles, value_tiles, rows, positions, tables, groups, out, factor, heads, kv_heads, stride_table,
    DIM: gl.constexpr, SHARED: gl.constexpr, HEADS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Attend with the queries of a group that share a key head: row m is head m % HEADS of the token m // HEADS."""
    dtype: gl.constexpr = queries.dtype.element_ty
    group, own = gl.num_programs(0) - 1 - gl.program_id(0), gl.program_id(1)  # those that take longest begin
    members = groups + group * (2 * TILE // HEADS)
    place = gl.arange(0, 2 * TILE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    token = gl.load(members + place // HEADS)
    newest = gl.load(positions + token, mask=token >= 0, other=-1)
    top, lowest = gl.max(newest, 0), gl.where(token >= 0, newest, 1 << 30)
    lowest_0, lowest_1 = gl.where(place < TILE, lowest, 1 << 30), gl.where(place < TILE, 1 << 30, lowest)
    clear_0, clear_1 = (gl.min(lowest_0, 0) + 1) // TILE, (gl.min(lowest_1, 0) + 1) // TILE
    row = gl.load(rows + gl.maximum(gl.load(members), 0)).to(gl.int64)

    OF_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, DIM], dtype)
    OF_ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, TILE], dtype)
    asked = gl.allocate_shared_memory(dtype, [2, TILE, DIM], OF_TILE)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], OF_TILE)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE, DIM], OF_TILE)
    sums = gl.allocate_shared_memory(gl.float32, [2, TILE, DIM], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    ones = gl.allocate_shared_memory(dtype, [8, TILE], OF_ONES)
    ones.store(gl.full((8, TILE), 1.0, dtype, layout=gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])))
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_ready.index(stage), count=1)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (_half, (queries, positions, members, out, factor, heads, own, top, clear_0, asked.index(0), keys, values, ones,
                     sums.index(0), keys_ready, keys_free, values_ready, values_free, 0, DIM, SHARED, HEADS, CHUNK)),
            (_half, (queries, positions, members, out, factor, heads, own, top, clear_1, asked.index(1), keys, values, ones,
                     sums.index(1), keys_ready, keys_free, values_ready, values_free, 1, DIM, SHARED, HEADS, CHUNK)),
            (_load, (key_tiles, value_tiles, tables + row * stride_table, own, kv_heads, top, keys, values, keys_ready,
                     keys_free, values_ready, values_free, DIM)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _load(
    key_tiles, value_tiles, table, own, kv_heads, top, keys, values, keys_ready, keys_free, values_ready, values_free,
    DIM: gl.constexpr,
):  # fmt: skip
    """Load the tiles up to position `top`, each when both halves have read the one that was in its place."""
    tiles = (top + TILE) // TILE
    block = gl.load(table)
    for tile in range(0, tiles):
        stage, is_odd = tile % STAGES, tile // STAGES & 1
        at = (block * kv_heads + own) * TILE
        mbarrier.wait(keys_free.index(stage), is_odd ^ 1)
        mbarrier.expect(keys_ready.index(stage), 2 * TILE * DIM)
        load_tile(key_tiles, [at, 0], keys_ready.index(stage), keys.index(stage))
        block = gl.load(table + gl.minimum(tile + 1, tiles - 1))
        mbarrier.wait(values_free.index(stage), is_odd ^ 1)
        mbarrier.expect(values_ready.index(stage), 2 * TILE * DIM)
        load_tile(value_tiles, [at, 0], values_ready.index(stage), values.index(stage))


@gluon.jit
def _half(
    queries, positions, members, out, factor, heads, own, top, clear, asked, keys, values, ones, sums,
    keys_ready, keys_free, values_ready, values_free,
    HALF: gl.constexpr, DIM: gl.constexpr, SHARED: gl.constexpr, HEADS: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """Attend with 64 of a program's queries. Their tokens see the first `clear` tiles whole."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    OF_MIXED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OF_TOTALS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    IN_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    at, known = _places(members, heads, own, HALF, DIM, SHARED, HEADS, IN_ROWS)
    asked.store(gl.load(queries + at, mask=known, other=0.0))
    barrier()
    query = asked.load(gl.DotOperandLayout(0, OF_SCORES, 2))  # in registers: shared memory is busy enough with keys
    token = gl.load(members + (HALF * TILE + gl.arange(0, TILE, layout=ROW)) // HEADS)
    newest = gl.load(positions + token, mask=token >= 0, other=-1)
    inside, none = gl.arange(0, TILE, layout=gl.SliceLayout(0, OF_SCORES)), gl.zeros((TILE, TILE), gl.float32, layout=OF_SCORES)
    peak, total = gl.full((TILE,), float("-inf"), gl.float32, layout=ROW), gl.zeros((TILE,), gl.float32, layout=ROW)
    nothing = gl.zeros((TILE, DIM), gl.float32, layout=OF_MIXED)
    sums.store(nothing)
    tiles = (top + TILE) // TILE
    for start in range(0, tiles, CHUNK // TILE):
        end = gl.minimum(start + CHUNK // TILE, tiles)
        totals, mixed = gl.zeros((TILE, 8), gl.float32, layout=OF_TOTALS), nothing
        mbarrier.wait(keys_ready.index(start % STAGES), start // STAGES & 1)
        product = warpgroup_mma(query, keys.index(start % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(product,))
        mbarrier.arrive(keys_free.index(start % STAGES), count=1)
        none_before = gl.full((TILE,), float("-inf"), gl.float32, layout=ROW)
        powers, own_peak, kept = _powers(scores, none_before, start, clear, newest, inside, factor, none)
        mbarrier.wait(values_ready.index(start % STAGES), start // STAGES & 1)
        for tile in range(start + 1, end):
            stage, before = tile % STAGES, (tile - 1) % STAGES
            weights = powers.to(queries.dtype.element_ty)
            mbarrier.wait(keys_ready.index(stage), tile // STAGES & 1)
            product = warpgroup_mma(query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
            totals_to_be, mixed_to_be = _weighed(weights, values.index(before), ones, totals, mixed, OF_TOTALS, OF_MIXED)
            scores = warpgroup_mma_wait(2, deps=(product,))
            mbarrier.arrive(keys_free.index(stage), count=1)
            powers, own_peak, kept = _powers(scores, own_peak, tile, clear, newest, inside, factor, none)
            # Where this is waited for, a block of instructions ends: ptxas would make the powers behind the product otherwise.
            mbarrier.wait(values_ready.index(stage), tile // STAGES & 1)
            totals, mixed, powers = warpgroup_mma_wait(0, deps=(totals_to_be, mixed_to_be, powers))
            mbarrier.arrive(values_free.index(before), count=1)
            totals = totals * gl.convert_layout(kept, gl.SliceLayout(1, OF_TOTALS))[:, None]
            mixed = mixed * gl.convert_layout(kept, gl.SliceLayout(1, OF_MIXED))[:, None]
        last = (end - 1) % STAGES
        if end * TILE > top + 1:
            _clean(values.index(last), top + 1 - (end - 1) * TILE, IN_ROWS)
        weights = powers.to(queries.dtype.element_ty)
        totals_to_be, mixed_to_be = _weighed(weights, values.index(last), ones, totals, mixed, OF_TOTALS, OF_MIXED)
        totals, mixed = warpgroup_mma_wait(0, deps=(totals_to_be, mixed_to_be))
        mbarrier.arrive(values_free.index(last), count=1)
        higher = gl.maximum(peak, own_peak)
        safe = gl.where(higher == float("-inf"), 0.0, higher)
        kept, added = gl.exp2(peak - safe), gl.exp2(own_peak - safe)
        total = gl.fma(total, kept, gl.convert_layout(gl.max(totals, 1), ROW) * added)
        kept_in_rows = gl.convert_layout(kept, gl.SliceLayout(1, OF_MIXED))[:, None] + nothing
        added_in_rows = gl.convert_layout(added, gl.SliceLayout(1, OF_MIXED))[:, None]
        sums.store(gl.fma(sums.load(OF_MIXED), kept_in_rows, mixed * added_in_rows))
        peak = higher
    found = sums.load(OF_MIXED) / gl.convert_layout(total, gl.SliceLayout(1, OF_MIXED))[:, None]
    at, known = _places(members, heads, own, HALF, DIM, SHARED, HEADS, OF_MIXED)
    gl.store(out + at, found.to(out.dtype.element_ty), mask=known)


@gluon.jit
def _places(
    members, heads, own, HALF: gl.constexpr, DIM: gl.constexpr, SHARED: gl.constexpr, HEADS: gl.constexpr, LAYOUT: gl.constexpr
):  # fmt: skip
    """Return where the queries of a half are, and which of them are there."""
    place = HALF * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    token, head = gl.load(members + place // HEADS), place % HEADS
    at = (token * heads + own * SHARED + head).to(gl.int64)[:, None] * DIM + dim[None, :]
    return at, ((token >= 0) & (head < SHARED))[:, None] & (dim >= 0)[None, :]


@gluon.jit
def _powers(scores, peak, tile, clear, newest, inside, factor, none):
    """Return the weights of a tile's scores, the highest score so far, and what is kept of the weights before."""
    if tile >= clear:
        scores = gl.where((tile * TILE + inside)[None, :] <= newest[:, None], scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * factor)
    safe = gl.where(higher == float("-inf"), 0.0, higher)
    return gl.exp2(gl.fma(scores, none + factor, none - safe[:, None])), higher, gl.exp2(peak - safe)


@gluon.jit
def _weighed(weights, value, ones, totals, mixed, OF_TOTALS: gl.constexpr, OF_MIXED: gl.constexpr):
    """Begin to add a tile's weights and weighed values."""
    for_totals = gl.convert_layout(weights, gl.DotOperandLayout(0, OF_TOTALS, 2))
    for_mixed = gl.convert_layout(weights, gl.DotOperandLayout(0, OF_MIXED, 2))
    totals = warpgroup_mma(for_totals, ones.permute((1, 0)), totals, is_async=True)
    return totals, warpgroup_mma(for_mixed, value, mixed, is_async=True)


@gluon.jit
def _clean(value, length, LAYOUT: gl.constexpr):
    """Write zeros behind the newest value: anything may lie there, and 0 times NaN is NaN. Both halves write the same."""
    inside = gl.arange(0, TILE, layout=gl.SliceLayout(1, LAYOUT))
    found = gl.where((inside < length)[:, None], value.load(LAYOUT), 0.0)
    value.store(found.to(value.dtype))
    fence_async_shared()
    barrier()
