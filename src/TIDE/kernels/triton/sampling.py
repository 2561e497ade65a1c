"""The choice of tokens on a GPU, in Triton. Functions of the same names in `reference/sampling.py` define what each computes.

Two launches, and nothing waits for the host:

    _shape      a program for a block of tokens of a choice: scores, noised scores, and of the block its highest score, the sum
                of its probabilities, its best noised token
    _pick       a program for a choice: the best of the blocks' best, or with filters the best of the tokens that they keep

Nothing is sorted. Whether a token is kept depends only on how many tokens, and of which mass, have higher scores. The blocks'
highest scores say which blocks hold tokens that can be kept: mostly a few, whose tokens are gathered and compared in pairs. If
there are more, passes over all of them find the edge of top-k by bisection, and then the token: the best noised one, unless
too much mass is above it; then it and everything below is out, and the best noised one above is next.

Sums run in one order, whatever is chosen beside.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels import result as fields
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.reference import sampling
from TIDE.kernels.reference.sampling import Features, Settings
from TIDE.kernels.triton.launch import begin, kernel
from TIDE.kernels.triton.noise import keys, noise_of

BLOCK = 256  # tokens of a program of `_shape`, or more of a vocabulary of more than MOST_BLOCKS of them
MOST_BLOCKS = 512
FEW = 1024  # tokens that are compared in pairs
WIDE = 4096  # scores that a pass loads at once
PAIRS = tl.constexpr(16)  # scores that all others are compared with at once
NONE = tl.constexpr(2147483647)
LEAST, MOST = tl.constexpr(float("-inf")), tl.constexpr(float("inf"))
SLACK = tl.constexpr(1.00001)  # sums of the same mass in two orders differ by less

NUMBERS, WHOLE, MOST_BANS = tl.constexpr(7), tl.constexpr(5), tl.constexpr(sampling.MOST_BANS)
NOISE, TEMPERATURE = tl.constexpr(sampling.NOISE), tl.constexpr(sampling.TEMPERATURE)
TOP_P, MIN_P, TOP_K = tl.constexpr(sampling.TOP_P), tl.constexpr(sampling.MIN_P), tl.constexpr(sampling.TOP_K)
REPETITION, PRESENCE = tl.constexpr(sampling.REPETITION), tl.constexpr(sampling.PRESENCE)
FREQUENCY, NEW = tl.constexpr(sampling.FREQUENCY), tl.constexpr(sampling.NEW)
SEED_LOW, SEED_HIGH = tl.constexpr(sampling.SEED_LOW), tl.constexpr(sampling.SEED_HIGH)
FORCED_AT, FORCED, NOWHERE = map(tl.constexpr, (sampling.FORCED_AT, sampling.FORCED, sampling.NOWHERE))


@kernel
def _shape(
    logits, vocabulary, numbers, whole, bans, bias, seen, tokens, rows, starts, steps, parts, firsts, shaped,
    size, stride, width, all_rows,
    CHOSEN: tl.constexpr, PENALTIES: tl.constexpr, BIAS: tl.constexpr, RULES: tl.constexpr, FILTERS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Score a block of tokens. Of a block with a NaN the best noised score is infinity, so that the host notices it."""
    begin(PDL)
    block, choice = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place = block * BLOCK + tl.arange(0, BLOCK)
    row, position = tl.load(rows + choice).to(tl.int64), tl.load(starts + choice).to(tl.int32) + 1
    ids, inside = place, place < size
    number, own = numbers + row * NUMBERS, whole + row * WHOLE
    if CHOSEN:
        ids = tl.load(vocabulary + place, mask=inside, other=0).to(tl.int32)
    logit = tl.load(logits + choice * stride + place, mask=inside, other=0.0).to(tl.float32)
    scores = logit
    if PENALTIES:
        drafts = tl.load(steps + choice).to(tl.int32)
        times = tl.load(seen + row * width + ids, mask=inside, other=0)
        scores = _penalized(scores, ids, times, number, tokens + row, drafts, all_rows)
    if BIAS:
        scores += tl.load(bias + row * width + ids, mask=inside, other=0.0)
    if RULES:
        scores = _ruled(scores, ids, position, bans + row * MOST_BANS * 3, own)
    scores = tl.div_rn(scores, tl.load(number + TEMPERATURE))
    scores = tl.where(inside & (scores == scores), scores, LEAST)
    noised = scores
    if tl.load(number + NOISE) != 0:
        low = tl.load(own + SEED_LOW).to(tl.uint32, bitcast=True)
        high = tl.load(own + SEED_HIGH).to(tl.uint32, bitcast=True)
        first, second = keys(low, high, position.to(tl.uint32))
        noised = scores + noise_of(first, second, ids.to(tl.uint32))
    blocks = tl.num_programs(0)
    at, table = choice * blocks + block, tl.num_programs(1) * blocks
    best = tl.max(noised, 0)
    tl.store(firsts + at, tl.min(tl.where(noised == best, place, NONE), 0))
    tl.store(parts + at, tl.where(tl.max((logit != logit).to(tl.int32), 0) > 0, MOST, best))
    if FILTERS:
        highest = tl.max(scores, 0)
        shares = tl.where(scores > LEAST, tl.exp(scores - highest), 0.0)
        tl.store(parts + table + at, highest)
        tl.store(parts + 2 * table + at, tl.sum(shares, 0))
        tl.store(shaped + choice * blocks * BLOCK + place, scores)
        tl.store(shaped + (tl.num_programs(1) + choice) * blocks * BLOCK + place, noised)


@triton.jit
def _penalized(scores, ids, times, number, tokens, drafts, all_rows):
    """`times` is what the row has seen; `tokens` and what follows `all_rows` apart are its newest token and its drafts."""
    for step in range(1, drafts + 1):
        times += tl.where(tl.load(tokens + step * all_rows).to(tl.int32) == ids, NEW, 0)
    repetition = tl.load(number + REPETITION)
    repeated = tl.where(scores < 0, scores * repetition, tl.div_rn(scores, repetition))
    scores = tl.where(times > 0, repeated, scores)
    written = times // NEW
    once = tl.where(written > 0, tl.load(number + PRESENCE), 0.0)
    return scores - (once + tl.load(number + FREQUENCY) * written.to(tl.float32))


@triton.jit
def _ruled(scores, ids, position, bans, own):
    """Take out banned tokens, and at a forced position all but one."""
    for ban in tl.static_range(MOST_BANS):
        holds = (tl.load(bans + 3 * ban + 1) <= position) & (position <= tl.load(bans + 3 * ban + 2))
        scores = tl.where(tl.where(holds, tl.load(bans + 3 * ban), NOWHERE) == ids, LEAST, scores)
    only = tl.where(tl.load(own + FORCED) == ids, 0.0, LEAST)
    return tl.where(tl.load(own + FORCED_AT) == position, only, scores)


@kernel
def _pick(
    parts, firsts, vocabulary, numbers, whole, rows, shaped, listed, few, places, token, best, size, blocks,
    CHOSEN: tl.constexpr, FILTERS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, FEW: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    choice, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    there, at, table = block < blocks, choice * blocks + block, tl.num_programs(0) * blocks
    bests = tl.load(parts + at, mask=there, other=LEAST)
    found = tl.max(bests, 0)
    first = tl.min(tl.where(there & (bests == found), tl.load(firsts + at, mask=there, other=0), NONE), 0)
    if FILTERS:
        listed, few, places = listed + choice * blocks, few + choice * FEW, places + choice * FEW
        row = tl.load(rows + choice).to(tl.int64)
        top_p, min_p = tl.load(numbers + row * NUMBERS + TOP_P), tl.load(numbers + row * NUMBERS + MIN_P)
        top_k = tl.load(whole + row * WHOLE + TOP_K)
        top_k = tl.where((top_k > 0) & (top_k < size), top_k, 0)
        has_filter = (tl.load(numbers + row * NUMBERS + NOISE) != 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
        if has_filter & (found > LEAST) & (found < MOST):
            peaks = tl.load(parts + table + at, mask=there, other=LEAST)
            highest = tl.max(peaks, 0)
            total = tl.sum(tl.load(parts + 2 * table + at, mask=there, other=0.0) * tl.exp(peaks - highest), 0)
            lowest = tl.where(min_p > 0, highest + tl.log(min_p), LEAST)
            bound = _bound(parts + table + choice * blocks, peaks, highest, total, lowest, top_k, top_p, blocks, BLOCKS)
            reach = there & (peaks >= bound) & (peaks > LEAST)
            scores, noised = shaped + choice * blocks * BLOCK, shaped + (tl.num_programs(0) + choice) * blocks * BLOCK
            tl.store(listed + tl.cumsum(reach.to(tl.int32), 0) - 1, block, mask=reach)
            reached = tl.sum(reach.to(tl.int32), 0)
            tl.debug_barrier()
            held = _gather(scores, listed, reached, bound, few, places, BLOCK, FEW, WIDE)
            if held <= FEW:
                found, first = _best_of_few(few, places, noised, held, highest, total, lowest, top_k, top_p, FEW)
            else:
                found, first = _best_of_many(
                    scores, noised, listed, reached, found, first, highest, total, bound, lowest, top_k, top_p, BLOCK, WIDE
                )
    tl.store(best + choice, found)
    if CHOSEN:
        tl.store(token + choice, tl.load(vocabulary + first).to(tl.int64))
    else:
        tl.store(token + choice, first.to(tl.int64))


@triton.jit
def _bound(own, peaks, highest, total, lowest, top_k, top_p, blocks, BLOCKS: tl.constexpr):
    """Return a score below which no token is kept, given the highest scores of blocks.

    If k of these reach a score, so do k tokens. If the mass of these that reach a score is what top-p keeps, whatever is lower
    has that mass above it. Where top-k and top-p meet, the bound is that of top-k, as all that it keeps is summed.
    """
    count, mass, place = tl.zeros((BLOCKS,), tl.int32), tl.zeros((BLOCKS,), tl.float32), tl.arange(0, PAIRS)
    if (top_k > 0) | (top_p < 1):
        for start in range(0, blocks, PAIRS):
            other = tl.load(own + start + place, mask=start + place < blocks, other=LEAST)
            reaches = other[:, None] >= peaks[None, :]
            count += tl.sum(reaches.to(tl.int32), 0)
            mass += tl.sum(tl.where(reaches, tl.exp(other - highest)[:, None], 0.0), 0)
    by_k = tl.max(tl.where(count >= top_k, peaks, LEAST), 0)
    by_p = tl.max(tl.where(mass >= _allowed(top_p, total) * SLACK, peaks, LEAST), 0)
    by_k = tl.where(top_p < 1, by_k, tl.maximum(by_k, lowest))
    return tl.where(top_k > 0, by_k, tl.maximum(by_p, lowest))


@triton.jit
def _allowed(top_p, total):
    """Return the mass that kept tokens have less of above them."""
    return tl.where(top_p < 1, top_p * total, MOST)


@triton.jit
def _scores_at(listed, start, reached, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the places of all tokens in some listed blocks, and which of them exist."""
    lane = tl.arange(0, WIDE)
    slot = start + lane // BLOCK
    return tl.load(listed + slot, mask=slot < reached, other=0) * BLOCK + lane % BLOCK, slot < reached


@triton.jit
def _gather(scores, listed, reached, bound, few, places, BLOCK: tl.constexpr, FEW: tl.constexpr, WIDE: tl.constexpr):
    """Write the scores that reach a bound, in the order of their places; return how many there are, at least up to FEW."""
    held, start = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    while (start < reached) & (held <= FEW):
        at, there = _scores_at(listed, start, reached, BLOCK, WIDE)
        score = tl.load(scores + at, mask=there, other=LEAST)
        reaches = (score >= bound) & (score > LEAST)
        slot = held + tl.cumsum(reaches.to(tl.int32), 0) - 1
        tl.store(few + slot, score, mask=reaches & (slot < FEW))
        tl.store(places + slot, at, mask=reaches & (slot < FEW))
        held += tl.sum(reaches.to(tl.int32), 0)
        start += WIDE // BLOCK
    tl.debug_barrier()
    return held


@triton.jit
def _best_of_few(few, places, noised, held, highest, total, lowest, top_k, top_p, FEW: tl.constexpr):
    """Return the best noised score that filters keep, and its place; compare all gathered scores with each other."""
    slot, place = tl.arange(0, FEW), tl.arange(0, PAIRS)
    score = tl.load(few + slot, mask=slot < held, other=LEAST)
    count, mass = tl.zeros((FEW,), tl.int32), tl.zeros((FEW,), tl.float32)
    for start in range(0, held, PAIRS):
        other = tl.load(few + start + place, mask=start + place < held, other=LEAST)
        higher = other[:, None] > score[None, :]
        count += tl.sum(higher.to(tl.int32), 0)
        mass += tl.sum(tl.where(higher, tl.exp(other - highest)[:, None], 0.0), 0)
    kept = (slot < held) & (count < tl.where(top_k > 0, top_k, FEW))
    if top_k > 0:
        total = tl.sum(tl.where(kept, tl.exp(score - highest), 0.0), 0)
    kept = kept & (mass < _allowed(top_p, total)) & (score >= lowest)
    at = tl.load(places + slot, mask=kept, other=0)
    value = tl.load(noised + at, mask=kept, other=LEAST)
    best = tl.max(value, 0)
    first = tl.min(tl.where(kept & (value == best), at, NONE), 0)
    return best, tl.where(best > LEAST, first, 0)


@triton.jit
def _above(scores, listed, reached, edge, highest, OR_EQUAL: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return how many scores are above an edge, and their mass."""
    count, mass = tl.full((), 0, tl.int32), tl.full((), 0.0, tl.float32)
    for start in range(0, reached, WIDE // BLOCK):
        at, there = _scores_at(listed, start, reached, BLOCK, WIDE)
        score = tl.load(scores + at, mask=there, other=LEAST)
        counts = (score >= edge if OR_EQUAL else score > edge) & (score > LEAST)
        count += tl.sum(counts.to(tl.int32), 0)
        mass += tl.sum(tl.where(counts, tl.exp(score - highest), 0.0), 0)
    return count, mass


@triton.jit
def _kth(scores, listed, reached, bound, highest, top_k, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return an edge that the k highest scores reach, those that tie with the last, and no others: or the bound, if fewer reach
    that. The search is among integers that are ordered as fp32 are."""
    low = _ordered(bound.to(tl.int32, bitcast=True)).to(tl.int64)
    high = _ordered(highest.to(tl.int32, bitcast=True)).to(tl.int64)
    while low < high:
        middle = low + ((high - low + 1) >> 1)
        edge = _ordered(middle.to(tl.int32)).to(tl.float32, bitcast=True)
        count, _ = _above(scores, listed, reached, edge, highest, True, BLOCK, WIDE)
        low = tl.where(count >= top_k, middle, low)
        high = tl.where(count > top_k, high, tl.where(count == top_k, middle, middle - 1))
    return _ordered(low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _ordered(bits):
    """Turn the bits of fp32 into integers in the same order, or back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _best_of_many(
    scores, noised, listed, reached, found, first, highest, total, bound, lowest, top_k, top_p,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the best noised score that filters keep, and its place; begin with the best of all, and pass over all scores."""
    floor = tl.maximum(bound, lowest)
    if top_k > 0:
        edge = _kth(scores, listed, reached, bound, highest, top_k, BLOCK, WIDE)
        _, total = _above(scores, listed, reached, edge, highest, True, BLOCK, WIDE)
        floor = tl.maximum(edge, lowest)
    score, limit, allowed = tl.load(scores + first), tl.full((), LEAST, tl.float32), _allowed(top_p, total)
    is_out = _is_out(scores, listed, reached, score, highest, allowed, floor, BLOCK, WIDE)
    while is_out:
        limit = tl.maximum(limit, score)
        found, first = _best_above(scores, noised, listed, reached, floor, limit, BLOCK, WIDE)
        score = tl.load(scores + first)
        is_out = _is_out(scores, listed, reached, score, highest, allowed, floor, BLOCK, WIDE) & (found > LEAST)
    return found, first


@triton.jit
def _is_out(scores, listed, reached, score, highest, allowed, floor, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return whether top-p or the floor rules out a score."""
    is_out = score < floor
    if (allowed < MOST) & (score >= floor):
        _, mass = _above(scores, listed, reached, score, highest, False, BLOCK, WIDE)
        is_out = mass >= allowed
    return is_out


@triton.jit
def _best_above(scores, noised, listed, reached, floor, limit, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Return the best noised score, and its place, of tokens with a score that reaches the floor and is above the limit."""
    best, first = tl.full((), LEAST, tl.float32), tl.full((), 0, tl.int32)
    for start in range(0, reached, WIDE // BLOCK):
        at, there = _scores_at(listed, start, reached, BLOCK, WIDE)
        score = tl.load(scores + at, mask=there, other=LEAST)
        kept = (score >= floor) & (score > limit)
        value = tl.load(noised + at, mask=kept, other=LEAST)
        highest = tl.max(value, 0)
        at = tl.min(tl.where(kept & (value == highest), at, NONE), 0)
        first = tl.where(highest > best, at, first)
        best = tl.maximum(highest, best)
    return best, first


def sample(
    logits: torch.Tensor,
    vocabulary: torch.Tensor | None,
    settings: Settings,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    steps: torch.Tensor,
    features: Features,
    token: torch.Tensor,
    best: torch.Tensor,
) -> None:
    """Two launches. Buffers of features that no row needs are not touched."""
    n, size = logits.shape
    block = max(BLOCK, triton.next_power_of_2(triton.cdiv(size, MOST_BLOCKS)))
    blocks = triton.cdiv(size, block)
    parts, firsts = logits.new_empty(3, n, blocks, dtype=torch.float32), logits.new_empty(n, blocks, dtype=torch.int32)
    shaped, few, listed, places = parts, parts, firsts, firsts
    if features.filters:
        shaped, few = parts.new_empty(2, n, blocks * block), parts.new_empty(n, FEW)
        listed, places = torch.empty_like(firsts), firsts.new_empty(n, FEW)
    ids = rows if vocabulary is None else vocabulary
    _shape[(blocks, n)](
        logits, ids, settings.numbers, settings.whole, settings.bans, settings.bias if features.bias else settings.numbers,
        settings.seen if features.penalties else settings.whole, tokens, rows, starts, steps, parts, firsts, shaped,
        size, logits.stride(0), settings.vocabulary, tokens.stride(0), vocabulary is not None, *features, block,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _pick[(n,)](
        parts, firsts, ids, settings.numbers, settings.whole, rows, shaped, listed, few, places, token, best, size, blocks,
        vocabulary is not None, features.filters, block, max(16, triton.next_power_of_2(blocks)), FEW, max(WIDE, block),
        num_warps=8 if features.filters else 4,
    )  # fmt: skip


@kernel
def _count(
    seen, result, active, width, FIELDS: tl.constexpr, ACCEPTED: tl.constexpr, TOKENS: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, step = tl.program_id(0).to(tl.int64), tl.arange(0, STEPS)
    accepted = tl.load(result + row * FIELDS + ACCEPTED).to(tl.int32)
    counts = step <= tl.where(tl.load(active + row) != 0, accepted, -1)
    token = tl.load(result + row * FIELDS + TOKENS + step, mask=counts, other=0.0).to(tl.int32)
    tl.atomic_add(seen + row * width + token, tl.full((STEPS,), NEW, tl.int32), mask=counts)


def count(seen: torch.Tensor, result: torch.Tensor, active: torch.Tensor) -> None:
    """One program for each row; a token that occurs twice is added twice."""
    _count[(len(result),)](
        seen, result, active, seen.stride(0), fields.FIELDS, fields.ACCEPTED, fields.TOKENS, MOST_TOKENS, num_warps=1
    )
