"""Trees of drafts on a GPU, in Triton. Functions of the same names in `reference/trees.py` define what each computes.

few_best        a program for a block of tokens of a choice finds the best of it, then one for a choice the best of those
grow            a program for a row: candidates of a level, compared in pairs
choose_nodes    a program for a row: a candidate's rank is how many are before it
straighten      a program for a row: from node to node
move_columns    a program for the keys or values of a layer, a row and a head: all are loaded before any is written
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from TIDE.kernels.reference import sampling
from TIDE.kernels.reference.sampling import Settings
from TIDE.kernels.reference.trees import Beam, Candidates, Chain, Nodes, TreeShape
from TIDE.kernels.triton.launch import begin, kernel
from TIDE.kernels.triton.noise import keys as noise_keys
from TIDE.kernels.triton.noise import noise_of

BLOCK = 1024  # tokens of a program that looks for the best of them
PAIRS = 16  # candidates that all are compared with at once
NONE = tl.constexpr(2147483647)
LEAST = tl.constexpr(float("-inf"))
NOISE, TEMPERATURE = tl.constexpr(sampling.NOISE), tl.constexpr(sampling.TEMPERATURE)
SEED_LOW, SEED_HIGH = tl.constexpr(sampling.SEED_LOW), tl.constexpr(sampling.SEED_HIGH)
NUMBERS, WHOLE = tl.constexpr(7), tl.constexpr(5)


@kernel
def _few(
    logits, vocabulary, numbers, whole, rows, starts, peaks, tokens_at, sums, size, stride, few,
    CHOSEN: tl.constexpr, NOISED: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best of a block of tokens; the sum of their exponentials is that over the block, by its highest."""
    begin(PDL)
    block, choice, blocks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    place = block * BLOCK + tl.arange(0, BLOCK)
    ids, inside = place, place < size
    if CHOSEN:
        ids = tl.load(vocabulary + place, mask=inside, other=0).to(tl.int32)
    scores = tl.load(logits + choice * stride + place, mask=inside, other=float("-inf")).to(tl.float32)
    if NOISED:
        row = tl.load(rows + choice).to(tl.int64)
        number, own = numbers + row * NUMBERS, whole + row * WHOLE
        warmth = tl.load(number + TEMPERATURE)
        scores = tl.div_rn(scores, tl.where(warmth > 0, warmth, 1.0))
        if tl.load(number + NOISE) != 0:
            low = tl.load(own + SEED_LOW).to(tl.uint32, bitcast=True)
            high = tl.load(own + SEED_HIGH).to(tl.uint32, bitcast=True)
            first, second = noise_keys(low, high, (tl.load(starts + choice).to(tl.int32) + 1).to(tl.uint32))
            scores += noise_of(first, second, ids.to(tl.uint32))
    scores = tl.where(inside & (scores == scores), scores, LEAST)
    highest = tl.max(scores, 0)
    shares = tl.where(scores > LEAST, tl.exp(scores - highest), 0.0)
    at = choice * blocks + block
    tl.store(sums + at, tl.sum(shares, 0))
    left = inside
    for number in tl.static_range(FEW):
        best = tl.max(tl.where(left, scores, LEAST), 0)
        chosen = tl.min(tl.where(left & (scores == best), place, NONE), 0)
        if number < few:
            tl.store(peaks + at * few + number, best)
            tl.store(tokens_at + at * few + number, chosen)
        left = left & (place != chosen)


@kernel
def _few_of_all(
    peaks, tokens_at, sums, vocabulary, ids, logs, blocks, few,
    CHOSEN: tl.constexpr, FEW: tl.constexpr, BLOCKS: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best of the blocks' best."""
    begin(PDL)
    choice, block, one = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS), tl.arange(0, ALL)
    there, left = block < blocks, one < blocks * few
    tops = tl.load(peaks + (choice * blocks + block) * few, mask=there, other=LEAST)
    highest = tl.max(tops, 0)
    lower = tl.where(there & (tops > LEAST), tl.exp(tops - highest), 0.0)
    total = highest + tl.log(tl.sum(lower * tl.load(sums + choice * blocks + block, mask=there, other=0.0), 0))
    scores = tl.load(peaks + choice * blocks * few + one, mask=left, other=LEAST)
    places = tl.load(tokens_at + choice * blocks * few + one, mask=left, other=NONE)
    left = left & (places < NONE)  # a block may have fewer
    for number in tl.static_range(FEW):
        best = tl.max(tl.where(left, scores, LEAST), 0)
        chosen = tl.min(tl.where(left & (scores == best), places, NONE), 0)
        token = chosen.to(tl.int64)
        if CHOSEN:
            token = tl.load(vocabulary + chosen, mask=chosen < NONE, other=0)
        share = tl.minimum(best - total, 0.0)
        share = tl.where((best > LEAST) & (share == share), share, LEAST)
        if number < few:
            tl.store(ids + choice * few + number, tl.where(chosen < NONE, token, 0))
            tl.store(logs + choice * few + number, share)
        left = left & (places != chosen)


def few_best(
    logits: torch.Tensor,
    vocabulary: torch.Tensor | None,
    settings: Settings | None,
    rows: torch.Tensor,
    starts: torch.Tensor,
    ids: torch.Tensor,
    logs: torch.Tensor,
) -> None:
    count, size, few = len(logits), logits.shape[1], ids.shape[1]
    blocks, padded = triton.cdiv(size, BLOCK), triton.next_power_of_2(few)
    peaks = logits.new_empty(count, blocks, few, dtype=torch.float32)
    at = logits.new_empty(count, blocks, few, dtype=torch.int32)
    sums = logits.new_empty(count, blocks, dtype=torch.float32)
    known = rows if vocabulary is None else vocabulary
    numbers, whole = (logs, rows) if settings is None else (settings.numbers, settings.whole)
    has_choice = vocabulary is not None
    _few[(blocks, count)](
        logits, known, numbers, whole, rows, starts, peaks, at, sums, size, logits.stride(0), few,
        has_choice, settings is not None, padded, BLOCK, num_warps=4,
    )  # fmt: skip
    _few_of_all[(count,)](
        peaks, at, sums, known, ids, logs, blocks, few,
        has_choice, padded, triton.next_power_of_2(blocks), triton.next_power_of_2(blocks * few), num_warps=4,
    )  # fmt: skip


@kernel
def _grow(
    few_ids, few_logs, starts, beam_ids, beam_scores, beam_numbers, positions, columns, ancestors, parents,
    ids, scores, above, rows, candidates,
    LEVEL: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr, ASKED: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, one, other = tl.program_id(0), tl.arange(0, ALL), tl.arange(0, ALL)
    there, asker, first = one < ASKED * WIDTH, one // WIDTH, 0
    if LEVEL > 0:
        first = WIDTH + (LEVEL - 1) * WIDTH * WIDTH
    wide = rows * WIDTH
    here = LEVEL * wide + row * WIDTH + asker  # of the beam; level 0 has none
    own = tl.load(few_logs + row * ASKED * WIDTH + one, mask=there, other=LEAST)
    token = tl.load(few_ids + row * ASKED * WIDTH + one, mask=there, other=0)
    parent = one * 0 - 1
    if LEVEL > 0:
        own += tl.load(beam_scores + here, mask=there, other=LEAST)
        parent = tl.load(beam_numbers + here, mask=there, other=0)
    at = row * candidates + first + one
    tl.store(ids + at, token, mask=there)
    tl.store(scores + at, own, mask=there)
    tl.store(above + at, parent, mask=there)
    if LEVEL + 1 < LEVELS:
        tl.debug_barrier()
        others = tl.load(scores + row * candidates + first + other, mask=other < ASKED * WIDTH, other=LEAST)
        is_before = (others[:, None] > own[None, :]) | ((others[:, None] == own[None, :]) & (other[:, None] < one[None, :]))
        rank = tl.sum((is_before & (other < ASKED * WIDTH)[:, None]).to(tl.int32), 0)
        kept, start = there & (rank < WIDTH), tl.load(starts + row)
        place = (LEVEL + 1) * wide + row * WIDTH + rank
        column = start + 1 + LEVEL * WIDTH + rank
        tl.store(beam_ids + place, token, mask=kept)
        tl.store(beam_scores + place, own, mask=kept)
        tl.store(beam_numbers + place, first + one, mask=kept)
        tl.store(positions + place, start + LEVEL + 1 + rank * 0, mask=kept)
        tl.store(columns + place, column, mask=kept)
        asked = row + asker * 0
        if LEVEL > 0:
            asked = rows + (LEVEL - 1) * wide + row * WIDTH + asker
        tl.store(parents + place, asked.to(tl.int64), mask=kept)
        for depth in tl.static_range(LEVEL):
            tl.store(ancestors + place * LEVELS + depth, tl.load(ancestors + here * LEVELS + depth, mask=kept), mask=kept)
        tl.store(ancestors + place * LEVELS + LEVEL, column, mask=kept)


def grow(
    few_ids: torch.Tensor, few_logs: torch.Tensor, starts: torch.Tensor, level: int, beam: Beam, candidates: Candidates
) -> None:
    rows, width, levels = len(starts), few_ids.shape[1], len(beam.ids)
    asked = width if level else 1
    _grow[(rows,)](
        few_ids, few_logs, starts, beam.ids, beam.scores, beam.candidates, beam.positions, beam.columns, beam.ancestors,
        beam.parents, candidates.ids, candidates.scores, candidates.parents, rows, candidates.ids.shape[1],
        level, levels, width, asked, triton.next_power_of_2(asked * width), num_warps=4,
    )  # fmt: skip


@kernel
def _choose_nodes(
    ids, scores, above, ranks, roots, starts, node_ids, node_roots, positions, columns, ancestors, parents,
    rows, candidates, drafts, WIDTH: tl.constexpr, LEVELS: tl.constexpr, ALL: tl.constexpr, PAIRS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, one = tl.program_id(0), tl.arange(0, ALL)
    there, start, first = one < candidates, tl.load(starts + row), row * candidates
    own = tl.load(scores + first + one, mask=there, other=LEAST)
    rank = one * 0
    for some in range(0, candidates, PAIRS):
        other = some + tl.arange(0, PAIRS)
        others = tl.load(scores + first + other, mask=other < candidates, other=LEAST)
        is_before = (others[:, None] > own[None, :]) | ((others[:, None] == own[None, :]) & (other[:, None] < one[None, :]))
        rank += tl.sum((is_before & (other < candidates)[:, None]).to(tl.int32), 0)
    tl.store(ranks + first + one, rank, mask=there)
    tl.debug_barrier()
    kept, node = there & (rank < drafts), rank + 1
    at = node * rows + row
    depth = tl.where(one < WIDTH, 1, 2 + (one - WIDTH) // (WIDTH * WIDTH))
    parent = tl.load(above + first + one, mask=kept, other=-1)
    tl.store(node_ids + at, tl.load(ids + first + one, mask=kept, other=0), mask=kept)
    tl.store(node_roots + at, start + one * 0, mask=kept)
    tl.store(positions + at, start + depth, mask=kept)
    tl.store(columns + at, start + node, mask=kept)
    of_parent = tl.load(ranks + first + parent, mask=kept & (parent >= 0), other=-1) + 1
    tl.store(parents + at, of_parent, mask=kept)
    tl.store(node_ids + row, tl.load(roots + row))
    tl.store(node_roots + row, start)
    tl.store(positions + row, start)
    tl.store(columns + row, start)
    tl.store(parents + row, -1)
    current, is_on = one, kept
    for _ in tl.static_range(LEVELS):
        number = tl.load(ranks + first + current, mask=is_on, other=0) + 1
        deep = tl.where(current < WIDTH, 0, 1 + (current - WIDTH) // (WIDTH * WIDTH))
        tl.store(ancestors + at * LEVELS + deep, start + number, mask=is_on)
        current = tl.load(above + first + current, mask=is_on, other=-1)
        is_on = is_on & (current >= 0)


def choose_nodes(candidates: Candidates, shape: TreeShape, roots: torch.Tensor, starts: torch.Tensor, nodes: Nodes) -> None:
    _choose_nodes[(len(starts),)](
        candidates.ids, candidates.scores, candidates.parents, candidates.ranks, roots, starts, nodes.ids, nodes.roots,
        nodes.positions, nodes.columns, nodes.ancestors, nodes.parents, len(starts), shape.candidates, shape.drafts,
        shape.width, shape.levels, triton.next_power_of_2(shape.candidates), PAIRS, num_warps=4,
    )  # fmt: skip


@kernel
def _straighten(
    node_ids, node_roots, positions, parents, found, best, tokens, chain_found, chain_best, counts, path, rows, nodes,
    LEVELS: tl.constexpr, ALL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, node = tl.program_id(0), tl.arange(0, ALL)
    there, at = node < nodes, node * rows + row
    token, full = tl.load(node_ids + at, mask=there, other=-1), tl.load(found + at, mask=there, other=0)
    parent, score = tl.load(parents + at, mask=there, other=-2), tl.load(best + at, mask=there, other=0.0)
    depth = tl.load(positions + at, mask=there, other=0) - tl.load(node_roots + at, mask=there, other=0)
    current = tl.sum(node * 0, 0)
    tl.store(path + row, current.to(tl.int64))
    tl.store(chain_found + row, tl.load(found + row))
    tl.store(chain_best + row, tl.load(best + row))
    for step in tl.static_range(1, LEVELS + 1):
        wanted = tl.sum(tl.where(node == current, full, 0), 0)
        chosen = tl.min(tl.where((parent == current) & (token == wanted) & (current >= 0), node, NONE), 0)
        is_on, here = chosen < NONE, step * rows + row
        tl.store(tokens + here, tl.where(is_on, wanted, (wanted == 0).to(tl.int64)))
        tl.store(chain_found + here, tl.sum(tl.where(node == chosen, full, 0), 0))
        of_chosen = tl.max(tl.where(node == chosen, score, LEAST), 0)
        tl.store(chain_best + here, tl.where(is_on, of_chosen, 0.0))
        tl.store(counts + here - rows, tl.sum((there & (depth == step)).to(tl.int32), 0).to(tl.float32))
        tl.store(path + here, tl.where(is_on, chosen, step).to(tl.int64))
        current = tl.where(is_on, chosen, -1)


def straighten(nodes: Nodes, found: torch.Tensor, best: torch.Tensor, levels: int, chain: Chain, path: torch.Tensor) -> None:
    count, rows = found.shape
    _straighten[(rows,)](
        nodes.ids, nodes.roots, nodes.positions, nodes.parents, found, best, *chain, path, rows, count,
        levels, triton.next_power_of_2(count), num_warps=1,
    )  # fmt: skip


@kernel
def _move_columns(
    addresses, like, tables, starts, path, rows, stride_table, stride_block, stride_head, stride_column,
    SIZE: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Steps are padded to WIDE."""
    begin(PDL)
    row, dim, step = tl.program_id(1), tl.arange(0, BLOCK), tl.arange(0, WIDE)
    own = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(like.dtype.element_ty))
    own += tl.program_id(2).to(tl.int64) * stride_head
    start, there = tl.load(starts + row), step < STEPS
    column = start + tl.load(path + step * rows + row, mask=there, other=0)
    source = tl.load(tables + row * stride_table + column // SIZE, mask=there, other=0).to(tl.int64) * stride_block
    source += column % SIZE * stride_column
    to = start + step
    target = tl.load(tables + row * stride_table + to // SIZE, mask=there, other=0).to(tl.int64) * stride_block
    target += to % SIZE * stride_column
    known = there[:, None] & (dim < DIM)[None, :]
    held = tl.load(own + source[:, None] + dim[None, :], mask=known)
    tl.debug_barrier()
    tl.store(own + target[:, None] + dim[None, :], held, mask=known)


def move_columns(
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    addresses: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """One launch for keys and values that are alike."""
    steps, rows = path.shape
    tensors = [own for pair in zip(keys, values, strict=True) for own in pair]
    for _, alike in itertools.groupby(range(len(tensors)), lambda index: tensors[index].shape):
        own = list(alike)
        like = tensors[own[0]]
        _, heads, size, dim = like.shape
        _move_columns[(len(own), rows, heads)](
            addresses.flatten()[own[0] :], like, tables, starts, path, rows, tables.stride(0), *like.stride()[:3],
            size, steps, triton.next_power_of_2(steps), dim, triton.next_power_of_2(dim), num_warps=4,
        )  # fmt: skip
