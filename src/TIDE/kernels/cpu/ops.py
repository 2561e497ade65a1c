"""The decoder layer in compiled CPU code (numba), fp32. Its products and attention have files of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import get_num_threads, njit, typeof

from TIDE.kernels.cpu import attention as cpu_attention
from TIDE.kernels.cpu import products as cpu_products
from TIDE.kernels.cpu.attention import _attention
from TIDE.kernels.cpu.products import PRODUCTS, Calls, _dot, _gated, _linear, _linear_3, _padded, described
from TIDE.kernels.cpu.threads import in_turn
from TIDE.kernels.layer import MLP, Attention, Layer, Norm, Pass
from TIDE.kernels.weights import Weight

VERSION = 14  # counts changes of the code compiled here, for modules that compile it into their own
TABLES = 8  # fields of a pass up to its tables: those that compiled code gets

# numba caches compiled code until this file changes, so this file states the types it was compiled for.
assert " ".join(Norm._fields) == "weight eps offset layer_norm bias"
assert " ".join(Attention._fields) == ("q k v o q_bias k_bias v_bias o_bias q_norm k_norm head_dim scaling window cap rotary")
assert " ".join(MLP._fields) == "gate up down gate_bias up_bias down_bias activation"
assert " ".join(Layer._fields) == (
    "attention_norm attention attention_out_norm mlp_norm mlp mlp_out_norm residual parallel rope"
)
assert " ".join(Pass._fields) == "x cos sin rows columns positions angles tables groups ancestors asking"
assert (cpu_products.VERSION, cpu_attention.VERSION) == (5, 1)


class PreparedLayer(NamedTuple):
    """A layer in the form of compiled code, which is the same for all kinds of weights: they stand in it by their addresses."""

    weights: np.ndarray  # (7, 4) descriptions of q, k, v, o, gate, up, down
    norms: tuple[Norm, ...]  # of attention, of what it gives, of the MLP, of what it gives, of queries, of keys
    numbers: tuple[Any, ...]  # head_dim, scaling, window, cap, rotary, activation, residual, parallel
    products: Callable[[], int]
    layer: Layer  # holds the memory


def prepared(layer: Layer) -> PreparedLayer:
    """Prepare a layer of numpy arrays for compiled code."""
    at, mlp = layer.attention, layer.mlp
    weights = [(at.q, at.q_bias), (at.k, at.k_bias), (at.v, at.v_bias), (at.o, at.o_bias)]
    weights += [(mlp.gate, mlp.gate_bias), (mlp.up, mlp.up_bias), (mlp.down, mlp.down_bias)]
    (kind,) = {type(weight) for weight, _ in weights}
    norms = (layer.attention_norm, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm, at.q_norm, at.k_norm)
    numbers = int(at.head_dim), float(at.scaling), int(at.window), float(at.cap), bool(at.rotary), int(mlp.activation)
    return PreparedLayer(
        np.stack([described(weight, bias) for weight, bias in weights]),
        tuple(map(plain_norm, norms)),
        (*numbers, float(layer.residual), bool(layer.parallel)),
        PRODUCTS[kind],
        layer,
    )


def plain_norm(norm: Norm) -> Norm:
    """Return a norm whose numbers have the types that code is compiled for."""
    return Norm(norm.weight, float(norm.eps), float(norm.offset), bool(norm.layer_norm), norm.bias)


@in_turn
def decoder_layer(layer: PreparedLayer | Layer, tokens: Pass, keys: np.ndarray, values: np.ndarray) -> None:
    """Run one layer for the tokens of a pass, all numpy views, as `reference.decoder_layer` does."""
    assert not tokens.is_paged or np.array_equal(tokens.columns, tokens.positions), "rows in blocks begin at column 0"
    assert not tokens.is_paged or keys.shape[2] % 4 == 0, f"blocks of {keys.shape[2]} columns: not a multiple of 4"
    assert keys.flags.c_contiguous and values.flags.c_contiguous, "K/V must be contiguous"
    ready = prepared(layer) if isinstance(layer, Layer) else layer
    x, cos, sin, *places, tables = tokens[:TABLES]
    numbers = [np.ascontiguousarray(place, np.int64) for place in places]
    given = (x, cos, sin, *numbers, np.ascontiguousarray(tables, np.int32))
    described_layer = ready.weights, ready.norms, ready.numbers, given, keys, values
    if not _decoder_layer.overloads:
        compile_for(_decoder_layer, *described_layer)
    _decoder_layer(*described_layer, calls(ready.products))


def compile_for(function: Any, *arguments: Any) -> None:
    """Compile a function for arguments like these and for `Calls`; nothing runs."""
    function.compile(tuple(map(typeof, (*arguments, Calls(0, 0, 1)))))


def calls(products: Callable[[], int]) -> Calls:
    """Return the C functions that a layer calls."""
    return Calls(products(), cpu_attention.attention(), get_num_threads())


@in_turn
def linear(x: np.ndarray, weight: Weight) -> np.ndarray:
    """(n, k), (m, k) -> (n, m)"""
    return _linear(_padded(x), described(weight), calls(PRODUCTS[type(weight)]))[: len(x)]


@njit(fastmath=True, cache=True)
def _decoder_layer(weights, norms, numbers, tokens, keys, values, calls):  # type: ignore[no-untyped-def]
    attention_norm, attention_out_norm, mlp_norm, mlp_out_norm, q_norm, k_norm = norms
    head_dim, scaling, window, cap, rotary, activation, residual, parallel = numbers
    x, cos, sin, rows, columns, positions, angles, tables = tokens
    h = _normed(x, attention_norm)
    beside = _normed(x, mlp_norm) if parallel and len(mlp_norm.weight) else h
    q, k, v = _linear_3(h, weights[:3], calls)
    _normalize_heads(q, q_norm)
    if rotary:
        _rotate(q, cos, sin, angles, head_dim)
    _keep(k, v, k_norm, rotary, tokens, keys, values)
    _attention(q, keys, values, (rows, columns, positions, tables), np.float32(scaling), window, np.float32(cap), calls)
    _add(x, _linear(q, weights[3], calls), attention_out_norm, residual)
    if not parallel:
        beside = _normed(x, mlp_norm)
    inner = _gated(beside, weights[4], weights[5], activation, calls)
    _add(x, _linear(inner, weights[6], calls), mlp_out_norm, residual)


@njit(fastmath=True, cache=True)
def _write_kv(weights, norms, rotary, tokens, keys, values, calls):  # type: ignore[no-untyped-def]
    """Write K and V of the tokens, and nothing else."""
    h = _normed(tokens[0], norms[0])
    _keep(_linear(h, weights[1], calls), _linear(h, weights[2], calls), norms[5], rotary, tokens, keys, values)


@njit(fastmath=True, cache=True)
def _keep(k, v, norm, rotary, tokens, keys, values):  # type: ignore[no-untyped-def]
    """Write K, normed and rotated, and V."""
    _, cos, sin, rows, columns, _, angles, tables = tokens
    _normalize_heads(k, norm)
    if rotary:
        _rotate(k, cos, sin, angles, keys.shape[3])
    _write(k, keys, rows, columns, tables)
    _write(v, values, rows, columns, tables)


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
def _rotate(x, cos, sin, angles, dim):  # type: ignore[no-untyped-def]
    half = cos.shape[1] // 2
    for t in range(len(angles)):
        at = angles[t]
        for head in range(0, x.shape[1], dim):
            for k in range(half):
                a, b = x[t, head + k], x[t, head + half + k]
                x[t, head + k] = a * cos[at, k] - b * sin[at, k]
                x[t, head + half + k] = b * cos[at, half + k] + a * sin[at, half + k]


@njit(cache=True)
def _write(new, cache, rows, columns, tables):  # type: ignore[no-untyped-def]
    """Write K or V of the pass into (blocks, kv_heads, size, dim)."""
    size, dim = cache.shape[2], cache.shape[3]
    for t in range(len(rows)):
        block, place = tables[rows[t], columns[t] // size], columns[t] % size
        for head in range(cache.shape[1]):
            for k in range(dim):
                cache[block, head, place, k] = new[t, head * dim + k]


@njit(fastmath=True, cache=True)
def _add(x, more, out_norm, residual):  # type: ignore[no-untyped-def]
    _normalize(more, out_norm)
    scale = np.float32(residual)
    for t in range(len(x)):
        for k in range(x.shape[1]):
            x[t, k] += scale * more[t, k]
