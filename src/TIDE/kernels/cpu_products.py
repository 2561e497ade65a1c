"""Products of a few tokens with a weight, in compiled CPU code (numba), arranged by how memory is best read.

    1 token           a thread streams through the rows of a weight, one after the other
    2 to 6, 8         two rows from the two halves of the matrix: two streams, and all sums of two rows in registers
    more              four neighbouring rows and four tokens at a time: arithmetic is the limit here

The sums are spelt out, a variable each, so that the compiler keeps them in registers. Tokens are padded to the next count
there is, and results for padding are dropped. Exits have int8 weights, which are a quarter of the memory. Their states have 16
bits: in eight, what the order of sums changes in a state may move its score across a threshold.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import config, njit, prange, set_num_threads, types
from numba.extending import overload

from TIDE.kernels.layer import GROUP, Int8Weight

VERSION = 4  # counts changes of the code compiled here, for modules that compile it into their own
ZERO = np.float32(0)

# numba caches compiled code until this file changes, so this file states the types it was compiled for.
assert (Int8Weight._fields, GROUP) == (("values", "scales"), 64)

_threads = torch.get_num_threads()
set_num_threads(config.NUMBA_NUM_THREADS)  # starts the threads: code that is kept compiled relies on it
torch.set_num_threads(_threads)  # both may have their threads from one library, where the newest number counts


@njit(cache=True)
def _padded(x):  # type: ignore[no-untyped-def]
    """Return a copy with as many rows as products want."""
    count = len(x) if len(x) <= 6 else (len(x) + 3) // 4 * 4
    out = np.zeros((count, x.shape[1]), np.float32)
    out[: len(x)] = x
    return out


def _products(x, weight):  # type: ignore[no-untyped-def]
    """Return (n, rows) products, by the kind of weight. Only compiled code can call it."""


@overload(_products)
def _products_by_kind(x, weight):  # type: ignore[no-untyped-def]
    return _products_of_floats if isinstance(weight, types.Array) else _products_of_int8


def _products_of_floats(x, weight):  # type: ignore[no-untyped-def]
    out = np.empty((len(x), len(weight)), np.float32)
    if len(x) == 1:
        _products_1(x, weight, out)
    elif len(x) == 2:
        _products_2(x, weight, out)
    elif len(x) == 3:
        _products_3(x, weight, out)
    elif len(x) == 4:
        _products_4(x, weight, out)
    elif len(x) == 5:
        _products_5(x, weight, out)
    elif len(x) == 6:
        _products_6(x, weight, out)
    elif len(x) == 8:
        _products_8(x, weight, out)
    else:
        _products_many(x, weight, out)
    if len(weight) % 2 and 2 <= len(x) <= 8:  # the row that has no other half
        for t in range(len(x)):
            out[t, -1] = _dot(weight[-1], x[t])
    return out


def _products_of_int8(x, weight):  # type: ignore[no-untyped-def]
    out = np.empty((len(x), len(weight.values)), np.float32)
    _products_int8(x, weight.values, weight.scales, out)
    return out


@njit(fastmath=True, parallel=True, cache=True)
def _products_1(x, weight, out):  # type: ignore[no-untyped-def]
    x0 = x[0]
    for o in prange(len(weight)):
        out[0, o] = _dot(weight[o], x0)


@njit(fastmath=True, parallel=True, cache=True)
def _products_2(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    x0, x1 = x[0], x[1]
    for o in prange(half):
        w0, w1 = weight[o], weight[half + o]
        a0 = a1 = b0 = b1 = ZERO
        for k in range(len(w0)):
            v, w = w0[k], w1[k]
            a0 += v * x0[k]
            b0 += w * x0[k]
            a1 += v * x1[k]
            b1 += w * x1[k]
        out[0, o], out[1, o] = a0, a1
        out[0, half + o], out[1, half + o] = b0, b1


@njit(fastmath=True, parallel=True, cache=True)
def _products_3(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    x0, x1, x2 = x[0], x[1], x[2]
    for o in prange(half):
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
        out[0, o], out[1, o], out[2, o] = a0, a1, a2
        out[0, half + o], out[1, half + o], out[2, half + o] = b0, b1, b2


@njit(fastmath=True, parallel=True, cache=True)
def _products_4(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    x0, x1, x2, x3 = x[0], x[1], x[2], x[3]
    for o in prange(half):
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
        out[0, o], out[1, o], out[2, o], out[3, o] = a0, a1, a2, a3
        out[0, half + o], out[1, half + o], out[2, half + o], out[3, half + o] = b0, b1, b2, b3


@njit(fastmath=True, parallel=True, cache=True)
def _products_5(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    x0, x1, x2, x3, x4 = x[0], x[1], x[2], x[3], x[4]
    for o in prange(half):
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
        out[0, o], out[1, o], out[2, o] = a0, a1, a2
        out[3, o], out[4, o] = a3, a4
        out[0, half + o], out[1, half + o], out[2, half + o] = b0, b1, b2
        out[3, half + o], out[4, half + o] = b3, b4


@njit(fastmath=True, parallel=True, cache=True)
def _products_6(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    x0, x1, x2, x3, x4, x5 = x[0], x[1], x[2], x[3], x[4], x[5]
    for o in prange(half):
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
        out[0, o], out[1, o], out[2, o] = a0, a1, a2
        out[3, o], out[4, o], out[5, o] = a3, a4, a5
        out[0, half + o], out[1, half + o], out[2, half + o], out[3, half + o], out[4, half + o], out[5, half + o] = (
            b0,
            b1,
            b2,
            b3,
            b4,
            b5,
        )


@njit(fastmath=True, parallel=True, cache=True)
def _products_8(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    x0, x1, x2, x3, x4, x5, x6, x7 = x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]
    for o in prange(half):
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
        out[0, o], out[1, o], out[2, o], out[3, o] = a0, a1, a2, a3
        out[4, o], out[5, o], out[6, o], out[7, o] = a4, a5, a6, a7
        (
            out[0, half + o],
            out[1, half + o],
            out[2, half + o],
            out[3, half + o],
            out[4, half + o],
            out[5, half + o],
            out[6, half + o],
            out[7, half + o],
        ) = b0, b1, b2, b3, b4, b5, b6, b7


@njit(fastmath=True, parallel=True, cache=True)
def _products_many(x, weight, out):  # type: ignore[no-untyped-def]
    quarter = len(weight) // 4
    for block in prange(quarter):
        for t in range(0, len(x), 4):
            _four_by_four(x, weight, t, 4 * block, out)
    for o in range(4 * quarter, len(weight)):
        for t in range(len(x)):
            out[t, o] = _dot(weight[o], x[t])


@njit(fastmath=True, inline="always", cache=True)
def _dot(a, b):  # type: ignore[no-untyped-def]
    total = ZERO
    for k in range(len(a)):
        total += a[k] * b[k]
    return total


@njit(fastmath=True, inline="always", cache=True)
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


@njit(fastmath=True, parallel=True, cache=True)
def _products_int8(x, values, scales, out):  # type: ignore[no-untyped-def]
    steps, sizes = _rounded(x, values.shape[1])
    for o in prange(len(values)):
        for t in range(len(x)):
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
