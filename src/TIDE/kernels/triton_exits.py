"""What exits and the choice of tokens need on a GPU, in Triton; namesakes in `reference.py` say what is computed."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.triton_products import EMPTY, _launch_linear, _product, _tile, counted


@counted
def _peaks(
    x, weight, vocabulary, peaks, tokens_at, sums, tokens, height, width, blocks,
    CHOSEN: tl.constexpr, SIGNALS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The best of a block of tokens, for each state. NaN counts as infinity, which is how the host notices."""
    block, place = tl.program_id(0), tl.arange(0, 16)
    rows = block * BN + tl.arange(0, BN)
    inside = rows < height
    if CHOSEN:
        rows = tl.load(vocabulary + rows, mask=inside, other=0).to(tl.int32)
    logits = _product(x, weight, rows, inside, tokens, width, BN, BK, EVEN).to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where(inside[:, None], logits, float("-inf"))
    best = tl.max(logits, 0)
    first = tl.min(tl.where(logits == best[None, :], rows[:, None], 2147483647), 0)
    at, known = place * blocks + block, place < tokens
    tl.store(peaks + at, best, mask=known)
    tl.store(tokens_at + at, first, mask=known)
    if SIGNALS:
        shares = tl.exp(logits - best[None, :])
        tl.store(sums + at, tl.max(tl.where(rows[:, None] == first[None, :], float("-inf"), logits), 0), mask=known)
        tl.store(sums + 16 * blocks + at, tl.sum(shares, 0), mask=known)
        weighed = tl.where(shares > 0, shares * (logits - best[None, :]), 0.0)
        tl.store(sums + 32 * blocks + at, tl.sum(weighed, 0), mask=known)


@counted
def _best(peaks, tokens_at, sums, best, token, signals, blocks, SIGNALS: tl.constexpr, BLOCK: tl.constexpr):
    state, block = tl.program_id(0), tl.arange(0, BLOCK)
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
        shares = tl.load(sums + 16 * blocks + at, mask=there, other=0.0) * lower
        weighed = tl.load(sums + 32 * blocks + at, mask=there, other=0.0) * lower
        weighed += tl.where(shares > 0, shares * (own - highest), 0.0)
        total = tl.sum(shares, 0)
        entropy = tl.log(total) - tl.sum(weighed, 0) / total
        tl.store(signals + 4 * state, 1 / total)
        tl.store(signals + 4 * state + 1, -tl.log(total))
        tl.store(signals + 4 * state + 2, (1 - tl.exp(second - highest)) / total)
        tl.store(signals + 4 * state + 3, entropy)


def best_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    best: torch.Tensor,
    token: torch.Tensor,
    signals: torch.Tensor | None = None,
    vocabulary: torch.Tensor | None = None,
) -> None:
    """Logits themselves are never written."""
    width, tile = weight.shape[1], _tile(weight, 64, 256, 4)
    chosen = weight if vocabulary is None else vocabulary
    height = len(chosen)
    blocks = triton.cdiv(height, tile.rows)
    peaks, at = x.new_empty(16, blocks, dtype=torch.float32), x.new_empty(16, blocks, dtype=torch.int32)
    sums = peaks if signals is None else x.new_empty(3, 16, blocks, dtype=torch.float32)
    _peaks[(blocks,)](
        x, weight, chosen, peaks, at, sums, len(x), height, width, blocks,
        vocabulary is not None, signals is not None, tile.rows, tile.columns, tile.even, num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    _best[(len(x),)](
        peaks, at, sums, best, token, best if signals is None else signals, blocks, signals is not None,
        triton.next_power_of_2(blocks), num_warps=4,
    )  # fmt: skip


@triton.jit
def _router(
    guess, signals, down, bias, up, parts, width, height, eps,
    SIGNALS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A few of the bottleneck's rows. With signals the guess is normed; routers without see it as it is."""
    rows, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside, known = rows < height, column < width
    states = tl.load(guess + column, mask=known, other=0.0).to(tl.float32)
    if SIGNALS > 0:
        states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    start = rows[:, None] * (width + SIGNALS)
    weights = tl.load(down + start + column[None, :], mask=inside[:, None] & known[None, :], other=0.0)
    found = tl.sum(weights * states[None, :], 1)
    if SIGNALS > 0:
        for signal in tl.static_range(SIGNALS):
            found += tl.load(down + rows * (width + SIGNALS) + width + signal, mask=inside, other=0.0) * tl.load(
                signals + signal
            )
        found += tl.load(bias + rows, mask=inside, other=0.0)
    found *= tl.sigmoid(found) * tl.load(up + rows, mask=inside, other=0.0)
    tl.store(parts + tl.program_id(0), tl.sum(found, 0))


@counted
def _score(parts, gauge, score, count, BLOCK: tl.constexpr):
    part = tl.arange(0, BLOCK)
    raw = tl.sum(tl.load(parts + part, mask=part < count, other=0.0), 0) + tl.load(gauge)
    tl.store(score, tl.sigmoid(raw / tl.load(gauge + 1) + tl.load(gauge + 2)))


def router_score(
    guess: torch.Tensor,
    signals: torch.Tensor,
    down: torch.Tensor,
    bias: torch.Tensor | None,
    up: torch.Tensor,
    gauge: torch.Tensor,
    eps: float,
    score: torch.Tensor,
) -> None:
    height, count = len(down), triton.cdiv(len(down), 8)
    parts, width = guess.new_empty(count, dtype=torch.float32), guess.shape[-1]
    _router[(count,)](
        guess, signals, down, down if bias is None else bias, up, parts, width, height, eps,
        down.shape[1] - width, 8, triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
    _score[(1,)](parts, gauge, score, count, triton.next_power_of_2(count), num_warps=1)


@counted
def _centred(
    table, rows, center, spread, out, at, stride, out_stride, width, eps,
    HAS_ROWS: tl.constexpr, CENTRE: tl.constexpr, RING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    row, place, known = token.to(tl.int64), token.to(tl.int64), column < width
    if RING > 0:
        place = (tl.load(at).to(tl.int64) + token) % RING
    if HAS_ROWS:
        row = tl.load(rows + token).to(tl.int64)
    states = tl.load(table + row * stride + column, mask=known, other=0.0).to(tl.float32)
    states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    if CENTRE:
        states -= tl.load(center + column, mask=known, other=0.0).to(tl.float32)
        states /= tl.load(spread + column, mask=known, other=1.0).to(tl.float32)
    tl.store(out + place * out_stride + column, states.to(out.dtype.element_ty), mask=known)


def centred(
    table: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    center: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
    at: torch.Tensor | None = None,
) -> None:
    width, ring = table.shape[1], 0 if at is None else len(out)
    _centred[(len(table if rows is None else rows),)](
        table, table if rows is None else rows, table if center is None else center, table if spread is None else spread,
        out, table if at is None else at, table.stride(0), out.stride(0), width, eps,
        rows is not None, center is not None, ring, triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


def linear_into(x: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, start: torch.Tensor) -> None:
    _launch_linear(x, weight, EMPTY, table, start)


@counted
def _outward(x, center, spread, start, table, guess, width, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    known = column < width
    states = tl.load(x + column, mask=known, other=0.0).to(tl.float32)
    states *= tl.load(spread + column, mask=known, other=0.0).to(tl.float32)
    states += tl.load(center + column, mask=known, other=0.0).to(tl.float32)
    found = states.to(guess.dtype.element_ty)
    tl.store(table + (tl.load(start).to(tl.int64) + 1) * width + column, found, mask=known)
    tl.store(guess + column, found, mask=known)


def outward(
    x: torch.Tensor, center: torch.Tensor, spread: torch.Tensor, start: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    guess, width = torch.empty_like(x), x.shape[1]
    _outward[(1,)](x, center, spread, start, table, guess, width, triton.next_power_of_2(width), num_warps=4)
    return guess


@counted
def _accept(found, best, tokens, starts, scores, out, drafts, threshold, VERIFIES: tl.constexpr):
    place = tl.arange(0, 16)
    drafting = place < drafts
    said = tl.load(found + place, mask=place <= drafts, other=0)
    drafted = tl.load(tokens + 1 + place, mask=drafting, other=0)
    falls = drafting & (tl.load(scores + place, mask=drafting, other=0.0) < threshold)
    tl.store(out + 17, tl.min(tl.where(falls, place, drafts), 0).to(tl.int64))
    if VERIFIES:
        falls = falls | (drafting & (said != drafted))
    stood = tl.min(tl.where(falls, place, drafts), 0)
    worst = tl.max(tl.load(best + place, mask=place <= drafts, other=0.0), 0)
    tl.store(out, tl.where(worst == float("inf"), -1, stood).to(tl.int64))
    tl.store(out + 1 + place, tl.where(place < stood, drafted, said), mask=place <= drafts)
    newest = tl.sum(tl.where(place == stood, said, 0), 0)
    at = tl.load(starts + place)
    tl.debug_barrier()
    tl.store(tokens, newest)
    tl.store(starts + place, at + stood + 1)


def accept(
    found: torch.Tensor,
    best: torch.Tensor,
    tokens: torch.Tensor,
    starts: torch.Tensor,
    scores: torch.Tensor,
    out: torch.Tensor,
    drafts: int,
    threshold: float,
    verifies: bool,
) -> None:
    _accept[(1,)](found, best, tokens, starts, scores, out, drafts, threshold, verifies, num_warps=1)
