"""The fused layer in compiled CPU code (numba), fp32. `cpu_products.py` has the products, where the time goes."""

from __future__ import annotations

import math

import numpy as np
from numba import config, njit, prange, set_num_threads

from TIDE.kernels import cpu_products
from TIDE.kernels.cpu_products import ZERO, _dot, _padded, _products
from TIDE.kernels.layer import GELU_TANH, GROUP, SILU, Bytes, Layer, Pass

VERSION = 5  # counts changes of what is compiled here, for those who keep it compiled into their own code

# Compiled code is kept for as long as this file does not change, so this file says what it was compiled for.
assert " ".join(Layer._fields) == (
    "input_norm mlp_norm q k v o gate up down q_bias k_bias v_bias o_bias q_norm k_norm input_norm_bias mlp_norm_bias head_dim "
    "eps scaling norm_offset residual window activation rotary centred"
)
assert " ".join(Pass._fields) == "x cos sin rows origins start width"
assert cpu_products.VERSION == 2


def use_threads(count: int) -> None:
    """Compiled code runs on so many threads from now on, or on as many as there are."""
    set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))


def decoder_layer(layer: Layer, tokens: Pass, keys: np.ndarray, values: np.ndarray) -> None:
    """One layer for the tokens of a pass, all numpy views: `reference.decoder_layer` says what it computes."""
    _decoder_layer(layer, tokens, keys, values)


def linear(x: np.ndarray, weight: np.ndarray | Bytes) -> np.ndarray:
    """(n, k), (m, k) -> (n, m)"""
    return _linear(_padded(x), weight, x[:0, 0])[: len(x)]


def in_bytes(weight: np.ndarray) -> Bytes:
    """A weight in 8 bits, a scale for each row."""
    rows, columns = weight.shape
    scales = np.maximum(np.abs(weight).max(1, initial=0), np.float32(1e-30)) / np.float32(127)
    groups = -(-columns // GROUP)
    values = np.zeros((rows, groups * GROUP), np.int8)
    values[:, :columns] = np.rint(weight / scales[:, None])
    return Bytes(values.reshape(rows, groups, GROUP), scales)


@njit(fastmath=True, cache=True)
def _decoder_layer(layer, tokens, keys, values):  # type: ignore[no-untyped-def]
    x, dim, eps, offset = tokens.x, keys.shape[3], np.float32(layer.eps), np.float32(layer.norm_offset)
    h, none = _padded(x), layer.o_bias[:0]
    _norm(h, h, layer.input_norm, eps, offset, layer.centred, layer.input_norm_bias)
    q = _linear(h, layer.q, layer.q_bias)
    k = _linear(h, layer.k, layer.k_bias)
    v = _linear(h, layer.v, layer.v_bias)
    if len(layer.q_norm):
        _norm(q.reshape(-1, dim), q.reshape(-1, dim), layer.q_norm, eps, offset, False, none)
        _norm(k.reshape(-1, dim), k.reshape(-1, dim), layer.k_norm, eps, offset, False, none)
    if layer.rotary:
        _turn(q, tokens.cos, tokens.sin, dim)
        _turn(k, tokens.cos, tokens.sin, dim)
    _write(k, keys, tokens)
    _write(v, values, tokens)
    _attend(q, keys, values, tokens, np.float32(layer.scaling), layer.window)
    _add(x, _linear(q, layer.o, layer.o_bias), np.float32(layer.residual))
    h[: len(x)] = x
    _norm(h, h, layer.mlp_norm, eps, offset, layer.centred, layer.mlp_norm_bias)
    gate, up = _linear(h, layer.gate, none), _linear(h, layer.up, none)
    _activate(gate, up, len(x), layer.activation)
    _add(x, _linear(gate, layer.down, none), np.float32(layer.residual))


@njit(fastmath=True, cache=True)
def _linear(x, weight, bias):  # type: ignore[no-untyped-def]
    out = _products(x, weight)
    if len(bias):
        for t in range(len(x)):
            for o in range(out.shape[1]):
                out[t, o] += bias[o]
    return out


@njit(fastmath=True, cache=True)
def _norm(x, out, weight, eps, offset, centred, bias):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        mean = x[t].sum() / np.float32(x.shape[1]) if centred else ZERO
        for k in range(x.shape[1]):
            out[t, k] = x[t, k] - mean
        scale = np.float32(1) / math.sqrt(_dot(out[t], out[t]) / np.float32(x.shape[1]) + eps)
        for k in range(x.shape[1]):
            out[t, k] = out[t, k] * scale * (weight[k] + offset)
        for k in range(len(bias)):
            out[t, k] += bias[k]


@njit(fastmath=True, cache=True)
def _turn(x, cos, sin, dim):  # type: ignore[no-untyped-def]
    half = cos.shape[1] // 2
    for t in range(len(cos)):
        for head in range(0, x.shape[1], dim):
            for k in range(half):
                a, b = x[t, head + k], x[t, head + half + k]
                x[t, head + k] = a * cos[t, k] - b * sin[t, k]
                x[t, head + half + k] = b * cos[t, half + k] + a * sin[t, half + k]


@njit(cache=True)
def _write(new, cache, tokens):  # type: ignore[no-untyped-def]
    """K or V of the pass into (rows, kv_heads, columns, dim)."""
    dim = cache.shape[3]
    for t in range(len(tokens.x)):
        row, column = tokens.rows[t // tokens.width], tokens.start + t % tokens.width
        for head in range(cache.shape[1]):
            for k in range(dim):
                cache[row, head, column, k] = new[t, head * dim + k]


@njit(fastmath=True, parallel=True, cache=True)
def _attend(q, keys, values, tokens, scaling, window):  # type: ignore[no-untyped-def]
    """Queries are replaced by what they see; those of a row that look at the same K/V do it two by two."""
    dim, width, first, group = keys.shape[3], tokens.width, tokens.origins, q.shape[1] // keys.shape[3] // keys.shape[1]
    pairs = (width * group + 1) // 2
    for job in prange(len(first) * keys.shape[1] * pairs):
        r, head, one = job // pairs // keys.shape[1], job // pairs % keys.shape[1], 2 * (job % pairs)
        other = min(one + 1, width * group - 1)
        begin = max(first[r], tokens.start + 1 + one // group - window) if window else first[r]
        own_keys = keys[tokens.rows[r], head, begin : tokens.start + 1 + other // group]
        own_values = values[tokens.rows[r], head, begin : tokens.start + 1 + other // group]
        weights = np.zeros((2, (len(own_keys) + 3) // 4 * 4), np.float32)
        two = np.empty((2, dim), np.float32)
        for i, which in enumerate((one, other)):
            place = (head * group + which % group) * dim
            two[i] = q[r * width + which // group, place : place + dim]
        _compare(two, own_keys, weights)
        for i, which in enumerate((one, other)):
            stop = tokens.start + 1 + which // group
            _softmax(weights[i], max(0, stop - window - begin) if window else 0, stop - begin, scaling)
        _mix(two, own_values, weights)
        for i, which in enumerate((one, other)):
            place = (head * group + which % group) * dim
            q[r * width + which // group, place : place + dim] = two[i]


@njit(fastmath=True, inline="always", cache=True)
def _compare(two, keys, out):  # type: ignore[no-untyped-def]
    """Products of two queries with keys, four at a time; past the last one, with it."""
    last, p, q = len(keys) - 1, two[0], two[1]
    for c in range(0, out.shape[1], 4):
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
        out[0, c], out[0, c + 1], out[0, c + 2], out[0, c + 3] = a0, a1, a2, a3
        out[1, c], out[1, c + 1], out[1, c + 2], out[1, c + 3] = b0, b1, b2, b3


@njit(fastmath=True, inline="always", cache=True)
def _mix(two, values, weights):  # type: ignore[no-untyped-def]
    """The weighed sums of values, four at a time; weights past the last one are 0."""
    last, p, q = len(values) - 1, two[0], two[1]
    for k in range(len(p)):
        p[k] = q[k] = ZERO
    for c in range(0, weights.shape[1], 4):
        v0, v1, v2, v3 = values[c], values[min(c + 1, last)], values[min(c + 2, last)], values[min(c + 3, last)]
        a0, a1, a2, a3 = weights[0, c], weights[0, c + 1], weights[0, c + 2], weights[0, c + 3]
        b0, b1, b2, b3 = weights[1, c], weights[1, c + 1], weights[1, c + 2], weights[1, c + 3]
        for k in range(len(p)):
            p[k] += a0 * v0[k] + a1 * v1[k] + a2 * v2[k] + a3 * v3[k]
            q[k] += b0 * v0[k] + b1 * v1[k] + b2 * v2[k] + b3 * v3[k]


@njit(fastmath=True, inline="always", cache=True)
def _softmax(x, first, stop, scaling):  # type: ignore[no-untyped-def]
    """Those from first up to stop become shares, the others 0."""
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
    """e^x in place, to the last digit or two of fp32: 2^whole · 2^rest, the latter by its series. A loop that runs in vectors,
    which a call of math.exp would not."""
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
    """gate becomes activation(gate) * up."""
    inner = gate.shape[1]
    for job in prange(count * 8):
        t, part = job // 8, job % 8
        start, stop = part * inner // 8, (part + 1) * inner // 8
        own, other = gate[t, start:stop], up[t, start:stop]
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
def _add(x, more, residual):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        for k in range(x.shape[1]):
            x[t, k] += residual * more[t, k]
