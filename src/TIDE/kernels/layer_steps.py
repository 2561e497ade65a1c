"""A decoder layer made of the functions of a backend: `norm`, `project`, `attend`, `add_linear`, `add_mlp`."""

from __future__ import annotations

import torch

from TIDE.kernels.interfaces import LayerOps
from TIDE.kernels.layer import Layer, Pass


def run_layer(ops: LayerOps, layer: Layer, tokens: Pass, keys: torch.Tensor, values: torch.Tensor, most: int | None) -> None:
    """Run a layer with a backend's functions; otherwise like `decoder_layer` of `reference/layers.py`."""
    h = ops.norm(tokens.x, layer.attention_norm)
    queries = ops.project(layer.attention, tokens, h, keys, values)
    if not len(queries):
        return
    tokens, beside = tokens.of_asking(), None
    seen = ops.attend(layer.attention, tokens, queries, keys, values, most or tokens.tables.shape[1] * keys.shape[2])
    if layer.parallel:
        beside = ops.norm(tokens.x, layer.mlp_norm) if len(layer.mlp_norm.weight) else h[: len(seen)]
    end_layer(ops, layer, tokens.x, seen, beside)


def end_layer(ops: LayerOps, layer: Layer, x: torch.Tensor, seen: torch.Tensor, beside: torch.Tensor | None = None) -> None:
    """Run the rest of a layer after attention, in place.

    Args:
        seen: (n, heads * head_dim) output of attention.
        beside: (n, hidden) input of the MLP of a parallel layer; None: the states after attention, normed.
    """
    ops.add_linear(x, seen, layer.attention.o, layer.attention.o_bias, layer.attention_out_norm, layer.residual)
    beside = ops.norm(x, layer.mlp_norm) if beside is None else beside
    ops.add_mlp(x, beside, layer.mlp, layer.mlp_out_norm, layer.residual)
