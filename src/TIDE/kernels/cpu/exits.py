"""Exits in compiled CPU code (numba), fp32, weights in 8 bits: the memory head's block, and logits and score of its guess.

`MemoryHead` and `Router` define in torch what is computed here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, prange

from TIDE.kernels.cpu import ops as cpu_ops
from TIDE.kernels.cpu import products as cpu_products
from TIDE.kernels.cpu.compile import wait_for
from TIDE.kernels.cpu.ops import (
    PreparedLayer,
    _decoder_layer,
    _normed,
    _write_kv,
    calls,
    compile_for,
    plain_norm,
    prepared,
)
from TIDE.kernels.cpu.products import PRODUCTS, ROWS, ZERO, _dot, _linear, _padded, described
from TIDE.kernels.cpu.threads import in_turn
from TIDE.kernels.layer import MLP, UNLIKELY, Attention, FusionWeights, Layer, Norm
from TIDE.kernels.weights import GROUP, Int8, Weight

FAINT = np.float32(-16)  # tokens so far below the best one do not count in signals
PARTS = 8

# numba caches compiled code until this file changes, so this file states the versions it was compiled for.
assert (cpu_ops.VERSION, cpu_products.VERSION, UNLIKELY) == (14, 5, 20)
assert " ".join(FusionWeights._fields) == "shallow_center shallow_spread deep_center deep_spread fuse recall eps"


@in_turn
def remember(fusion: FusionWeights, deep: np.ndarray) -> np.ndarray:
    """(n, memories * hidden) states of finished tokens -> (n, hidden): `MemoryHead.remember`."""
    wait_for("exits.compile_exits")
    return _remember(*_remembered(fusion, deep), calls(PRODUCTS[type(fusion.recall)]))


def _remembered(fusion: FusionWeights, deep: np.ndarray) -> tuple[Any, ...]:
    return len(fusion.deep_center), np.float32(fusion.eps), described(fusion.recall), deep


@in_turn
def memory_block(
    fusion: FusionWeights,
    layer: PreparedLayer,
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
    wait_for("exits.compile_exits")
    seen = shallow, before, keys, values
    return _memory_block(*_block(fusion, layer, cos, sin, (row, start, stop), seen), calls(layer.products))


def _block(
    fusion: FusionWeights,
    layer: PreparedLayer,
    cos: np.ndarray,
    sin: np.ndarray,
    span: tuple[int, int, int],
    seen: tuple[Any, ...],
) -> tuple[Any, ...]:
    head = layer.weights, layer.norms, layer.numbers
    return fusion[:4], np.float32(fusion.eps), described(fusion.fuse), head, cos, sin, span, seen


@in_turn
def judge(
    states: np.ndarray, norm: Norm, likely: Weight, others: Weight, sure: float, router: tuple[Any, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """(n, hidden) guesses of an exit head -> (n, tokens) logits by norm and LM head, and (n,) scores of the router.

    Args:
        norm: the model's last one.
        likely, others: the rows of the LM head. Where the best of the likely tokens has a probability of `sure` among them, the
            others are not looked at: they get logits `UNLIKELY` below the worst likely one. Each is judged alone.
        router: `Router.arrays`.
    """
    wait_for("exits.compile_exits")
    return _judge(*_judged(states, norm, likely, others, sure, router), calls(PRODUCTS[type(likely)]))


def _judged(
    states: np.ndarray, norm: Norm, likely: Weight, others: Weight, sure: float, router: tuple[Any, ...]
) -> tuple[Any, ...]:
    return states, plain_norm(norm), described(likely), described(others), np.float32(sure), router


@in_turn
def signals(logits: np.ndarray) -> np.ndarray:
    """(n, vocabulary) -> (n, 4): `router.signals_of`."""
    return _signals(logits, len(logits))


def compile_exits() -> None:
    """Compile exits, by arguments that are as small as they may be."""

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    weight, norm = Int8(np.zeros((1, 1, GROUP), np.int8), zeros(1), 1), Norm(zeros(1), 0.0, 0.0, False, zeros(0))
    fusion = FusionWeights(zeros(1), zeros(1), zeros(1), zeros(1), weight, weight, 0.0)
    none = zeros(0)
    attention = Attention(weight, weight, weight, weight, none, none, none, none, norm, norm, 1, 1.0)
    layer = Layer(norm, attention, norm, norm, MLP(weight, weight, weight, none, none, none), norm)
    seen = zeros(1, 1, 1), zeros(1, 1, 1), zeros(1, 1, 1, 1), zeros(1, 1, 1, 1)
    compile_for(_memory_block, *_block(fusion, prepared(layer), zeros(1, 1), zeros(1, 1), (0, 0, 1), seen))
    compile_for(_remember, *_remembered(fusion, zeros(1, 1)))
    router = zeros(1, 5), zeros(1), zeros(1, 1), zeros(1), zeros(1), zeros(1), 0.0
    compile_for(_judge, *_judged(zeros(1, 1), norm, weight, weight, 0.0, router))


@njit(fastmath=True, cache=True)
def _judge(states, norm, likely, others, sure, router, calls):  # type: ignore[no-untyped-def]
    h, count, first = _normed(states, norm), len(states), likely[ROWS]
    width = first + others[ROWS]
    best = _linear(h, likely, calls)
    seen = _signals(best, count)
    logits = np.empty((count, width), np.float32)
    for t in range(count):
        unlikely = _lowest(best[t]) - np.float32(UNLIKELY)
        for k in range(width):
            logits[t, k] = best[t, k] if k < first else unlikely
    unsure = np.flatnonzero(seen[:, 0] < sure)
    if others[ROWS] and len(unsure):
        rest = _linear(_padded(h[unsure]), others, calls)
        for place, t in enumerate(unsure):
            for k in range(first, width):
                logits[t, k] = rest[place, k - first]
            whole = _signals(logits[t : t + 1], 1)
            for k in range(4):
                seen[t, k] = whole[0, k]
    return logits, _router_scores(states, seen, router)


@njit(fastmath=True, cache=True)
def _router_scores(states, signals, router):  # type: ignore[no-untyped-def]
    down, down_bias, up, up_bias, temperature, offset, eps = router
    width, out = states.shape[1], np.empty(len(states), np.float32)
    all_features = np.empty((len(states), down.shape[1]), np.float32)
    _normed_parts(states, all_features, 0, 0, width, np.float32(eps))
    for t in range(len(states)):
        features = all_features[t]
        for k in range(4):
            features[width + k] = signals[t, k]
        total = up_bias[0]
        for o in range(len(down)):
            x = _dot(down[o], features) + down_bias[o]
            total += up[0, o] * x / (np.float32(1) + math.exp(-x))
        out[t] = np.float32(1) / (np.float32(1) + math.exp(-(total / temperature[0] + offset[0])))
    return out


@njit(fastmath=True, cache=True)
def _memory_block(joining, eps, fuse, head, cos, sin, span, seen, calls):  # type: ignore[no-untyped-def]
    shallow_center, shallow_spread, deep_center, deep_spread = joining
    weights, norms, numbers = head
    row, start, stop = span
    shallow, before, keys, values = seen
    dim, width, count = before.shape[2], shallow.shape[2], stop - start
    rows, positions = np.full(count, row), np.arange(start, stop)
    tables = np.arange(len(keys), dtype=np.int32).reshape(-1, 1)
    joined = np.zeros((count, width + dim), np.float32)
    _normed_parts(shallow[row, start:stop], joined, 0, 0, dim, eps)
    first = 1 if start == 0 else 0  # there is nothing before the first token
    _normed_parts(before[row, start + first - 1 : stop - 1], joined, first, width, dim, eps)
    for t in range(count):
        for k in range(width):
            joined[t, k] = (joined[t, k] - shallow_center[k]) / shallow_spread[k]
        for k in range(dim):
            joined[t, width + k] = (joined[t, width + k] - deep_center[k]) / deep_spread[k]
    x = _linear(_padded(joined), fuse, calls)[:count]
    last = count - 1
    if last:
        places = rows[:last], positions[:last], positions[:last], positions[:last], tables
        _write_kv(weights, norms, numbers[4], (x[:last], cos, sin, *places), keys, values, calls)
    places = rows[last:], positions[last:], positions[last:], positions[last:], tables
    _decoder_layer(weights, norms, numbers, (x[last:], cos, sin, *places), keys, values, calls)
    for k in range(dim):
        x[last, k] = x[last, k] * deep_spread[k] + deep_center[k]
    return x[last]


@njit(fastmath=True, cache=True)
def _remember(dim, eps, recall, deep, calls):  # type: ignore[no-untyped-def]
    normed = np.empty(deep.shape, np.float32)
    _normed_parts(deep, normed, 0, 0, dim, eps)
    return _linear(_padded(normed), recall, calls)[: len(deep)]


@njit(fastmath=True, cache=True)
def _normed_parts(x, out, row, column, dim, eps):  # type: ignore[no-untyped-def]
    """Scale each `dim` columns to a root mean square of 1, and write them to `out` from a row and a column on."""
    for t in range(len(x)):
        for start in range(0, x.shape[1], dim):
            part = x[t, start : start + dim]
            scale = np.float32(1) / math.sqrt(_dot(part, part) / np.float32(dim) + eps)
            for k in range(dim):
                out[row + t, column + start + k] = part[k] * scale


@njit(fastmath=True, cache=True)
def _signals(logits, count):  # type: ignore[no-untyped-def]
    out = np.empty((count, 4), np.float32)
    for t in range(count):
        parts = np.zeros((PARTS, 4), np.float32)
        _gather(logits[t], _highest(logits[t]), parts)
        total, mixed, tops, second = parts[:, 0].sum(), parts[:, 1].sum(), parts[:, 2].sum(), parts[:, 3].max()
        out[t, 0] = np.float32(1) / total
        out[t, 1] = -math.log(total)
        out[t, 2] = (np.float32(1) - (second if tops < 2 else np.float32(1))) / total
        out[t, 3] = math.log(total) - mixed / total
    return out


@njit(fastmath=True, cache=True)
def _lowest(x):  # type: ignore[no-untyped-def]
    least = x[0]
    for k in range(len(x)):
        least = min(least, x[k])
    return least


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
