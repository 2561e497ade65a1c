"""The fused layer in compiled CPU code (numba), fp32. `cpu_products.py` has the products, where the time goes."""

from __future__ import annotations

import math

import numpy as np
from numba import config, njit, prange, set_num_threads

from TIDE.kernels import cpu_products
from TIDE.kernels.cpu_products import ZERO, _dot, _padded, _products
from TIDE.kernels.layer import GELU_TANH, GROUP, SILU, Bytes, Layer, Pass

VERSION = 1  # counts changes of what is compiled here, for those who keep it compiled into their own code

# Compiled code is kept for as long as this file does not change, so this file says what it was compiled for.
assert " ".join(Layer._fields) == (
    "input_norm mlp_norm q k v o gate up down q_bias k_bias v_bias o_bias q_norm k_norm head_dim eps scaling norm_offset "
    "residual window activation rotary"
)
assert " ".join(Pass._fields) == "x cos sin rows origins start width"
assert cpu_products.VERSION == 1


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
    h = _padded(x)
    _norm(h, h, layer.input_norm, eps, offset)
    q = _linear(h, layer.q, layer.q_bias)
    k = _linear(h, layer.k, layer.k_bias)
    v = _linear(h, layer.v, layer.v_bias)
    if len(layer.q_norm):
        _norm(q.reshape(-1, dim), q.reshape(-1, dim), layer.q_norm, eps, offset)
        _norm(k.reshape(-1, dim), k.reshape(-1, dim), layer.k_norm, eps, offset)
    if layer.rotary:
        _turn(q, tokens.cos, tokens.sin, dim)
        _turn(k, tokens.cos, tokens.sin, dim)
    _write(k, keys, tokens)
    _write(v, values, tokens)
    _attend(q, keys, values, tokens, np.float32(layer.scaling), layer.window)
    _add(x, _linear(q, layer.o, layer.o_bias), np.float32(layer.residual))
    h[: len(x)] = x
    _norm(h, h, layer.mlp_norm, eps, offset)
    none = layer.o_bias[:0]
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
def _norm(x, out, weight, eps, offset):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        scale = np.float32(1) / math.sqrt(_dot(x[t], x[t]) / np.float32(x.shape[1]) + eps)
        for k in range(x.shape[1]):
            out[t, k] = x[t, k] * scale * (weight[k] + offset)


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
    """Queries are replaced by what they see."""
    kv_heads, dim = keys.shape[1], keys.shape[3]
    heads = q.shape[1] // dim
    for job in prange(len(tokens.x) * heads):
        t, head = job // heads, job % heads
        row, stop = tokens.rows[t // tokens.width], tokens.start + t % tokens.width + 1
        first = tokens.origins[t // tokens.width]
        if window:
            first = max(first, stop - window)
        query = q[t, head * dim : (head + 1) * dim]
        weights = np.zeros((stop - first + 3) // 4 * 4, np.float32)
        _compare(query, keys[row, head * kv_heads // heads, first:stop], weights)
        total = _softmax(weights, stop - first, scaling)
        _mix(query, values[row, head * kv_heads // heads, first:stop], weights, np.float32(1) / total)


@njit(fastmath=True, inline="always", cache=True)
def _compare(query, keys, out):  # type: ignore[no-untyped-def]
    """Products of a query with keys, four at a time; past the last one, with it."""
    last = len(keys) - 1
    for c in range(0, len(out), 4):
        k0, k1, k2, k3 = keys[c], keys[min(c + 1, last)], keys[min(c + 2, last)], keys[min(c + 3, last)]
        a0 = a1 = a2 = a3 = ZERO
        for k in range(len(query)):
            x = query[k]
            a0 += x * k0[k]
            a1 += x * k1[k]
            a2 += x * k2[k]
            a3 += x * k3[k]
        out[c], out[c + 1], out[c + 2], out[c + 3] = a0, a1, a2, a3


@njit(fastmath=True, inline="always", cache=True)
def _mix(out, values, weights, scale):  # type: ignore[no-untyped-def]
    """The weighed sum of values, four at a time; weights past the last one are 0."""
    last = len(values) - 1
    for k in range(len(out)):
        out[k] = ZERO
    for c in range(0, len(weights), 4):
        v0, v1, v2, v3 = values[c], values[min(c + 1, last)], values[min(c + 2, last)], values[min(c + 3, last)]
        a0, a1, a2, a3 = weights[c] * scale, weights[c + 1] * scale, weights[c + 2] * scale, weights[c + 3] * scale
        for k in range(len(out)):
            out[k] += a0 * v0[k] + a1 * v1[k] + a2 * v2[k] + a3 * v3[k]


@njit(fastmath=True, inline="always", cache=True)
def _softmax(x, count, scaling):  # type: ignore[no-untyped-def]
    """The first `count` become e^(scaling · (x - the highest)), the others 0. Returns the sum."""
    highest = x[0]
    for c in range(count):
        highest = max(highest, x[c])
    for c in range(len(x)):
        x[c] = (x[c] - highest) * scaling
    _exp(x)
    total = ZERO
    for c in range(count):
        total += x[c]
    x[count:] = ZERO
    return total


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
        for k in range(part * inner // 8, (part + 1) * inner // 8):
            x = gate[t, k]
            if kind == SILU:
                y = x / (np.float32(1) + math.exp(-x))
            elif kind == GELU_TANH:
                y = (
                    np.float32(0.5)
                    * x
                    * (np.float32(1) + math.tanh(np.float32(0.7978845608) * (x + np.float32(0.044715) * x * x * x)))
                )
            else:
                y = np.float32(0.5) * x * (np.float32(1) + math.erf(x * np.float32(0.7071067812)))
            gate[t, k] = y * up[t, k]


@njit(fastmath=True, cache=True)
def _add(x, more, residual):  # type: ignore[no-untyped-def]
    for t in range(len(x)):
        for k in range(x.shape[1]):
            x[t, k] += residual * more[t, k]
