"""The decoder layer in compiled CPU code (numba), fp32. `cpu_products.py` has the products, where the time goes."""

from __future__ import annotations

import math

import numpy as np
from numba import config, njit, prange, set_num_threads

from TIDE.kernels import cpu_products
from TIDE.kernels.cpu_products import ZERO, _dot, _padded, _products
from TIDE.kernels.layer import GELU_TANH, GROUP, MLP, SILU, Attention, Int8Weight, Layer, Norm, Pass

VERSION = 13  # counts changes of the code compiled here, for modules that compile it into their own

# numba caches compiled code until this file changes, so this file states the types it was compiled for.
assert " ".join(Norm._fields) == "weight eps offset layer_norm bias"
assert " ".join(Attention._fields) == ("q k v o q_bias k_bias v_bias o_bias q_norm k_norm head_dim scaling window cap rotary")
assert " ".join(MLP._fields) == "gate up down gate_bias up_bias down_bias activation"
assert " ".join(Layer._fields) == (
    "attention_norm attention attention_out_norm mlp_norm mlp mlp_out_norm residual parallel rope"
)
assert " ".join(Pass._fields) == "x cos sin rows columns positions angles tables groups ancestors asking"
assert cpu_products.VERSION == 4


def use_threads(count: int) -> None:
    """Run compiled code on `count` threads from now on, or on as many as there are."""
    set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))


def decoder_layer(layer: Layer, tokens: Pass, keys: np.ndarray, values: np.ndarray) -> None:
    """Run one layer for the tokens of a pass, all numpy views, as `reference.decoder_layer` does."""
    assert not tokens.is_paged or np.array_equal(tokens.columns, tokens.positions), "rows in blocks begin at column 0"
    assert not tokens.is_paged or keys.shape[2] % 4 == 0, f"blocks of {keys.shape[2]} columns: not a multiple of 4"
    _decoder_layer(layer[:-1], tokens, keys, values)


def linear(x: np.ndarray, weight: np.ndarray | Int8Weight) -> np.ndarray:
    """(n, k), (m, k) -> (n, m)"""
    return _linear(_padded(x), weight, x[:0, 0])[: len(x)]


def quantize_int8(weight: np.ndarray) -> Int8Weight:
    """Return a weight in 8 bits, with a scale for each row."""
    rows, columns = weight.shape
    scales = np.maximum(np.abs(weight).max(1, initial=0), np.float32(1e-30)) / np.float32(127)
    groups = -(-columns // GROUP)
    values = np.zeros((rows, groups * GROUP), np.int8)
    values[:, :columns] = np.rint(weight / scales[:, None])
    return Int8Weight(values.reshape(rows, groups, GROUP), scales)


@njit(fastmath=True, cache=True)
def _decoder_layer(parts, tokens, keys, values):  # type: ignore[no-untyped-def]
    """Run a layer given by its fields up to `parallel`: passing a string takes numba half a millisecond."""
    attention_norm, attention, attention_out_norm, mlp_norm, mlp, mlp_out_norm, residual, parallel = parts
    x = tokens.x
    h = _normed(x, attention_norm)
    beside = _normed(x, mlp_norm) if parallel and len(mlp_norm.weight) else h
    attended = _attention(attention, h, tokens, keys, values)
    _add(x, _linear(attended, attention.o, attention.o_bias), attention_out_norm, residual)
    if not parallel:
        beside = _normed(x, mlp_norm)
    _add(x, _linear(_mlp_inner(mlp, beside, len(x)), mlp.down, mlp.down_bias), mlp_out_norm, residual)


@njit(fastmath=True, cache=True)
def _attention(attention, h, tokens, keys, values):  # type: ignore[no-untyped-def]
    q = _linear(h, attention.q, attention.q_bias)
    _normalize_heads(q, attention.q_norm)
    if attention.rotary:
        _rotate(q, tokens, keys.shape[3])
    _write_kv(attention, h, tokens, keys, values)
    _attend(q, keys, values, tokens, np.float32(attention.scaling), attention.window, np.float32(attention.cap))
    return q


@njit(fastmath=True, cache=True)
def _write_kv(attention, h, tokens, keys, values):  # type: ignore[no-untyped-def]
    k = _linear(h, attention.k, attention.k_bias)
    _normalize_heads(k, attention.k_norm)
    if attention.rotary:
        _rotate(k, tokens, keys.shape[3])
    _write(k, keys, tokens)
    _write(_linear(h, attention.v, attention.v_bias), values, tokens)


@njit(fastmath=True, cache=True)
def _mlp_inner(mlp, h, count):  # type: ignore[no-untyped-def]
    up = _linear(h, mlp.up, mlp.up_bias)
    if len(mlp.gate):
        gate = _linear(h, mlp.gate, mlp.gate_bias)
        _activate(gate, up, count, mlp.activation)
        return gate
    _activate(up, np.ones((1, up.shape[1]), np.float32), count, mlp.activation)
    return up


@njit(fastmath=True, cache=True)
def _linear(x, weight, bias):  # type: ignore[no-untyped-def]
    out = _products(x, weight)
    if len(bias):
        for t in range(len(x)):
            for o in range(out.shape[1]):
                out[t, o] += bias[o]
    return out


@njit(fastmath=True, cache=True)
def _normed(x, norm):  # type: ignore[no-untyped-def]
    """Return a copy of states with as many rows as products want, normed."""
    out = _padded(x)
    _normalize(out, norm)
    return out


@njit(fastmath=True, cache=True)
def _normalize_heads(x, norm):  # type: ignore[no-untyped-def]
    """Norm queries or keys, each head or all of them together, as wide as the norm is."""
    if len(norm.weight):
        _normalize(x.reshape(-1, len(norm.weight)), norm)


@njit(fastmath=True, cache=True)
def _normalize(x, norm):  # type: ignore[no-untyped-def]
    weight, bias, eps, offset = norm.weight, norm.bias, np.float32(norm.eps), np.float32(norm.offset)
    if not len(weight):
        return
    for t in range(len(x)):
        own = x[t]
        if norm.layer_norm:
            mean = own.sum() / np.float32(len(own))
            for k in range(len(own)):
                own[k] -= mean
        scale = np.float32(1) / math.sqrt(_dot(own, own) / np.float32(len(own)) + eps)
        for k in range(len(own)):
            own[k] = own[k] * scale * (weight[k] + offset)
        for k in range(len(bias)):
            own[k] += bias[k]


@njit(fastmath=True, cache=True)
def _rotate(x, tokens, dim):  # type: ignore[no-untyped-def]
    half = tokens.cos.shape[1] // 2
    for t in range(len(tokens.x)):
        cos, sin = tokens.cos[tokens.angles[t]], tokens.sin[tokens.angles[t]]
        for head in range(0, x.shape[1], dim):
            for k in range(half):
                a, b = x[t, head + k], x[t, head + half + k]
                x[t, head + k] = a * cos[k] - b * sin[k]
                x[t, head + half + k] = b * cos[half + k] + a * sin[half + k]


@njit(cache=True)
def _write(new, cache, tokens):  # type: ignore[no-untyped-def]
    """Write K or V of the pass into (blocks, kv_heads, size, dim)."""
    size, dim = cache.shape[2], cache.shape[3]
    for t in range(len(tokens.x)):
        block, place = tokens.tables[tokens.rows[t], tokens.columns[t] // size], tokens.columns[t] % size
        for head in range(cache.shape[1]):
            for k in range(dim):
                cache[block, head, place, k] = new[t, head * dim + k]


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


@njit(fastmath=True, parallel=True, cache=True)
def _attend(q, keys, values, tokens, scaling, window, cap):  # type: ignore[no-untyped-def]
    """Replace queries by what they attend to; two queries of one row share a pass over its K/V. Columns are taken four at a
    time, counted from the row's first, so that no four lie in two blocks."""
    size, dim, heads, group = keys.shape[2], keys.shape[3], keys.shape[1], q.shape[1] // keys.shape[3] // keys.shape[1]
    pairs = _pairs(tokens.rows, group)
    for job in prange(len(pairs) * heads):
        head, one, other = job // len(pairs), pairs[job % len(pairs), 0], pairs[job % len(pairs), 1]
        t, last = one // group, other // group
        begin, other_begin = _first_column(tokens, t, window), _first_column(tokens, last, window)
        table, low, stop = tokens.tables[tokens.rows[t]], min(begin, other_begin), tokens.columns[last] + 1
        low -= (low + tokens.positions[t] - tokens.columns[t]) % 4
        weights = np.zeros((2, (stop - low + 3) // 4 * 4), np.float32)
        two = np.empty((2, dim), np.float32)
        for i, which in enumerate((one, other)):
            place = (head * group + which % group) * dim
            two[i] = q[which // group, place : place + dim]
        column = low
        while column < stop:
            place, end = column % size, min(stop, (column // size + 1) * size)
            _compare(two, keys[table[column // size], head, place : place + end - column], weights, column - low)
            column = end
        if cap > ZERO:
            _cap(weights, scaling, cap)
        factor = np.float32(1) if cap > ZERO else scaling
        _softmax(weights[0], begin - low, tokens.columns[t] + 1 - low, factor)
        _softmax(weights[1], other_begin - low, stop - low, factor)
        two[:] = ZERO
        column = low
        while column < stop:
            place, end = column % size, min(stop, (column // size + 1) * size)
            _mix(two, values[table[column // size], head, place : place + end - column], weights, column - low)
            column = end
        for i, which in enumerate((one, other)):
            place = (head * group + which % group) * dim
            q[which // group, place : place + dim] = two[i]


@njit(inline="always", cache=True)
def _first_column(tokens, t, window):  # type: ignore[no-untyped-def]
    """Return the first column that a token attends to."""
    first = tokens.columns[t] - tokens.positions[t]
    return max(first, tokens.columns[t] + 1 - window) if window else first


@njit(fastmath=True, inline="always", cache=True)
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


@njit(fastmath=True, inline="always", cache=True)
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


@njit(fastmath=True, inline="always", cache=True)
def _softmax(x, first, stop, scaling):  # type: ignore[no-untyped-def]
    """Turn scores from `first` up to `stop` into weights; the others become 0."""
    highest = x[first]
    for c in range(first, stop):
        highest = max(highest, x[c])
    for c in range(len(x)):
        x[c] = (x[c] - highest) * scaling
    _exp(x)
    x[:first] = ZERO
    x[stop:] = ZERO
    total = ZERO
    for c in range(len(x)):
        total += x[c]
    for c in range(len(x)):
        x[c] /= total


@njit(fastmath=True, inline="always", cache=True)
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


@njit(fastmath=True, parallel=True, cache=True)
def _activate(gate, up, count, kind):  # type: ignore[no-untyped-def]
    """gate becomes activation(gate) * up; `up` has a row for each token, or one for all."""
    inner = gate.shape[1]
    for job in prange(count * 8):
        t, part = job // 8, job % 8
        start, stop = part * inner // 8, (part + 1) * inner // 8
        own, other = gate[t, start:stop], up[t % len(up), start:stop]
        if kind == SILU:
            _gate(own, other, own.copy())
        elif kind == GELU_TANH:
            _gate(own, other, np.float32(1.5957691216) * (own + np.float32(0.044715) * own * own * own))
        else:
            for k in range(len(own)):
                x = own[k]
                own[k] = np.float32(0.5) * x * (np.float32(1) + math.erf(x * np.float32(0.7071067812))) * other[k]


@njit(fastmath=True, inline="always", cache=True)
def _gate(x, up, inner):  # type: ignore[no-untyped-def]
    """x becomes x · up · sigmoid(inner); half of 1 + tanh(y) is sigmoid(2y)."""
    for k in range(len(inner)):
        inner[k] = -inner[k]
    _exp(inner)
    for k in range(len(x)):
        x[k] *= up[k] / (np.float32(1) + inner[k])


@njit(fastmath=True, cache=True)
def _add(x, more, out_norm, residual):  # type: ignore[no-untyped-def]
    _normalize(more, out_norm)
    scale = np.float32(residual)
    for t in range(len(x)):
        for k in range(x.shape[1]):
            x[t, k] += scale * more[t, k]
