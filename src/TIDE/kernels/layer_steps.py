"""A decoder layer in steps, for backends that have a function for each: `norm`, `project`, `attend`, `add_linear`, `add_mlp`.

What of a layer looks at other tokens comes first, and changes nothing but K/V; the rest may run for some of the tokens only.
"""

from __future__ import annotations

import torch

from TIDE.kernels.interfaces import LayerOps
from TIDE.kernels.layer import Begun, Layer, Pass


def run_layer(ops: LayerOps, layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None) -> None:
    """Run a layer with a backend's functions; otherwise like `decoder_layer` of `reference/layers.py`."""
    if begun := begin_layer(ops, layer, tokens, keys, values, most):
        end_layer(ops, layer, tokens.x[: tokens.asking], begun)


def begin_layer(
    ops: LayerOps, layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None
) -> Begun | None:
    """Run what of a layer looks at other tokens; None if no token asks."""
    h = ops.norm(tokens.x, layer.attention_norm)
    queries = ops.project(layer.attention, tokens, h, keys, values)
    if not len(queries):
        return None
    tokens = tokens.of_asking()
    seen = ops.attend(layer.attention, tokens, queries, keys, values, most or tokens.tables.shape[1] * keys.shape[2])
    if not layer.parallel:
        return Begun(seen)
    return Begun(seen, ops.norm(tokens.x, layer.mlp_norm) if len(layer.mlp_norm.weight) else h[: len(seen)])


def end_layer(ops: LayerOps, layer: Layer, x: torch.Tensor, begun: Begun) -> None:
    """Run the rest of a layer, in place."""
    ops.add_linear(x, begun.seen, layer.attention.o, layer.attention.o_bias, layer.attention_out_norm, layer.residual)
    beside = ops.norm(x, layer.mlp_norm) if begun.beside is None else begun.beside
    ops.add_mlp(x, beside, layer.mlp, layer.mlp_out_norm, layer.residual)
