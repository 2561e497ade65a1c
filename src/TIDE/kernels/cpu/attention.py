"""Attention of a few tokens over K/V in blocks, in compiled CPU code (numba), fp32."""

from __future__ import annotations

import functools

import numpy as np
from numba import njit, prange

from TIDE.kernels.cpu import calls as cpu_calls
from TIDE.kernels.cpu import products as cpu_products
from TIDE.kernels.cpu.calls import address_of, call, floats, ints, longs
from TIDE.kernels.cpu.compile import wait_for
from TIDE.kernels.cpu.products import ZERO, _exp

VERSION = 1  # counts changes of the code compiled here, for modules that compile it into their own
(
    Q, KEYS, VALUES, ROWS, COLUMNS, POSITIONS, TABLES,  # addresses
    TOKENS, WIDTH, TABLE_ROWS, TABLE_COLUMNS, BLOCKS, HEADS, SIZE, DIM, WINDOW,
) = range(16)  # fmt: skip

# numba caches compiled code until this file changes, so this file states the versions it was compiled for.
assert (cpu_calls.VERSION, cpu_products.VERSION) == (1, 5)


@functools.cache
def attention() -> int:
    """Return the address of attention."""
    wait_for("attention.attention")
    return address_of(_attend, "int64, float32, float32")


@njit(cache=True)
def _attention(q, keys, values, places, scaling, window, cap, calls):  # type: ignore[no-untyped-def]
    """Replace queries by what they attend to, given rows, columns, positions and tables."""
    rows, columns, positions, tables = places
    facts = np.empty(16, np.int64)
    facts[Q], facts[KEYS], facts[VALUES] = q.ctypes.data, keys.ctypes.data, values.ctypes.data
    facts[ROWS], facts[COLUMNS] = rows.ctypes.data, columns.ctypes.data
    facts[POSITIONS], facts[TABLES] = positions.ctypes.data, tables.ctypes.data
    facts[TOKENS], facts[WIDTH] = len(rows), q.shape[1]
    facts[TABLE_ROWS], facts[TABLE_COLUMNS] = tables.shape
    facts[BLOCKS], facts[HEADS], facts[SIZE], facts[DIM] = keys.shape
    facts[WINDOW] = window
    call(calls.attention, (facts.ctypes.data, scaling, cap))


def _attend(facts_at, scaling, cap):  # type: ignore[no-untyped-def]
    """Run attention: two queries of one row share a pass over its K/V."""
    facts = longs(facts_at, 16)
    group = facts[WIDTH] // facts[DIM] // facts[HEADS]
    pairs = _pairs(longs(facts[ROWS], facts[TOKENS]), group)
    for job in prange(len(pairs) * facts[HEADS]):
        _attend_pair(longs(facts_at, 16), pairs[job % len(pairs)], job // len(pairs), group, scaling, cap)


@njit(fastmath=True, cache=True)
def _attend_pair(facts, pair, head, group, scaling, cap):  # type: ignore[no-untyped-def]
    """Attend with two queries of a key head. Columns are taken four at a time, counted from the row's first, so that no four
    lie in two blocks."""
    tokens, width, size, dim, window = facts[TOKENS], facts[WIDTH], facts[SIZE], facts[DIM], facts[WINDOW]
    q = floats(facts[Q], (tokens, width))
    keys = floats(facts[KEYS], (facts[BLOCKS], facts[HEADS], size, dim))
    values = floats(facts[VALUES], (facts[BLOCKS], facts[HEADS], size, dim))
    columns, positions = longs(facts[COLUMNS], tokens), longs(facts[POSITIONS], tokens)
    one, other = pair[0], pair[1]
    t, last = one // group, other // group
    row = longs(facts[ROWS], tokens)[t]
    table = ints(facts[TABLES], (facts[TABLE_ROWS], facts[TABLE_COLUMNS]))[row]
    begin, other_begin = _first_column(columns, positions, t, window), _first_column(columns, positions, last, window)
    low, stop = min(begin, other_begin), columns[last] + 1
    low -= (low + positions[t] - columns[t]) % 4
    weights = np.zeros((2, (stop - low + 3) // 4 * 4), np.float32)
    two = np.empty((2, dim), np.float32)
    place, other_place = (head * group + one % group) * dim, (head * group + other % group) * dim
    for k in range(dim):
        two[0, k], two[1, k] = q[t, place + k], q[last, other_place + k]
    column = low
    while column < stop:
        first, end = column % size, min(stop, (column // size + 1) * size)
        _compare(two, keys[table[column // size], head, first : first + end - column], weights, column - low)
        column = end
    if cap > ZERO:
        _cap(weights, scaling, cap)
    factor = np.float32(1) if cap > ZERO else scaling
    _softmax(weights[0], begin - low, columns[t] + 1 - low, factor)
    _softmax(weights[1], other_begin - low, stop - low, factor)
    for k in range(dim):
        two[0, k] = two[1, k] = ZERO
    column = low
    while column < stop:
        first, end = column % size, min(stop, (column // size + 1) * size)
        _mix(two, values[table[column // size], head, first : first + end - column], weights, column - low)
        column = end
    for k in range(dim):
        q[t, place + k], q[last, other_place + k] = two[0, k], two[1, k]


@njit(cache=True)
def _first_column(columns, positions, t, window):  # type: ignore[no-untyped-def]
    """Return the first column that a token attends to."""
    first = columns[t] - positions[t]
    return max(first, columns[t] + 1 - window) if window else first


@njit(cache=True)
def _pairs(rows, group):  # type: ignore[no-untyped-def]
    """Pair the queries of one key head, numbered token * group + query: two neighbours of one row, or one with itself."""
    count, found = len(rows) * group, 0
    pairs = np.empty((count, 2), np.int64)
    one = 0
    while one < count:
        other = one + 1 if one + 1 < count and rows[one // group] == rows[(one + 1) // group] else one
        pairs[found, 0], pairs[found, 1] = one, other
        found += 1
        one = other + 1
    return pairs[:found]


@njit(fastmath=True, cache=True)
def _compare(two, keys, out, start):  # type: ignore[no-untyped-def]
    """Multiply two queries with keys, four at a time; past the last key, with the last. Products go into `out` from a column
    on."""
    last, p, q = len(keys) - 1, two[0], two[1]
    for c in range(0, len(keys), 4):
        k0, k1, k2, k3 = keys[c], keys[min(c + 1, last)], keys[min(c + 2, last)], keys[min(c + 3, last)]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
        for k in range(len(p)):
            x, y = p[k], q[k]
            a0 += x * k0[k]
            b0 += y * k0[k]
            a1 += x * k1[k]
            b1 += y * k1[k]
            a2 += x * k2[k]
            b2 += y * k2[k]
            a3 += x * k3[k]
            b3 += y * k3[k]
        at = start + c
        out[0, at], out[0, at + 1], out[0, at + 2], out[0, at + 3] = a0, a1, a2, a3
        out[1, at], out[1, at + 1], out[1, at + 2], out[1, at + 3] = b0, b1, b2, b3


@njit(fastmath=True, cache=True)
def _mix(two, values, weights, start):  # type: ignore[no-untyped-def]
    """Add values by their weights, which begin at a column, four at a time; weights past the last one are 0."""
    last, p, q = len(values) - 1, two[0], two[1]
    for c in range(0, len(values), 4):
        v0, v1, v2, v3 = values[c], values[min(c + 1, last)], values[min(c + 2, last)], values[min(c + 3, last)]
        at = start + c
        a0, a1, a2, a3 = weights[0, at], weights[0, at + 1], weights[0, at + 2], weights[0, at + 3]
        b0, b1, b2, b3 = weights[1, at], weights[1, at + 1], weights[1, at + 2], weights[1, at + 3]
        for k in range(len(p)):
            p[k] += a0 * v0[k] + a1 * v1[k] + a2 * v2[k] + a3 * v3[k]
            q[k] += b0 * v0[k] + b1 * v1[k] + b2 * v2[k] + b3 * v3[k]


@njit(fastmath=True, cache=True)
def _cap(x, scaling, cap):  # type: ignore[no-untyped-def]
    """x becomes cap · tanh(scaling · x / cap); tanh(y) is 1 - 2 / (1 + e^2y)."""
    for t in range(len(x)):
        own = x[t]
        for c in range(len(own)):
            own[c] *= np.float32(2) * scaling / cap
        _exp(own)
        for c in range(len(own)):
            own[c] = cap - np.float32(2) * cap / (np.float32(1) + own[c])


@njit(fastmath=True, cache=True)
def _softmax(x, first, stop, scaling):  # type: ignore[no-untyped-def]
    """Turn scores from `first` up to `stop` into weights; the others become 0."""
    highest = x[first]
    for c in range(first, stop):
        highest = max(highest, x[c])
    for c in range(len(x)):
        x[c] = (x[c] - highest) * scaling
    _exp(x)
    for c in range(first):
        x[c] = ZERO
    for c in range(stop, len(x)):
        x[c] = ZERO
    total = ZERO
    for c in range(len(x)):
        total += x[c]
    for c in range(len(x)):
        x[c] /= total
