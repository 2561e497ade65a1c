"""Products of a few tokens with up to three weights, in compiled CPU code (numba), arranged by how memory is best read.

    1 token           a thread streams through its rows of a weight, one after the other
    2 to 6, 8         two rows from the two halves of these rows: two streams, and all sums of two rows in registers
    more              four neighbouring rows and four tokens at a time: arithmetic is the limit here

Threads meet once, at the end of a call: weights that take the same states (q, k and v; gate and up) are one call, which also
adds biases and applies the gate. The sums are spelt out, a variable each, so that the compiler keeps them in registers. Tokens
are padded to the next count there is, and results for padding are dropped. Exits have int8 weights, which are a quarter of the
memory. Their states have 16 bits: in eight, what the order of sums changes in a state may move its score across a threshold.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numba import njit, prange

from TIDE.kernels.cpu import calls as cpu_calls
from TIDE.kernels.cpu.calls import address_of, call, floats, longs, signed_bytes
from TIDE.kernels.cpu.compile import is_cached, wait_for
from TIDE.kernels.layer import GELU_TANH, SILU
from TIDE.kernels.weights import GROUP, Dense, Int8, Weight

VERSION = 5  # counts changes of the code compiled here, for modules that compile it into their own
ZERO = np.float32(0)
NO_GATE = -1
ADDRESS, ROWS, SCALES, BIAS, OUT = range(5)  # of the table that describes weights to the C functions; 0: there is no bias

# numba caches compiled code until this file changes, so this file states the numbers and versions it was compiled for.
assert (GROUP, SILU, GELU_TANH, cpu_calls.VERSION) == (64, 0, 1, 1)


class Calls(NamedTuple):
    """The C functions that compiled code calls, and for how many threads they divide their work."""

    products: int  # addresses
    attention: int
    threads: int


@functools.cache
def float_products() -> int:
    """Return the address of products with fp32 weights."""
    wait_for("products.float_products")
    return address_of(_float_products, "int64, int64, int64, int64, int64, int64, int64")


@functools.cache
def int8_products() -> int:
    """Return the address of products with int8 weights."""
    wait_for("products.int8_products")
    return address_of(_int8_products, "int64, int64, int64, int64, int64, int64, int64")


PRODUCTS: dict[type[Weight], Callable[[], int]] = {Dense: float_products, Int8: int8_products}


def is_compiled() -> bool:
    """Return True if numba's cache has the products."""
    return is_cached(_float_products, _padded)


@njit(cache=True)
def _padded(x):  # type: ignore[no-untyped-def]
    """Return a copy with as many rows as products want."""
    count = len(x) if len(x) <= 6 else (len(x) + 3) // 4 * 4
    out = np.zeros((count, x.shape[1]), np.float32)
    for t in range(len(x)):
        for k in range(x.shape[1]):
            out[t, k] = x[t, k]
    return out


def described(weight: Weight, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the description of a weight for compiled code, which holds no memory of it: address, rows, scales, bias."""
    values, scales = weight.values, weight.scales if isinstance(weight, Int8) else None
    assert values.flags.c_contiguous, f"weights must be contiguous, got strides {values.strides}"
    return np.array([_at(values), len(values), _at(scales), _at(bias)], np.int64)


def _at(values: np.ndarray | None) -> int:
    return 0 if values is None or not values.size else int(values.__array_interface__["data"][0])


@njit(cache=True)
def _linear(x, weight, calls):  # type: ignore[no-untyped-def]
    """(n, k) padded states -> (n, rows), by a described weight."""
    out = np.empty((len(x), weight[ROWS]), np.float32)
    table = np.empty((1, 5), np.int64)
    _set(table[0], weight, out)
    call(calls.products, (x.ctypes.data, len(x), x.shape[1], table.ctypes.data, 1, NO_GATE, calls.threads))
    return out


@njit(cache=True)
def _linear_3(x, weights, calls):  # type: ignore[no-untyped-def]
    """(n, k) padded states -> three (n, rows) in one call."""
    a = np.empty((len(x), weights[0, ROWS]), np.float32)
    b = np.empty((len(x), weights[1, ROWS]), np.float32)
    c = np.empty((len(x), weights[2, ROWS]), np.float32)
    table = np.empty((3, 5), np.int64)
    _set(table[0], weights[0], a)
    _set(table[1], weights[1], b)
    _set(table[2], weights[2], c)
    call(calls.products, (x.ctypes.data, len(x), x.shape[1], table.ctypes.data, 3, NO_GATE, calls.threads))
    return a, b, c


@njit(cache=True)
def _gated(x, gate, up, activation, calls):  # type: ignore[no-untyped-def]
    """(n, k) padded states -> (n, rows): activation(gate(x)) * up(x), or activation(up(x)) where the gate has no rows."""
    out, other = np.empty((len(x), up[ROWS]), np.float32), np.empty((len(x), up[ROWS]), np.float32)
    table, count = np.empty((2, 5), np.int64), 1
    if gate[ROWS]:
        _set(table[0], gate, out)
        _set(table[1], up, other)
        count = 2
    else:
        _set(table[0], up, out)
    call(calls.products, (x.ctypes.data, len(x), x.shape[1], table.ctypes.data, count, activation, calls.threads))
    return out


@njit(cache=True)
def _set(entry, weight, out):  # type: ignore[no-untyped-def]
    for k in range(4):
        entry[k] = weight[k]
    entry[OUT] = out.ctypes.data


def _float_products(x_at, tokens, columns, table_at, count, activation, parts):  # type: ignore[no-untyped-def]
    """Multiply (tokens, columns) states with the weights of a table; each of `parts` has its share of the rows of each."""
    for part in prange(parts):
        x, table = floats(x_at, (tokens, columns)), longs(table_at, (count, 5))
        for i in range(count):
            rows = table[i, ROWS]
            start, stop = _share(rows, part, parts)
            out = floats(table[i, OUT], (tokens, rows))
            _rows(x, floats(table[i, ADDRESS], (rows, columns)), out, start, stop)
            if table[i, BIAS]:
                _add_bias(out, floats(table[i, BIAS], rows), start, stop)
        if activation != NO_GATE:
            _activate(table, tokens, part, parts, activation)


def _int8_products(x_at, tokens, columns, table_at, count, activation, parts):  # type: ignore[no-untyped-def]
    """Do the same for weights in 8 bits."""
    groups = (columns + GROUP - 1) // GROUP
    steps, sizes = _rounded(floats(x_at, (tokens, columns)), groups)
    for part in prange(parts):
        table = longs(table_at, (count, 5))
        for i in range(count):
            rows = table[i, ROWS]
            start, stop = _share(rows, part, parts)
            out = floats(table[i, OUT], (tokens, rows))
            values = signed_bytes(table[i, ADDRESS], (rows, groups, GROUP))
            _int8_rows(steps, sizes, values, floats(table[i, SCALES], rows), out, start, stop)
            if table[i, BIAS]:
                _add_bias(out, floats(table[i, BIAS], rows), start, stop)
        if activation != NO_GATE:
            _activate(table, tokens, part, parts, activation)


@njit(cache=True)
def _share(rows, part, parts):  # type: ignore[no-untyped-def]
    """Return the rows of a part, whole fours of them but for the last ones."""
    start = part * (rows // 4) // parts * 4
    return start, (rows if part == parts - 1 else (part + 1) * (rows // 4) // parts * 4)


@njit(fastmath=True, cache=True)
def _add_bias(out, bias, start, stop):  # type: ignore[no-untyped-def]
    for t in range(len(out)):
        for o in range(start, stop):
            out[t, o] += bias[o]


@njit(fastmath=True, cache=True)
def _activate(table, tokens, part, parts, kind):  # type: ignore[no-untyped-def]
    """The first result becomes activation(it), times the second if there is one."""
    rows = table[0, ROWS]
    start, stop = _share(rows, part, parts)
    gate, up = floats(table[0, OUT], (tokens, rows)), floats(table[len(table) - 1, OUT], (tokens, rows))
    inner = np.empty(stop - start, np.float32)
    for t in range(tokens):
        x = gate[t, start:stop]
        if kind == SILU:
            for k in range(len(x)):
                inner[k] = -x[k]
        elif kind == GELU_TANH:  # half of 1 + tanh(y) is sigmoid(2y)
            for k in range(len(x)):
                inner[k] = np.float32(-1.5957691216) * (x[k] + np.float32(0.044715) * x[k] * x[k] * x[k])
        if kind in (SILU, GELU_TANH):
            _exp(inner)
            for k in range(len(x)):
                x[k] /= np.float32(1) + inner[k]
        else:
            for k in range(len(x)):
                x[k] *= np.float32(0.5) * (np.float32(1) + math.erf(x[k] * np.float32(0.7071067812)))
        if len(table) == 2:
            other = up[t, start:stop]
            for k in range(len(x)):
                x[k] *= other[k]


@njit(fastmath=True, cache=True)
def _exp(x):  # type: ignore[no-untyped-def]
    """Compute e^x in place, to the last digit or two of fp32: 2^whole · 2^rest, the latter by its series. The loop runs in
    vectors, which it would not with math.exp."""
    powers = np.empty(len(x), np.int32)
    for c in range(len(x)):
        y = min(max(x[c] * np.float32(1.4426950408889634), np.float32(-126)), np.float32(126))
        whole = np.floor(y + np.float32(0.5))
        rest = (y - whole) * np.float32(0.6931471805599453)
        powers[c] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        series = np.float32(1 / 720)
        series = series * rest + np.float32(1 / 120)
        series = series * rest + np.float32(1 / 24)
        series = series * rest + np.float32(1 / 6)
        series = series * rest + np.float32(0.5)
        series = series * rest + np.float32(1)
        x[c] = series * rest + np.float32(1)
    whole_powers = powers.view(np.float32)
    for c in range(len(x)):
        x[c] *= whole_powers[c]


@njit(fastmath=True, cache=True)
def _rows(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    """Multiply states with the rows from `start` to `stop`."""
    if len(x) == 1:
        _rows_1(x, weight, out, start, stop)
    elif len(x) == 2:
        _rows_2(x, weight, out, start, stop)
    elif len(x) == 3:
        _rows_3(x, weight, out, start, stop)
    elif len(x) == 4:
        _rows_4(x, weight, out, start, stop)
    elif len(x) == 5:
        _rows_5(x, weight, out, start, stop)
    elif len(x) == 6:
        _rows_6(x, weight, out, start, stop)
    elif len(x) == 8:
        _rows_8(x, weight, out, start, stop)
    else:
        _rows_many(x, weight, out, start, stop)


@njit(fastmath=True, cache=True)
def _rows_1(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    x0 = x[0]
    for o in range(start, stop):
        out[0, o] = _dot(weight[o], x0)


@njit(fastmath=True, cache=True)
def _last_row(x, weight, out, o):  # type: ignore[no-untyped-def]
    """Multiply the row that has no other half."""
    for t in range(len(x)):
        out[t, o] = _dot(weight[o], x[t])


@njit(fastmath=True, cache=True)
def _rows_2(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    half = (stop - start) // 2
    x0, x1 = x[0], x[1]
    for o in range(start, start + half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = b0 = b1 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
        out[0, o], out[0, half + o] = a0, b0
        out[1, o], out[1, half + o] = a1, b1
    if (stop - start) % 2:
        _last_row(x, weight, out, stop - 1)


@njit(fastmath=True, cache=True)
def _rows_3(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    half = (stop - start) // 2
    x0, x1, x2 = x[0], x[1], x[2]
    for o in range(start, start + half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = a2 = b0 = b1 = b2 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
            a2 += v * x2[k]
            b2 += w * x2[k]
        out[0, o], out[0, half + o] = a0, b0
        out[1, o], out[1, half + o] = a1, b1
        out[2, o], out[2, half + o] = a2, b2
    if (stop - start) % 2:
        _last_row(x, weight, out, stop - 1)


@njit(fastmath=True, cache=True)
def _rows_4(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    half = (stop - start) // 2
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    for o in range(start, start + half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
            a2 += v * x2[k]
            b2 += w * x2[k]
            a3 += v * x3[k]
            b3 += w * x3[k]
        out[0, o], out[0, half + o] = a0, b0
        out[1, o], out[1, half + o] = a1, b1
        out[2, o], out[2, half + o] = a2, b2
        out[3, o], out[3, half + o] = a3, b3
    if (stop - start) % 2:
        _last_row(x, weight, out, stop - 1)


@njit(fastmath=True, cache=True)
def _rows_5(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    half = (stop - start) // 2
    x0, x1, x2, x3, x4 = x[0], x[1], x[2], x[3], x[4]
    for o in range(start, start + half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = a2 = a3 = a4 = b0 = b1 = b2 = b3 = b4 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
            a2 += v * x2[k]
            b2 += w * x2[k]
            a3 += v * x3[k]
            b3 += w * x3[k]
            a4 += v * x4[k]
            b4 += w * x4[k]
        out[0, o], out[0, half + o] = a0, b0
        out[1, o], out[1, half + o] = a1, b1
        out[2, o], out[2, half + o] = a2, b2
        out[3, o], out[3, half + o] = a3, b3
        out[4, o], out[4, half + o] = a4, b4
    if (stop - start) % 2:
        _last_row(x, weight, out, stop - 1)


@njit(fastmath=True, cache=True)
def _rows_6(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    half = (stop - start) // 2
    x0, x1, x2, x3, x4, x5 = x[0], x[1], x[2], x[3], x[4], x[5]
    for o in range(start, start + half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = a2 = a3 = a4 = a5 = b0 = b1 = b2 = b3 = b4 = b5 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
            a2 += v * x2[k]
            b2 += w * x2[k]
            a3 += v * x3[k]
            b3 += w * x3[k]
            a4 += v * x4[k]
            b4 += w * x4[k]
            a5 += v * x5[k]
            b5 += w * x5[k]
        out[0, o], out[0, half + o] = a0, b0
        out[1, o], out[1, half + o] = a1, b1
        out[2, o], out[2, half + o] = a2, b2
        out[3, o], out[3, half + o] = a3, b3
        out[4, o], out[4, half + o] = a4, b4
        out[5, o], out[5, half + o] = a5, b5
    if (stop - start) % 2:
        _last_row(x, weight, out, stop - 1)


@njit(fastmath=True, cache=True)
def _rows_8(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    half = (stop - start) // 2
    x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    for o in range(start, start + half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = b0 = b1 = b2 = b3 = b4 = b5 = b6 = b7 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
            a2 += v * x2[k]
            b2 += w * x2[k]
            a3 += v * x3[k]
            b3 += w * x3[k]
            a4 += v * x4[k]
            b4 += w * x4[k]
            a5 += v * x5[k]
            b5 += w * x5[k]
            a6 += v * x6[k]
            b6 += w * x6[k]
            a7 += v * x7[k]
            b7 += w * x7[k]
        out[0, o], out[0, half + o] = a0, b0
        out[1, o], out[1, half + o] = a1, b1
        out[2, o], out[2, half + o] = a2, b2
        out[3, o], out[3, half + o] = a3, b3
        out[4, o], out[4, half + o] = a4, b4
        out[5, o], out[5, half + o] = a5, b5
        out[6, o], out[6, half + o] = a6, b6
        out[7, o], out[7, half + o] = a7, b7
    if (stop - start) % 2:
        _last_row(x, weight, out, stop - 1)


@njit(fastmath=True, cache=True)
def _rows_many(x, weight, out, start, stop):  # type: ignore[no-untyped-def]
    for o in range(start, stop - 3, 4):
        for t in range(0, len(x), 4):
            _four_by_four(x, weight, t, o, out)
    for o in range(stop - (stop - start) % 4, stop):
        _last_row(x, weight, out, o)


@njit(fastmath=True, cache=True)
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = ZERO
    for k in range(len(a)):
        total += a[k] * b[k]
    return total


@njit(fastmath=True, cache=True)
def _four_by_four(x, weight, t, o, out):  # type: ignore[no-untyped-def]
    """Multiply rows o to o + 3 with tokens t to t + 3."""
    w0, w1, w2, w3 = weight[o], weight[o + 1], weight[o + 2], weight[o + 3]
    x0, x1, x2, x3 = x[t], x[t + 1], x[t + 2], x[t + 3]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = ZERO
    for k in range(len(w0)):
        p, q, r, s = w0[k], w1[k], w2[k], w3[k]
        v = x0[k]
        a0 += p * v
        b0 += q * v
        c0 += r * v
        d0 += s * v
        v = x1[k]
        a1 += p * v
        b1 += q * v
        c1 += r * v
        d1 += s * v
        v = x2[k]
        a2 += p * v
        b2 += q * v
        c2 += r * v
        d2 += s * v
        v = x3[k]
        a3 += p * v
        b3 += q * v
        c3 += r * v
        d3 += s * v
    out[t, o], out[t, o + 1], out[t, o + 2], out[t, o + 3] = a0, b0, c0, d0
    out[t + 1, o], out[t + 1, o + 1], out[t + 1, o + 2], out[t + 1, o + 3] = a1, b1, c1, d1
    out[t + 2, o], out[t + 2, o + 1], out[t + 2, o + 2], out[t + 2, o + 3] = a2, b2, c2, d2
    out[t + 3, o], out[t + 3, o + 1], out[t + 3, o + 2], out[t + 3, o + 3] = a3, b3, c3, d3


@njit(fastmath=True, cache=True)
def _int8_rows(steps, sizes, values, scales, out, start, stop):  # type: ignore[no-untyped-def]
    for o in range(start, stop):
        for t in range(len(steps)):
            total = ZERO
            for group in range(values.shape[1]):
                w, q = values[o, group], steps[t, group]
                whole = np.int32(0)
                for k in range(GROUP):
                    whole += np.int32(w[k]) * np.int32(q[k])
                total += np.float32(whole) * sizes[t, group]
            out[t, o] = total * scales[o]


@njit(fastmath=True, cache=True)
def _rounded(x, groups):  # type: ignore[no-untyped-def]
    """Return (n, groups, GROUP) states as whole numbers from -32767 to 32767, and their (n, groups) scales."""
    steps, sizes = np.zeros((len(x), groups, GROUP), np.int16), np.zeros((len(x), groups), np.float32)
    for t in range(len(x)):
        for group in range(groups):
            part = x[t, group * GROUP : (group + 1) * GROUP]
            most = ZERO
            for k in range(len(part)):
                most = max(most, abs(part[k]))
            if most > ZERO:
                sizes[t, group] = most / np.float32(32767)
                for k in range(len(part)):
                    steps[t, group, k] = np.int16(round(part[k] / sizes[t, group]))
    return steps, sizes
