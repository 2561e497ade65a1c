"""The best token by an LM head that is most of a model, in compiled CPU code (numba): most rows are read in 8 bits only.

    w = w8 + e      a row of the LM head, what 8 bits keep of it, and the rest; their lengths are known
    h = h8 + d      a state, likewise

    |h·w - h8·w8|  =  |d·w8 + h·e|  <=  |d|·|w8| + |h|·|e|

So products in 8 bits, which read a quarter of the memory, tell which rows cannot be the best. The few others are multiplied as
they are, and the best token is that of the full product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange

from TIDE.kernels import cpu_ops, cpu_products
from TIDE.kernels.cpu_ops import quantize_int8
from TIDE.kernels.cpu_products import _dot, _products, _rounded
from TIDE.kernels.layer import GROUP, Int8Weight

ROUNDING = np.float32(4e-6)  # of the lengths: the products themselves are rounded
AT_ONCE = 4096  # rows that are measured at a time
PARTS = 16

# numba caches compiled code until this file changes, so this file states the versions it was compiled for.
assert (cpu_ops.VERSION, cpu_products.VERSION) == (9, 3)
assert Int8Weight._fields == ("values", "scales")


class Screen(NamedTuple):
    """A weight in 8 bits, and how much of each row that is."""

    weight: Int8Weight
    kept: Any  # (rows,) lengths of the rows in 8 bits
    lost: Any  # (rows,) lengths of the rest


def screen_of(weight: np.ndarray) -> Screen:
    """Return the screen of a (rows, columns) weight."""
    small, columns = quantize_int8(weight), weight.shape[1]
    kept, lost = np.empty((2, len(weight)), np.float32)
    for start in range(0, len(weight), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        values = small.values[some].reshape(-1, small.values.shape[1] * GROUP)[:, :columns] * small.scales[some, None]
        kept[some] = np.linalg.norm(values, axis=1)
        lost[some] = np.linalg.norm(weight[some] - values, axis=1)
    return Screen(small, kept, lost)


def fingerprint(weight: np.ndarray) -> int:
    """Return a number that changes with any bit of a weight."""
    return int(_fingerprint(weight.reshape(-1).view(np.int32)))


def best_logits(h: np.ndarray, weight: np.ndarray, screen: Screen) -> np.ndarray:
    """(n, columns), (rows, columns) -> (n, rows) logits: exact where they may be the best, and too low to be so elsewhere."""
    return _best_logits(h, weight, screen)


@njit(cache=True)
def _best_logits(h, weight, screen):  # type: ignore[no-untyped-def]
    out = _products(h, screen.weight)
    steps, sizes = _rounded(h, screen.weight.values.shape[1])
    for t in range(len(h)):
        whole, rest = _lengths(h[t], steps[t], sizes[t])
        if not math.isfinite(whole):
            out[t] = np.float32(np.nan)
            continue
        few = _possible(out[t], screen.kept, screen.lost, whole, rest)
        _multiply(h[t], weight, few, out[t])
    return out


@njit(cache=True)
def _lengths(x, steps, sizes):  # type: ignore[no-untyped-def]
    """Return the length of a state, and of what 8 bits lose of it."""
    whole = rest = 0.0
    for k in range(len(x)):
        lost = x[k] - np.float32(steps[k // GROUP, k % GROUP]) * sizes[k // GROUP]
        whole += x[k] * x[k]
        rest += lost * lost
    return np.float32(math.sqrt(whole)), np.float32(math.sqrt(rest))


@njit(parallel=True, cache=True)
def _possible(found, kept, lost, whole, rest):  # type: ignore[no-untyped-def]
    """Return the rows whose logit may be the best."""
    rest = rest + ROUNDING * whole
    lost_too = whole * (np.float32(1) + ROUNDING)
    lowest = np.empty(PARTS, np.float32)
    for part in prange(PARTS):
        best = np.float32(-np.inf)
        for k in range(part * len(found) // PARTS, (part + 1) * len(found) // PARTS):
            best = max(best, found[k] - (rest * kept[k] + lost_too * lost[k]))
        lowest[part] = best
    least = lowest.max()
    rows, count = np.empty(len(found), np.int64), 0
    for k in range(len(found)):
        rows[count] = k
        count += found[k] + (rest * kept[k] + lost_too * lost[k]) >= least
    return rows[:count]


@njit(parallel=True, cache=True)
def _fingerprint(words):  # type: ignore[no-untyped-def]
    parts = np.zeros(PARTS, np.int64)
    for part in prange(PARTS):
        a = b = np.int64(0)
        for k in range(part * len(words) // PARTS, (part + 1) * len(words) // PARTS):
            word = np.int64(words[k])
            a += word
            b += word * (2 * k + 1)  # so that places count
        parts[part] = a ^ (b << 1)
    return parts.sum()


@njit(parallel=True, cache=True)
def _multiply(x, weight, rows, out):  # type: ignore[no-untyped-def]
    for k in prange(len(rows)):
        out[rows[k]] = _dot(weight[rows[k]], x)
