"""The fused layer in compiled CPU code (numba), fp32.

Decoding reads every weight once for a handful of tokens, so products are arranged by how memory likes to be read:

    tokens 1, 2    a thread streams through the rows of a weight, one after the other
    3, 4           two rows from the two halves of the matrix: two streams
    5 to 16        four neighbouring rows and four tokens at a time: arithmetic is the limit here

Tokens are padded to 4, 8, 12 or 16; what is computed for padding is thrown away.
"""

from __future__ import annotations

import math

import numpy as np
from numba import config, njit, prange, set_num_threads

from TIDE.kernels.layer import GELU_TANH, SILU, Layer, Pass

ZERO = np.float32(0)

# Compiled code is kept for as long as this file does not change, so this file says what it was compiled for.
assert " ".join(Layer._fields) == (
    "input_norm mlp_norm q k v o gate up down q_bias k_bias v_bias o_bias q_norm k_norm head_dim eps scaling norm_offset "
    "residual window activation rotary"
)
assert " ".join(Pass._fields) == "x cos sin rows origins start width"


def use_threads(count: int) -> None:
    """Compiled code runs on so many threads from now on, or on as many as there are."""
    set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))


def decoder_layer(layer: Layer, tokens: Pass, keys: np.ndarray, values: np.ndarray) -> None:
    """One layer for the tokens of a pass, all numpy views: `reference.decoder_layer` says what it computes."""
    _decoder_layer(layer, tokens, keys, values)


def linear(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """(n, k), (m, k) -> (n, m)"""
    return _linear(_padded(x), weight, x[:0, 0])[: len(x)]


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


@njit(cache=True)
def _padded(x):  # type: ignore[no-untyped-def]
    """A copy with as many rows as products want."""
    count = len(x) if len(x) <= 2 else (len(x) + 3) // 4 * 4
    out = np.zeros((count, x.shape[1]), np.float32)
    out[: len(x)] = x
    return out


@njit(fastmath=True, cache=True)
def _linear(x, weight, bias):  # type: ignore[no-untyped-def]
    out = np.empty((len(x), len(weight)), np.float32)
    if len(x) == 1:
        _products_1(x, weight, out)
    elif len(x) == 2:
        _products_2(x, weight, out)
    elif len(x) == 4:
        _products_4(x, weight, out)
    else:
        _products_many(x, weight, out)
    if len(bias):
        for t in range(len(x)):
            for o in range(len(weight)):
                out[t, o] += bias[o]
    return out


@njit(fastmath=True, parallel=True, cache=True)
def _products_1(x, weight, out):  # type: ignore[no-untyped-def]
    x0 = x[0]
    for o in prange(len(weight)):
        out[0, o] = _dot(weight[o], x0)


@njit(fastmath=True, parallel=True, cache=True)
def _products_2(x, weight, out):  # type: ignore[no-untyped-def]
    x0, x1 = x[0], x[1]
    for o in prange(len(weight)):
        w = weight[o]
        a0 = a1 = ZERO
        for k in range(len(w)):
            a0 += w[k] * x0[k]
            a1 += w[k] * x1[k]
        out[0, o], out[1, o] = a0, a1


@njit(fastmath=True, parallel=True, cache=True)
def _products_4(x, weight, out):  # type: ignore[no-untyped-def]
    half = len(weight) // 2
    for o in prange(half):
        _two_by_four(x, weight, 0, o, o + half, out)
    if len(weight) % 2:
        for t in range(4):
            out[t, -1] = _dot(weight[-1], x[t])


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
def _two_by_four(x, weight, t, o, p, out):  # type: ignore[no-untyped-def]
    """Rows o and p with tokens t to t + 3."""
    w0, w1, x0, x1, x2, x3 = weight[o], weight[p], x[t], x[t + 1], x[t + 2], x[t + 3]
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
    out[t, o], out[t + 1, o], out[t + 2, o], out[t + 3, o] = a0, a1, a2, a3
    out[t, p], out[t + 1, p], out[t + 2, p], out[t + 3, p] = b0, b1, b2, b3


@njit(fastmath=True, inline="always", cache=True)
def _four_by_four(x, weight, t, o, out):  # type: ignore[no-untyped-def]
    """Rows o to o + 3 with tokens t to t + 3."""
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
        row, column = tokens.rows[t // tokens.width], tokens.start + t % tokens.width
        first = tokens.origins[t // tokens.width]
        if window:
            first = max(first, column + 1 - window)
        own_keys, own_values = keys[row, head * kv_heads // heads], values[row, head * kv_heads // heads]
        query = q[t, head * dim : (head + 1) * dim]
        scores = np.empty(column + 1 - first, np.float32)
        highest = np.float32(-np.inf)
        for c in range(len(scores)):
            scores[c] = _dot(own_keys[first + c], query) * scaling
            highest = max(highest, scores[c])
        total = ZERO
        for c in range(len(scores)):
            scores[c] = math.exp(scores[c] - highest)
            total += scores[c]
        for k in range(dim):
            query[k] = ZERO
        for c in range(len(scores)):
            share, value = scores[c] / total, own_values[first + c]
            for k in range(dim):
                query[k] += share * value[k]


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
