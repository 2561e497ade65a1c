"""The best token by an LM head that is most of a model, in compiled CPU code (numba): most rows are read in 8 bits only.

    w = w8 + e                         a row of the LM head: what 8 bits keep of it, and the rest, whose length is known
    |h·w - h·w8| = |h·e| <= |h|·|e|

So products with 8-bit rows, which read a quarter of the memory, tell which rows cannot be the best. The few others are
multiplied as they are, and the best token is that of the full product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from TIDE.kernels.cpu import products as cpu_products
from TIDE.kernels.cpu.products import ZERO, _dot
from TIDE.kernels.cpu.threads import in_turn
from TIDE.kernels.weights import Dense, Weight

ROUNDING = np.float32(1e-5)  # of the lengths: the products themselves are rounded
AT_ONCE = 4096  # rows that are measured at a time
GROUP = 64  # words that are added up before their place counts
PARTS = 16

# numba caches compiled code until this file changes, so this file states the version it was compiled for.
assert cpu_products.VERSION == 5


class Screen(NamedTuple):
    """A weight in 8 bits, and what that makes of its rows."""

    values: Any  # (rows, columns) int8
    scales: Any  # (rows,)
    lost: Any  # (rows,) lengths of what 8 bits do not keep, and of how products are rounded


def suits(weight: Weight) -> bool:
    """Return True if a weight can have a screen: one that is packed is read as quickly as 8 bits of it."""
    return isinstance(weight, Dense)


def screen_of(weight: Dense) -> Screen:
    """Return the screen of a weight."""
    values, (scales, lost) = np.empty(weight.values.shape, np.int8), np.empty((2, weight.rows), np.float32)
    for start in range(0, weight.rows, AT_ONCE):
        some = slice(start, start + AT_ONCE)
        own = weight.values[some]
        scales[some] = np.maximum(np.abs(own).max(1), np.float32(1e-30)) / np.float32(127)
        values[some] = np.rint(own / scales[some, None])
        lost[some] = np.linalg.norm(own - values[some] * scales[some, None], axis=1) + ROUNDING * np.linalg.norm(own, axis=1)
    return Screen(values, scales, lost)


@in_turn
def fingerprint(weight: Dense) -> int:
    """Return a number that tells a weight from what it was before it was changed."""
    return int(_fingerprint(weight.values.reshape(-1).view(np.int32)))


@in_turn
def best_logits(h: np.ndarray, weight: Dense, screen: Screen) -> np.ndarray:
    """(n, columns), (rows, columns) -> (n, rows) logits: exact where they may be the best, and too low to be so elsewhere."""
    return _best_logits(h, weight.values, screen)


@njit(cache=True)
def _best_logits(h, weight, screen):  # type: ignore[no-untyped-def]
    out = np.empty((len(h), len(weight)), np.float32)
    _approximate(h, screen.values, screen.scales, out)
    for t in range(len(h)):
        length = _length(h[t])
        if math.isfinite(length):
            _multiply(h[t], weight, _possible(out[t], screen.lost, length), out[t])
        else:
            out[t] = np.float32(np.nan)
    return out


@njit(fastmath=True, parallel=True, cache=True)
def _approximate(h, values, scales, out):  # type: ignore[no-untyped-def]
    for o in prange(len(values)):
        row = values[o]
        for t in range(len(h)):
            x, total = h[t], ZERO
            for k in range(len(row)):
                total += np.float32(row[k]) * x[k]
            out[t, o] = total * scales[o]


@njit(cache=True)
def _length(x):  # type: ignore[no-untyped-def]
    total = 0.0
    for k in range(len(x)):
        total += x[k] * x[k]
    return np.float32(math.sqrt(total))


@njit(parallel=True, cache=True)
def _possible(found, lost, length):  # type: ignore[no-untyped-def]
    """Return the rows whose logit may be the best."""
    lowest = np.empty(PARTS, np.float32)
    for part in prange(PARTS):
        best = np.float32(-np.inf)
        for k in range(part * len(found) // PARTS, (part + 1) * len(found) // PARTS):
            best = max(best, found[k] - length * lost[k])
        lowest[part] = best
    least = lowest.max()
    rows, count = np.empty(len(found), np.int64), 0
    for k in range(len(found)):
        rows[count] = k
        count += found[k] + length * lost[k] >= least
    return rows[:count]


@njit(parallel=True, cache=True)
def _multiply(x, weight, rows, out):  # type: ignore[no-untyped-def]
    for k in prange(len(rows)):
        out[rows[k]] = _dot(weight[rows[k]], x)


@njit(parallel=True, cache=True)
def _fingerprint(words):  # type: ignore[no-untyped-def]
    """Return a sum of words, those of each group by its place."""
    parts, groups = np.zeros(PARTS, np.int64), len(words) // GROUP
    for part in prange(PARTS):
        total = np.int64(0)
        for group in range(part * groups // PARTS, (part + 1) * groups // PARTS):
            own = np.int32(0)  # it may wrap
            for word in words[group * GROUP : (group + 1) * GROUP]:
                own = np.int32(own + word)
            total += np.int64(own) * (2 * group + 1)
        parts[part] = total
    return parts.sum() + words[groups * GROUP :].sum()
