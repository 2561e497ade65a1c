"""What a fused layer computes, in torch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from TIDE.kernels.layer import GELU, GELU_TANH, SILU, Layer, Pass

ACTIVATIONS = {SILU: F.silu, GELU_TANH: lambda x: F.gelu(x, approximate="tanh"), GELU: F.gelu}


def decoder_layer(layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor) -> None:
    """One layer for the tokens of a pass; `tokens.x`, `keys` and `values`, (rows, kv_heads, columns, head_dim), change."""
    x, (kv_heads, _, dim) = tokens.x, keys.shape[1:]
    h = _norm(x, layer.input_norm, layer)
    q = _linear(h, layer.q, layer.q_bias).view(len(x), -1, dim)
    k = _linear(h, layer.k, layer.k_bias).view(len(x), kv_heads, dim)
    v = _linear(h, layer.v, layer.v_bias).view(len(x), kv_heads, dim)
    if len(layer.q_norm):
        q, k = _norm(q, layer.q_norm, layer), _norm(k, layer.k_norm, layer)
    if layer.rotary:
        q, k = (_turn(states, tokens.cos, tokens.sin) for states in (q, k))
    stop = tokens.start + tokens.width
    for index, row in enumerate(tokens.rows.tolist()):
        own = slice(index * tokens.width, (index + 1) * tokens.width)
        keys[row, :, tokens.start : stop] = k[own].transpose(0, 1)
        values[row, :, tokens.start : stop] = v[own].transpose(0, 1)
    attended = torch.stack([_attend(layer, tokens, place, states, keys, values) for place, states in enumerate(q)])
    x += layer.residual * _linear(attended.flatten(1), layer.o, layer.o_bias)
    h = _norm(x, layer.mlp_norm, layer)
    inner = ACTIVATIONS[layer.activation](h @ layer.gate.T) * (h @ layer.up.T)
    x += layer.residual * (inner @ layer.down.T)


def _attend(layer: Layer, tokens: Pass, place: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """(heads, dim) queries of one token -> what they see."""
    index, column = place // tokens.width, tokens.start + place % tokens.width
    first = int(tokens.origins[index])
    if layer.window:
        first = max(first, column + 1 - layer.window)
    row, groups = int(tokens.rows[index]), len(q) // keys.shape[1]
    seen = keys[row, :, first : column + 1].repeat_interleave(groups, 0)
    weights = (seen @ q[..., None] * layer.scaling).softmax(1)
    return (weights * values[row, :, first : column + 1].repeat_interleave(groups, 0)).sum(1)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x @ weight.T + bias if len(bias) else x @ weight.T


def _norm(x: torch.Tensor, weight: torch.Tensor, layer: Layer) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=layer.eps) * (weight + layer.norm_offset)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, dim): the first rotary_dim of dim are turned."""
    size = cos.shape[-1]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)
