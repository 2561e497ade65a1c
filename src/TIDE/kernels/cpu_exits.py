"""Exits in compiled CPU code (numba), fp32, weights in 8 bits: the memory head's block, and logits and score of its guess.

`MemoryHead` and `Router` define in torch what is computed here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from TIDE.kernels import cpu_ops, cpu_products
from TIDE.kernels.cpu_ops import _decoder_layer, _linear, _normed, _write_kv
from TIDE.kernels.cpu_products import ZERO, _dot, _padded, _products
from TIDE.kernels.layer import UNLIKELY, Entry, Int8Weight, Layer, Norm, Pass

FAINT = np.float32(-16)  # tokens so far below the best one do not count in signals
PARTS = 8

# numba caches compiled code until this file changes, so this file states the versions it was compiled for.
assert (cpu_ops.VERSION, cpu_products.VERSION, UNLIKELY) == (13, 4, 20)
assert " ".join(Entry._fields) == "shallow_center shallow_spread deep_center deep_spread fuse recall eps"


def remember(entry: Entry, deep: np.ndarray) -> np.ndarray:
    """(n, memories * hidden) states of finished tokens -> (n, hidden): `MemoryHead.remember`."""
    return _remember(entry, deep)


def memory_block(
    entry: Entry,
    layer: Layer,
    cos: np.ndarray,
    sin: np.ndarray,
    row: int,
    start: int,
    stop: int,
    shallow: np.ndarray,
    before: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
) -> np.ndarray:
    """Run a memory head for the positions [start, stop) of a row: its guess (hidden,) for the last one; K/V of all are kept.

    Args:
        cos, sin: of all positions.
        shallow, before, keys, values: the head's inputs and K/V, for all rows and positions.
    """
    return _memory_block(entry, layer[:-1], cos, sin, row, start, stop, shallow, before, keys, values)


def judge(
    states: np.ndarray, norm: Norm, likely: Int8Weight, others: Int8Weight, sure: float, router: tuple[Any, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """(n, hidden) guesses of an exit head -> (n, tokens) logits by norm and LM head, and (n,) scores of the router.

    Args:
        norm: the model's last one.
        likely, others: the rows of the LM head. Where the best of the likely tokens has a probability of `sure` among them, the
            others are not looked at: they get logits `UNLIKELY` below the worst likely one. Each is judged alone.
        router: `Router.arrays`.
    """
    return _judge(states, norm, likely, others, np.float32(sure), router)


def signals(logits: np.ndarray) -> np.ndarray:
    """(n, vocabulary) -> (n, 4): `router.signals_of`."""
    return _signals(logits)


@njit(fastmath=True, cache=True)
def _judge(states, norm, likely, others, sure, router):  # type: ignore[no-untyped-def]
    h = _normed(states, norm)
    first, found = len(likely.values), _products(h, likely)
    logits = np.empty((len(states), first + len(others.values)), np.float32)
    logits[:, :first] = found[: len(states)]
    seen = _signals(logits[:, :first])
    for t in range(len(states)):
        logits[t, first:] = logits[t, :first].min() - np.float32(UNLIKELY)
    unsure = np.flatnonzero(seen[:, 0] < sure)
    if len(others.values) and len(unsure):
        found = _products(_padded(h[unsure]), others)
        for place, t in enumerate(unsure):
            logits[t, first:] = found[place]
        seen[unsure] = _signals(logits[unsure])
    return logits, _router_scores(states, seen, router)


@njit(fastmath=True, cache=True)
def _router_scores(states, signals, router):  # type: ignore[no-untyped-def]
    down, down_bias, up, up_bias, temperature, offset, eps = router
    features, out = np.empty(down.shape[1], np.float32), np.empty(len(states), np.float32)
    for t in range(len(states)):
        _normed_parts(states[t : t + 1], features[None, : states.shape[1]], states.shape[1], np.float32(eps))
        features[states.shape[1] :] = signals[t]
        total = up_bias[0]
        for o in range(len(down)):
            x = _dot(down[o], features) + down_bias[o]
            total += up[0, o] * x / (np.float32(1) + math.exp(-x))
        out[t] = np.float32(1) / (np.float32(1) + math.exp(-(total / temperature[0] + offset[0])))
    return out


@njit(fastmath=True, cache=True)
def _memory_block(entry, parts, cos, sin, row, start, stop, shallow, before, keys, values):  # type: ignore[no-untyped-def]
    dim, width, eps = before.shape[2], shallow.shape[2], np.float32(entry.eps)
    x = np.empty((stop - start, dim), np.float32)
    rows, positions, tables = np.full(len(x), row), np.arange(start, stop), np.arange(len(keys)).reshape(-1, 1)
    joined = np.zeros((len(x), width + dim), np.float32)
    _normed_parts(shallow[row, start:stop], joined[:, :width], dim, eps)
    first = 1 if start == 0 else 0  # there is nothing before the first token
    _normed_parts(before[row, start + first - 1 : stop - 1], joined[first:, width:], dim, eps)
    for t in range(len(x)):
        for k in range(width):
            joined[t, k] = (joined[t, k] - entry.shallow_center[k]) / entry.shallow_spread[k]
        for k in range(dim):
            joined[t, width + k] = (joined[t, width + k] - entry.deep_center[k]) / entry.deep_spread[k]
    x[:] = _linear(_padded(joined), entry.fuse, entry.deep_center[:0])[: len(x)]
    last = len(x) - 1
    if last:
        before_last = Pass(x[:last], cos, sin, rows[:last], positions[:last], positions[:last], positions[:last], tables)
        _write_kv(parts[1], _normed(before_last.x, parts[0]), before_last, keys, values)
    newest = Pass(x[last:], cos, sin, rows[last:], positions[last:], positions[last:], positions[last:], tables)
    _decoder_layer(parts, newest, keys, values)
    for k in range(dim):
        x[last, k] = x[last, k] * entry.deep_spread[k] + entry.deep_center[k]
    return x[last]


@njit(fastmath=True, cache=True)
def _remember(entry, deep):  # type: ignore[no-untyped-def]
    normed = np.empty_like(deep)
    _normed_parts(deep, normed, len(entry.deep_center), np.float32(entry.eps))
    return _linear(_padded(normed), entry.recall, entry.deep_center[:0])[: len(deep)]


@njit(fastmath=True, cache=True)
def _normed_parts(x, out, dim, eps):  # type: ignore[no-untyped-def]
    """Scale each `dim` columns to a root mean square of 1."""
    for t in range(len(x)):
        for start in range(0, x.shape[1], dim):
            part = x[t, start : start + dim]
            scale = np.float32(1) / math.sqrt(_dot(part, part) / np.float32(dim) + eps)
            for k in range(dim):
                out[t, start + k] = part[k] * scale


@njit(fastmath=True, cache=True)
def _signals(logits):  # type: ignore[no-untyped-def]
    out = np.empty((len(logits), 4), np.float32)
    for t in range(len(logits)):
        parts = np.zeros((PARTS, 4), np.float32)
        _gather(logits[t], _highest(logits[t]), parts)
        total, mixed, tops, second = parts[:, 0].sum(), parts[:, 1].sum(), parts[:, 2].sum(), parts[:, 3].max()
        out[t, 0] = np.float32(1) / total
        out[t, 1] = -math.log(total)
        out[t, 2] = (np.float32(1) - (second if tops < 2 else np.float32(1))) / total
        out[t, 3] = math.log(total) - mixed / total
    return out


@njit(fastmath=True, cache=True)
def _highest(x):  # type: ignore[no-untyped-def]
    best = x[0]
    for k in range(len(x)):
        best = max(best, x[k])
    return best


@njit(fastmath=True, parallel=True, cache=True)
def _gather(logits, best, parts):  # type: ignore[no-untyped-def]
    """Gather, for each part of the tokens, with weights e^gap: the sums of weights and of weight times gap, the number of best
    tokens, and the second best weight."""
    for part in prange(PARTS):
        total = mixed = tops = second = ZERO
        for k in range(part * len(logits) // PARTS, (part + 1) * len(logits) // PARTS):
            gap = logits[k] - best
            if gap > FAINT:
                weight = np.float32(math.exp(gap))
                total += weight
                mixed += weight * gap
                if gap == ZERO:
                    tops += np.float32(1)
                else:
                    second = max(second, weight)
        parts[part, 0], parts[part, 1], parts[part, 2], parts[part, 3] = total, mixed, tops, second
