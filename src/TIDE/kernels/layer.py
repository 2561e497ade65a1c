"""The fused layer: 1 to 16 tokens of one or more rows through one decoder layer, on the engine's cache.

    x  →  norm → q, k, v → rotary → K/V into the cache → attention → o  →  + x
       →  norm → gate, up → activation → down                           →  + x

What Llama-like families do differently is a few features, kept in `Layer`; the tokens of a pass are in `Pass`. Backends
are functions `decoder_layer(layer, tokens, keys, values)` that change `tokens.x`, `keys` and `values` in place:
`reference.py` says in torch what they compute, `cpu_ops.py` and `triton_ops.py` do it in compiled code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

MOST_TOKENS = 16
UNLIKELY = 20  # how far below an exit's worst token those lie that it did not look at
GROUP = 64  # columns of a weight in 8 bits that share a scale of the states

SILU, GELU_TANH, GELU = range(3)


class Bytes(NamedTuple):
    """A weight in 8 bits, for exits: what they say is verified or certified, so it may be a little off. Columns are padded."""

    values: Any  # (rows, groups, GROUP) int8
    scales: Any  # (rows,)


class Entry(NamedTuple):
    """How a memory head joins what it sees: see `routing/heads.py`."""

    shallow_center: Any  # (inputs * hidden,)
    shallow_spread: Any
    deep_center: Any  # (hidden,)
    deep_spread: Any
    fuse: Any  # (hidden, (inputs + 1) * hidden)
    recall: Any  # (hidden, memories * hidden)
    eps: float


class Layer(NamedTuple):
    """Weights and features of one decoder layer. Arrays that a layer does not have are empty; matrices may be `Bytes`."""

    input_norm: Any  # (hidden,)
    mlp_norm: Any
    q: Any  # (heads * head_dim, hidden)
    k: Any  # (kv_heads * head_dim, hidden)
    v: Any
    o: Any  # (hidden, heads * head_dim)
    gate: Any  # (inner, hidden)
    up: Any
    down: Any  # (hidden, inner)
    q_bias: Any
    k_bias: Any
    v_bias: Any
    o_bias: Any
    q_norm: Any  # (head_dim,)
    k_norm: Any
    input_norm_bias: Any  # (hidden,), only where norms are centred
    mlp_norm_bias: Any
    head_dim: int
    eps: float
    scaling: float  # of attention scores
    norm_offset: float = 0.0  # added to the weights of norms: 1 in Gemma
    residual: float = 1.0  # what is added to the states is multiplied by it
    window: int = 0  # columns a token sees; 0: all
    activation: int = SILU
    rotary: bool = True
    centred: bool = False  # norms take the mean away: LayerNorm, not RMSNorm


class Norm(NamedTuple):
    """What a norm computes with."""

    weight: Any  # (hidden,)
    eps: float
    offset: float  # added to the weight
    centred: bool
    bias: Any  # (hidden,), or empty


def input_norm(layer: Layer) -> Norm:
    return Norm(layer.input_norm, layer.eps, layer.norm_offset, layer.centred, layer.input_norm_bias)


def mlp_norm(layer: Layer) -> Norm:
    return Norm(layer.mlp_norm, layer.eps, layer.norm_offset, layer.centred, layer.mlp_norm_bias)


class Pass(NamedTuple):
    """The tokens of a pass: `rows` of `width` tokens each, token i of a row at column start + i."""

    x: Any  # (rows * width, hidden) states, changed in place
    cos: Any  # (rows * width, rotary_dim); on a GPU also of all columns, for a single row: more than there are tokens
    sin: Any
    rows: Any  # (n,) rows of the cache
    origins: Any  # (n,) the first column of each row
    start: Any  # a number, or where a GPU finds it
    width: int
