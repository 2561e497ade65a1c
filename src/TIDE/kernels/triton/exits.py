"""Exits, the choice of tokens and the acceptance of drafts on a GPU, in Triton. Functions of the same names in
`reference/layers.py` define what each computes."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.result import ACCEPTED, DRAFTED, FIELDS, IS_NAN, NOTHING_LEFT, SCORES, TOKENS
from TIDE.kernels.triton.launch import begin, fetch, kernel, looped
from TIDE.kernels.triton.products import EMPTY, _first, _gained, _launch_linear, _product
from TIDE.kernels.triton.tiles import card_of, head_tile
from TIDE.kernels.triton.trees import choose_nodes as choose_nodes
from TIDE.kernels.triton.trees import few_best as few_best
from TIDE.kernels.triton.trees import grow as grow
from TIDE.kernels.triton.trees import move_columns as move_columns
from TIDE.kernels.triton.trees import straighten as straighten
from TIDE.kernels.weights import Weight


@kernel
def _peaks(
    x, weight, vocabulary, peaks, tokens_at, sums, out, tokens, height, width, blocks,
    CHOSEN: tl.constexpr, GATHERS: tl.constexpr, SIGNALS: tl.constexpr, STORE: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, TN: tl.constexpr, EVEN: tl.constexpr, ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the best of a block of tokens, for each state. NaN counts as infinity, so that the host notices it.

    Signals are sums over the block, in whole numbers: those of floats would depend on how a tile is spread over threads.
    """
    block, place, table = tl.program_id(1), tl.arange(0, TN), tokens * blocks
    column = block * BN + tl.arange(0, BN)
    ids, rows, inside = column, column, column < height
    if not GATHERS:
        fetch(weight, rows, inside, width, BK, PDL)
    begin(PDL, LOOPS=True)
    if not ONCE:
        first_state = _first(TN)
        x, out, tokens = x + first_state * width, out + first_state * height, tokens - first_state
        peaks, tokens_at, sums = peaks + first_state * blocks, tokens_at + first_state * blocks, sums + first_state * blocks
    if CHOSEN:
        ids = tl.load(vocabulary + column, mask=inside, other=0).to(tl.int32)
    if GATHERS:  # otherwise the LM head has rows for the chosen tokens alone
        rows = ids
    logits = _product(x, weight, rows, inside, tokens, width, BN, BK, TN, EVEN, ONCE).to(x.dtype.element_ty)
    looped(PDL)
    if STORE:
        tl.store(out + place[None, :] * height + column[:, None], logits, mask=inside[:, None] & (place < tokens)[None, :])
    logits = logits.to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where(inside[:, None], logits, float("-inf"))
    best = tl.max(logits, 0)
    first = tl.min(tl.where(logits == best[None, :], ids[:, None], 2147483647), 0)
    at, known = place * blocks + block, place < tokens
    tl.store(peaks + at, best, mask=known)
    tl.store(tokens_at + at, first, mask=known)
    if SIGNALS:
        shares = tl.exp(logits - best[None, :])
        tl.store(sums + at, tl.max(tl.where(ids[:, None] == first[None, :], float("-inf"), logits), 0), mask=known)
        tl.store(sums + table + at, _whole_sum(shares), mask=known)
        weighed = tl.where(shares > 0, shares * (logits - best[None, :]), 0.0)
        tl.store(sums + 2 * table + at, _whole_sum(weighed), mask=known)


@triton.jit
def _whole_sum(x):
    """Sum up to 64 numbers between -1 and 1, rounded to a multiple of 2^-24."""
    return tl.sum((x * 16777216.0).to(tl.int32), 0).to(tl.float32) * 5.9604644775390625e-08


@kernel
def _best(peaks, tokens_at, sums, best, token, signals, blocks, SIGNALS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    state, block, table = tl.program_id(0), tl.arange(0, BLOCK), tl.num_programs(0) * blocks
    there, at = block < blocks, state * blocks + block
    own = tl.load(peaks + at, mask=there, other=float("-inf"))
    highest = tl.max(own, 0)
    first = tl.min(tl.where((own == highest) & there, tl.load(tokens_at + at, mask=there, other=0), 2147483647), 0)
    tl.store(best + state, highest)
    tl.store(token + state, first.to(tl.int64))
    if SIGNALS:
        holder = tl.min(tl.where((own == highest) & there, block, BLOCK), 0)
        runner_up = tl.load(sums + at, mask=there, other=float("-inf"))
        second = tl.max(tl.where(block == holder, runner_up, own), 0)
        lower = tl.where(there, tl.exp(own - highest), 0.0)
        shares = tl.load(sums + table + at, mask=there, other=0.0) * lower
        weighed = tl.load(sums + 2 * table + at, mask=there, other=0.0) * lower
        weighed += tl.where(shares > 0, shares * (own - highest), 0.0)
        total = tl.sum(shares, 0)
        entropy = tl.log(total) - tl.sum(weighed, 0) / total
        tl.store(signals + 4 * state, 1 / total)
        tl.store(signals + 4 * state + 1, -tl.log(total))
        tl.store(signals + 4 * state + 2, (1 - tl.exp(second - highest)) / total)
        tl.store(signals + 4 * state + 3, entropy)


def best_tokens(
    x: torch.Tensor,
    weight: Weight,
    best: torch.Tensor,
    token: torch.Tensor,
    signals: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
    logits: torch.Tensor | None = None,
) -> None:
    """Two launches; logits themselves are written only where a buffer is given for them."""
    peaks, at, sums = _launch_peaks(x, weight, signals, vocabulary, logits)
    blocks = peaks.shape[1]
    _best[(len(x),)](
        peaks, at, sums, best, token, best if signals is None else signals, blocks, signals is not None,
        triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip


def _launch_peaks(
    x: torch.Tensor,
    weight: Weight,
    signals: torch.Tensor | None,
    vocabulary: torch.Tensor | None,
    logits: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return, for each state and block of tokens, the best logit, its token, and sums for signals."""
    values, width = weight.values, weight.columns
    tile = head_tile(card_of(x.device), weight.rows, width, values.element_size(), len(x))
    chosen = values if vocabulary is None else vocabulary
    height = len(chosen)
    blocks = triton.cdiv(height, tile.rows)
    peaks, at = x.new_empty(len(x), blocks, dtype=torch.float32), x.new_empty(len(x), blocks, dtype=torch.int32)
    sums = peaks if signals is None else x.new_empty(3, len(x), blocks, dtype=torch.float32)
    _peaks[(tile.groups, blocks)](
        x, values, chosen, peaks, at, sums, x if logits is None else logits, len(x), height, width, blocks,
        vocabulary is not None, height != weight.rows, signals is not None, logits is not None, *tile.constants,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return peaks, at, sums


def write_logits(x: torch.Tensor, weight: Weight, vocabulary: torch.Tensor | None, logits: torch.Tensor) -> None:
    """One launch; the bits are those of `best_tokens`."""
    _launch_peaks(x, weight, None, vocabulary, logits)


@kernel
def _router(
    guess, signals, down, bias, up, parts, width, height, eps,
    SIGNALS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sum a few of the bottleneck's rows. With signals the guess is normed; routers without signals take it as it is."""
    begin(PDL)
    rows, column, one = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.program_id(1)
    inside, known = rows < height, column < width
    states = tl.load(guess + one * width + column, mask=known, other=0.0).to(tl.float32)
    if SIGNALS > 0:
        states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    start = rows[:, None] * (width + SIGNALS)
    weights = tl.load(down + start + column[None, :], mask=inside[:, None] & known[None, :], other=0.0)
    found = tl.sum(weights * states[None, :], 1)
    if SIGNALS > 0:
        for signal in tl.static_range(SIGNALS):
            found += tl.load(down + rows * (width + SIGNALS) + width + signal, mask=inside, other=0.0) * tl.load(
                signals + one * SIGNALS + signal
            )
        found += tl.load(bias + rows, mask=inside, other=0.0)
    found *= tl.sigmoid(found) * tl.load(up + rows, mask=inside, other=0.0)
    tl.store(parts + one * tl.num_programs(0) + tl.program_id(0), tl.sum(found, 0))


@kernel
def _score(parts, score_params, score, count, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    part, one = tl.arange(0, BLOCK), tl.program_id(0)
    raw = tl.sum(tl.load(parts + one * count + part, mask=part < count, other=0.0), 0) + tl.load(score_params)
    tl.store(score + one, tl.sigmoid(raw / tl.load(score_params + 1) + tl.load(score_params + 2)))


def router_score(
    guess: torch.Tensor,
    signals: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor,
    score_params: torch.Tensor,
    eps: float,
    score: torch.Tensor,
) -> None:
    height, count = len(down), triton.cdiv(len(down), 8)
    parts, width = guess.new_empty(len(guess), count, dtype=torch.float32), guess.shape[-1]
    _router[(count, len(guess))](
        guess, signals, down, down if bias is None else bias, up, parts, width, height, eps,
        down.shape[1] - width, 8, triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    _score[(len(guess),)](parts, score_params, score, count, triton.next_power_of_2(count), num_warps=1)


@kernel
def _normalize_into(
    rows, table, center, spread, gain, out, places, stride, out_stride, width, eps,
    HAS_ROWS: tl.constexpr, HAS_CENTER: tl.constexpr, HAS_GAIN: tl.constexpr, HAS_PLACES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    row, place, known = token.to(tl.int64), token.to(tl.int64), column < width
    if HAS_PLACES:
        place = tl.load(places + token)
    if HAS_ROWS:
        row = tl.load(rows + token).to(tl.int64)
    states = tl.load(table + row * stride + column, mask=known, other=0.0).to(tl.float32)
    states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    if HAS_CENTER:
        states -= tl.load(center + column, mask=known, other=0.0).to(tl.float32)
        states /= tl.load(spread + column, mask=known, other=1.0).to(tl.float32)
    kind = out.dtype.element_ty
    if HAS_GAIN:
        states = _gained(states, tl.load(gain + column, mask=known, other=0.0), 0.0, 0.0, False, kind)
    tl.store(out + place * out_stride + column, states.to(kind), mask=known)


def normalize_into(
    table: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    center: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    gain: torch.Tensor | None = None,
) -> None:
    width = table.shape[1]
    _normalize_into[(len(table if rows is None else rows),)](
        table if rows is None else rows, table, table if center is None else center, table if spread is None else spread,
        table if gain is None else gain, out, table if places is None else places, table.stride(0), out.stride(0), width, eps,
        rows is not None, center is not None, gain is not None, places is not None, triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def linear_into(x: torch.Tensor, weight: Weight, table: torch.Tensor, places: torch.Tensor) -> None:
    _launch_linear(x, weight, EMPTY, table, places)


@kernel
def _denormalize(x, center, spread, places, table, guess, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    known, own = column < width, token * width + column
    states = tl.load(x + own, mask=known, other=0.0).to(tl.float32)
    states *= tl.load(spread + column, mask=known, other=0.0).to(tl.float32)
    states += tl.load(center + column, mask=known, other=0.0).to(tl.float32)
    found = states.to(guess.dtype.element_ty)
    tl.store(table + tl.load(places + token) * width + column, found, mask=known)
    tl.store(guess + own, found, mask=known)


def denormalize(
    x: torch.Tensor,
    center: torch.Tensor,
    spread: torch.Tensor,
    places: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
) -> None:
    width = x.shape[1]
    _denormalize[(len(x),)](x, center, spread, places, table, out, width, triton.next_power_of_2(width), num_warps=4)


@kernel
def _find_places(
    tables, rows, starts, places, ring, all_rows, stride_table, columns, size, STEPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    step, lane = tl.program_id(0), tl.program_id(1)
    row, position = tl.load(rows + lane).to(tl.int64), tl.load(starts + lane) + step
    block = tl.load(tables + row * stride_table + tl.minimum(position // size, columns - 1)).to(tl.int64)
    at = step * all_rows + lane
    tl.store(places + at, block * size + position % size)
    tl.store(ring + at, row * STEPS + position % STEPS, mask=step < STEPS)


def find_places(
    tables: torch.Tensor, rows: torch.Tensor, starts: torch.Tensor, size: int, places: torch.Tensor, ring: torch.Tensor
) -> None:
    _find_places[places.shape](
        tables, rows, starts, places, ring, len(rows), tables.stride(0), tables.shape[1], size, len(ring), num_warps=1
    )


@kernel
def _accept(
    found, best, tokens, starts, scores, active, result, limits, drafts, threshold, rows, VERIFIES: tl.constexpr,
    FIELDS: tl.constexpr, ACCEPTED: tl.constexpr, DRAFTED: tl.constexpr, TOKENS: tl.constexpr, SCORES: tl.constexpr,
    IS_NAN: tl.constexpr, NOTHING_LEFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: everything is (steps, rows), the result (rows, fields)."""
    begin(PDL)
    row, step = tl.program_id(0), tl.arange(0, 16)
    drafts = tl.minimum(drafts, tl.load(limits + row))
    at, own, drafting = step * rows + row, result + row * FIELDS, step < drafts
    full = tl.load(found + at, mask=step <= drafts, other=0)
    drafted = tl.load(tokens + rows + at, mask=drafting, other=0)
    score = tl.load(scores + at, mask=drafting, other=0.0)
    ends = drafting & (score < threshold)
    tl.store(own + DRAFTED, tl.min(tl.where(ends, step, drafts), 0).to(tl.float32))
    if VERIFIES:
        ends = ends | (drafting & (full != drafted))
    kept = tl.min(tl.where(ends, step, drafts), 0)
    score_of = tl.load(best + at, mask=step <= drafts, other=0.0)
    is_nan = tl.max(score_of, 0) == float("inf")
    has_none = tl.min(tl.where(step <= kept, score_of, 0.0), 0) == float("-inf")
    outcome = tl.where(is_nan, IS_NAN, tl.where(has_none, NOTHING_LEFT, kept))
    tl.store(own + ACCEPTED, outcome.to(tl.float32))
    tl.store(own + TOKENS + step, tl.where(step < kept, drafted, full).to(tl.float32), mask=step <= kept)
    tl.store(own + SCORES + step, score, mask=drafting)
    newest = tl.sum(tl.where(step == kept, full, 0), 0)
    moves = tl.load(active + row)
    position, before = tl.load(starts + at), tl.load(tokens + row)
    tl.debug_barrier()
    tl.store(tokens + row, tl.where(moves != 0, newest, before))
    tl.store(starts + at, position + moves * (kept + 1))


def accept(
    found: torch.Tensor,
    best: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    scores: torch.Tensor,
    active: torch.Tensor,
    result: torch.Tensor,
    limits: torch.Tensor,
    drafts: int,
    threshold: float,
    verifies: bool,
) -> None:
    rows = tokens.shape[1]
    _accept[(rows,)](
        found, best, tokens, starts, scores, active, result, limits, drafts, threshold, rows, verifies,
        FIELDS, ACCEPTED, DRAFTED, TOKENS, SCORES, IS_NAN, NOTHING_LEFT, num_warps=1,
    )  # fmt: skip
