"""The choice of tokens in compiled CPU code (numba), from fp32 logits. `reference/sampling.py` defines it.

Most tokens cannot be chosen, and most of the time goes into finding that out:

    top-k, top-p, min-p    each keeps the tokens from some score on, which bisection finds without sorting: over the highest
                           scores of blocks first, then over the few tokens that are left
    noise                  is nowhere above -ln t, which takes a few operations; only tokens that could be best with that get
                           the noise itself
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit

from TIDE.kernels.cpu import noise as cpu_noise
from TIDE.kernels.cpu.noise import _gumbel, _hashed, _keys, _most
from TIDE.kernels.reference import sampling
from TIDE.kernels.reference.noise import MOST
from TIDE.kernels.reference.sampling import NEW, Features, Settings

BLOCK = 64  # neighbouring tokens that are left out together
CHUNK = 1024  # terms that are summed in fp32
GAPS = (np.float32(2), np.float32(5), np.float32(8), np.float32(11))  # below the highest score, where top-p may end
LEAST, ZERO = np.float32(-np.inf), np.float32(0)

# numba caches compiled code until this file changes, so this file states what it was compiled for.
assert (cpu_noise.VERSION, MOST, NEW) == (1, 22.2, 2)
assert (sampling.NOISE, sampling.TEMPERATURE, sampling.TOP_P, sampling.MIN_P) == (0, 1, 2, 3)
assert (sampling.REPETITION, sampling.PRESENCE, sampling.FREQUENCY) == (4, 5, 6)
assert (sampling.SEED_LOW, sampling.SEED_HIGH, sampling.TOP_K, sampling.FORCED_AT, sampling.FORCED) == (0, 1, 2, 3, 4)
assert " ".join(Features._fields) == "penalties bias rules filters"


class Tables(NamedTuple):
    """`Settings` as numpy arrays."""

    numbers: Any
    whole: Any
    bans: Any
    bias: Any
    seen: Any


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
    """Choose a token from each of (n, tokens) logits, as `sampling.sample` does. If a logit is NaN, the token means nothing."""
    assert logits.dtype == torch.float32 and logits.shape[1] > 0
    tables = Tables(*(getattr(settings, name).numpy() for name in Tables._fields))
    is_whole = vocabulary is None
    ids = _all_ids(logits.shape[1]) if vocabulary is None else np.ascontiguousarray(vocabulary.numpy(), np.int32)
    assert ids[-1] < settings.vocabulary or not (features.penalties or features.bias)
    places = _whole(tokens), _whole(rows), _whole(starts), _whole(steps)
    own = np.ascontiguousarray(logits.detach().numpy())
    token.numpy()[:], best.numpy()[:] = _sample(own, ids, is_whole, tables, *places, features)


@functools.cache
def _all_ids(count: int) -> np.ndarray:
    return np.arange(count, dtype=np.int32)


def _whole(values: torch.Tensor) -> np.ndarray:
    return np.ascontiguousarray(values.numpy(), np.int64)


@njit(cache=True)
def _sample(logits, ids, is_whole, tables, tokens, rows, starts, steps, features):  # type: ignore[no-untyped-def]
    token, best = np.zeros(len(logits), np.int64), np.full(len(logits), np.float32(np.inf))
    for t in range(len(logits)):
        if not _has_nan(logits[t]):
            row, position = rows[t], starts[t] + 1
            drafts = tokens[1 : 1 + steps[t], row]
            scores = _scores(logits[t], ids, is_whole, tables, row, position, drafts, features)
            place, best[t] = _choice(scores, ids, tables.numbers[row], tables.whole[row], position, features.filters)
            token[t] = ids[place]
    return token, best


@njit(cache=True)
def _has_nan(logits):  # type: ignore[no-untyped-def]
    bits, most = logits.view(np.int32), np.int32(0)
    for k in range(len(bits)):
        most = max(most, np.int32(bits[k] & 0x7FFFFFFF))
    return most > 0x7F800000


@njit(cache=True)
def _scores(logits, ids, is_whole, tables, row, position, drafts, features):  # type: ignore[no-untyped-def]
    """Return a copy: everything up to temperature, `sampling.scores_of`."""
    scores, own, whole = logits.copy(), tables.numbers[row], tables.whole[row]
    if features.penalties and (own[sampling.REPETITION] != 1 or own[sampling.PRESENCE] != 0 or own[sampling.FREQUENCY] != 0):
        _penalize(scores, logits, ids, tables.seen[row] if is_whole else tables.seen[row][ids], drafts, own)
    if features.bias:
        bias = tables.bias[row] if is_whole else tables.bias[row][ids]
        for k in range(len(scores)):
            scores[k] += bias[k]
    if features.rules:
        for banned, first, last in tables.bans[row]:
            if first <= position <= last:
                _write(scores, ids, banned, LEAST)
        if position == whole[sampling.FORCED_AT]:
            scores[:] = LEAST
            _write(scores, ids, whole[sampling.FORCED], np.float32(0))
    temperature = own[sampling.TEMPERATURE]
    if temperature != 1:
        for k in range(len(scores)):
            scores[k] /= temperature
    return scores


@njit(cache=True)
def _write(scores, ids, token, value):  # type: ignore[no-untyped-def]
    place = _place(ids, token)
    if place >= 0:
        scores[place] = value


@njit(cache=True)
def _place(ids, token):  # type: ignore[no-untyped-def]
    """Return the place of a token among rising ids, or -1."""
    low, high = 0, len(ids) - 1
    while low < high:
        middle = (low + high) >> 1
        if ids[middle] < token:
            low = middle + 1
        else:
            high = middle
    return low if ids[low] == token else -1


@njit(cache=True)
def _penalize(scores, logits, ids, seen, drafts, own):  # type: ignore[no-untyped-def]
    repetition, presence, frequency = own[sampling.REPETITION], own[sampling.PRESENCE], own[sampling.FREQUENCY]
    for k in range(len(scores)):
        scores[k] = _penalized(logits[k], seen[k], repetition, presence, frequency)
    for draft in drafts:
        place = _place(ids, draft)
        if place >= 0:
            times = seen[place]
            for other in drafts:
                times += NEW if other == draft else 0
            scores[place] = _penalized(logits[place], times, repetition, presence, frequency)


@njit(cache=True)
def _penalized(logit, seen, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    lower, higher = logit * repetition, logit / repetition  # both, so that a loop has no branches
    repeated = lower if logit < 0 else higher
    score = repeated if seen > 0 else logit
    return score - (presence * np.float32(seen >= NEW) + frequency * np.float32(seen // NEW))


@njit(cache=True)
def _choice(scores, ids, own, whole, position, filters):  # type: ignore[no-untyped-def]
    """Return the place of the best token, and its score with noise."""
    highs = _highs(scores)
    highest = _highest(highs, len(highs))
    if math.isnan(highest):  # infinities met
        return 0, np.float32(np.inf)
    top = _first(scores, highs, highest)
    if own[sampling.NOISE] == 0 or not math.isfinite(highest):
        return top, highest
    cut = _cut(scores, highs, highest, own, whole[sampling.TOP_K]) if filters else LEAST
    first, second = _keys(np.uint32(whole[sampling.SEED_LOW]), np.uint32(whole[sampling.SEED_HIGH]), position)
    best, place = scores[top] + _gumbel(_hashed(first, second, ids[top])), top
    for block in range(len(highs)):
        if highs[block] < cut or highs[block] + np.float32(MOST) < best:
            continue
        start, stop = block * BLOCK, min(block * BLOCK + BLOCK, len(scores))
        if _any_above(scores[start:stop], ids[start:stop], first, second, cut, best):
            for k in range(start, stop):
                word = _hashed(first, second, ids[k])
                if scores[k] >= cut and scores[k] + _most(word) >= best:
                    value = scores[k] + _gumbel(word)
                    if value > best or (value == best and k < place):
                        best, place = value, k
    return place, best


@njit(cache=True)
def _highs(scores):  # type: ignore[no-untyped-def]
    """Return the highest score of each block."""
    highs = np.empty(-(-len(scores) // BLOCK), np.float32)
    for block in range(len(scores) // BLOCK):
        highs[block] = _highest(scores[block * BLOCK : (block + 1) * BLOCK], BLOCK)
    if len(scores) % BLOCK:
        highs[-1] = _highest(scores[-(len(scores) % BLOCK) :], len(scores) % BLOCK)
    return highs


@njit(cache=True)
def _highest(values, count):  # type: ignore[no-untyped-def]
    """Return the highest of values, compared as whole numbers: loops over those are vectorised."""
    bits, highest = values.view(np.int32), np.int32(-0x80000000)
    for k in range(count):
        highest = max(highest, np.int32(bits[k] ^ ((bits[k] >> 31) & 0x7FFFFFFF)))
    return np.int32(highest ^ ((highest >> 31) & 0x7FFFFFFF)).view(np.float32)


@njit(cache=True)
def _first(scores, highs, highest):  # type: ignore[no-untyped-def]
    """Return the first place of the highest score."""
    block = 0
    while highs[block] != highest:
        block += 1
    place = block * BLOCK
    while scores[place] != highest:
        place += 1
    return place


@njit(cache=True)
def _cut(scores, highs, highest, own, top_k):  # type: ignore[no-untyped-def]
    """Return the lowest score that top-k, then top-p, then min-p leave: `sampling._kept`."""
    cut = LEAST
    if 0 < top_k < len(scores):
        likely = _edge(highs, np.ones_like(highs), top_k, LEAST, highest) if top_k <= len(highs) else LEAST
        listed = _listed(scores, highs, likely)
        cut = _edge(listed, np.ones_like(listed), top_k, likely, highest)
    if own[sampling.TOP_P] < 1:
        cut = _top_p(scores, highs, highest, cut, own[sampling.TOP_P])
    if own[sampling.MIN_P] > 0:
        cut = max(cut, highest + np.float32(math.log(np.float64(own[sampling.MIN_P]))))
    return cut


@njit(cache=True)
def _top_p(scores, highs, highest, cut, top_p):  # type: ignore[no-untyped-def]
    """Return the lowest score that top-p leaves of those not below `cut`."""
    masses = _masses(_listed(scores, highs, cut) if cut > LEAST else scores, highest)
    goal, least = top_p * masses[-1], cut
    for k in range(len(GAPS)):
        if masses[k] >= goal:
            least = max(cut, highest - GAPS[k])
            break
    listed = _listed(scores, highs, least)
    shares = np.empty_like(listed)
    for k in range(len(listed)):
        shares[k] = _exp(listed[k] - highest)
    return _edge(listed, shares, goal, least, highest)


@njit(fastmath={"reassoc", "nsz"}, cache=True)
def _masses(values, highest):  # type: ignore[no-untyped-def]
    """Return the shares, relative to the highest score's, of the scores within each of GAPS of it, and of all."""
    a = b = c = d = every = 0.0
    for start in range(0, len(values), CHUNK):
        some = values[start : start + CHUNK]
        own_a = own_b = own_c = own_d = own_every = ZERO
        for k in range(len(some)):
            share = _exp(some[k] - highest)
            own_a += share if some[k] >= highest - GAPS[0] else ZERO
            own_b += share if some[k] >= highest - GAPS[1] else ZERO
            own_c += share if some[k] >= highest - GAPS[2] else ZERO
            own_d += share if some[k] >= highest - GAPS[3] else ZERO
            own_every += share
        a, b, c, d, every = a + own_a, b + own_b, c + own_c, d + own_d, every + own_every
    return a, b, c, d, every


@njit(cache=True)
def _listed(scores, highs, least):  # type: ignore[no-untyped-def]
    """Return the scores that are not below `least`."""
    found, count = np.empty(len(scores), np.float32), 0
    for block in range(len(highs)):
        if highs[block] >= least:
            for score in scores[block * BLOCK : (block + 1) * BLOCK]:
                found[count] = score
                count += score >= least
    return found[:count]


@njit(cache=True)
def _edge(values, weights, goal, least, most):  # type: ignore[no-untyped-def]
    """Return the largest number, from `least` to `most`, such that the weights of all values not below it reach a goal."""
    low, high = _ordered(least), _ordered(most)
    while low < high:
        middle = (low + high + 1) >> 1
        if _weight(values, weights, _value(middle)) >= goal:
            low = middle
        else:
            high = middle - 1
    return _value(low)


@njit(fastmath={"reassoc", "nsz"}, cache=True)
def _weight(values, weights, least):  # type: ignore[no-untyped-def]
    total = 0.0
    for start in range(0, len(values), CHUNK):
        some, own, part = values[start : start + CHUNK], weights[start : start + CHUNK], ZERO
        for k in range(len(some)):
            part += own[k] if some[k] >= least else ZERO
        total += part
    return total


@njit(cache=True)
def _ordered(value):  # type: ignore[no-untyped-def]
    """Return the place of a number among all of fp32."""
    bits = np.int64(np.float32(value).view(np.int32))
    return bits if bits >= 0 else np.int64(-0x80000000) - bits


@njit(cache=True)
def _value(place):  # type: ignore[no-untyped-def]
    return np.int32(place if place >= 0 else np.int64(-0x80000000) - place).view(np.float32)


@njit(fastmath={"contract", "nsz"}, cache=True)
def _exp(x):  # type: ignore[no-untyped-def]
    """Return e^x for x <= 0, off by 1e-7 of it: the polynomial of Cephes, as loops over math.exp are not vectorised."""
    x = max(x, np.float32(-87))
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    x = x - whole * np.float32(0.693359375) + whole * np.float32(2.12194440e-4)
    found = np.float32(1.9875691500e-4) * x + np.float32(1.3981999507e-3)
    found = found * x + np.float32(8.3334519073e-3)
    found = found * x + np.float32(4.1665795894e-2)
    found = found * x + np.float32(1.6666665459e-1)
    found = found * x + np.float32(5.0000001201e-1)
    found = found * x * x + x + np.float32(1)
    return found * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


@njit(fastmath={"contract"}, cache=True)
def _any_above(scores, ids, first, second, cut, best):  # type: ignore[no-untyped-def]
    found = np.int32(0)
    for k in range(len(scores)):
        highest = scores[k] + _most(_hashed(first, second, ids[k]))
        found = np.int32(found | np.int32((highest >= best) & (scores[k] >= cut)))
    return found != 0
