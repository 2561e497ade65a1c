"""Fused layers: spans of a Llama-like model through compiled code instead of its own modules.

A model is fused where there is compiled code for its device and dtype, its layers have features, nobody hangs hooks on
them, and a check on a few tokens gives the states its own layers give. Everything else, and passes of more than
`MOST_TOKENS` tokens, run through the model's own layers. `TIDE_NO_KERNELS=1` leaves all models unfused.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from TIDE.adapters.features import layer_features
from TIDE.adapters.window import Window
from TIDE.engine.check import first_difference
from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass

logger = logging.getLogger(__name__)


class FusedLayers:
    """The decoder layers of a model, run by compiled CPU code."""

    def __init__(self, layers: list[Layer]) -> None:
        from TIDE.kernels import cpu_ops  # compiled code is imported where it is used

        self.ops = cpu_ops
        self.layers = [_arrays(layer) for layer in layers]

    def takes(self, states: torch.Tensor, cache: Any) -> bool:
        """Whether a pass is small enough, and has a cache to work on."""
        return cache is not None and states.shape[0] * states.shape[1] <= MOST_TOKENS

    def run(
        self, span: range, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: Any, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(n, q, hidden) states before a span -> those after it, and at the depths of `taps`."""
        rows, tokens, hidden = states.shape
        x = states.reshape(rows * tokens, hidden).clone()
        cos, sin = (part.expand(rows, -1, -1).reshape(rows * tokens, -1).numpy() for part in angles)
        view, own = cache.view, cache.segments[cache.view.segment]
        places = np.array(view.rows), np.array([own.origin[row] for row in view.rows])
        going, tapped = Pass(x.numpy(), cos, sin, *places, view.start, tokens), {}
        for index in span:
            if index in taps:
                tapped[index] = x.view_as(states).clone()
            layer = self.layers[index]
            keys, values = cache.room(index, len(layer.k) // layer.head_dim, layer.head_dim, x)
            self.ops.decoder_layer(layer, going, keys.numpy(), values.numpy())
        return x.view_as(states), tapped

    def multiplies(self, states: torch.Tensor, weight: torch.Tensor) -> bool:
        return states.shape[0] * states.shape[1] <= MOST_TOKENS and _plain((weight, states))

    def linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(n, q, hidden), (m, hidden) -> (n, q, m)"""
        found = self.ops.linear(states.flatten(0, 1).numpy(), weight.detach().numpy())
        return torch.from_numpy(found).view(*states.shape[:2], -1)


def fuse(window: Window) -> None:
    """Let a window run fused layers, if that is possible and gives what the model's own layers give."""
    layers = None if _unwanted(window) else _features(window)
    if layers is None:
        return
    window.fused = FusedLayers(layers)
    different = first_difference(window)
    if different is not None:
        window.fused = None
        logger.warning(
            "the fused layer gives other states than layer %d (%s) of this model, so its own layers run. Please report the "
            "model.",
            different,
            type(window.layers[different]).__name__,
        )


def still_fused(window: Window) -> bool:
    """Whether the modules a fused window stands for are as they were: same weights, no hooks."""
    layers = _features(window)
    fused = window.fused
    return (
        fused is not None
        and layers is not None
        and all(
            theirs.ctypes.data == ours.data_ptr()
            for old, new in zip(fused.layers, layers, strict=True)
            for theirs, ours in zip(old[:9], new[:9], strict=True)
        )
    )


def _unwanted(window: Window) -> str | None:
    """Why a model is not fused."""
    if os.environ.get("TIDE_NO_KERNELS") == "1":
        return "TIDE_NO_KERNELS=1"
    if window.model.device.type != "cpu" or window.model.dtype != torch.float32:
        return "compiled code is for fp32 on a CPU"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None


def _features(window: Window) -> list[Layer] | None:
    config = window.model.config.get_text_config(decoder=True)
    found = [None if _has_hooks(layer) else layer_features(layer, config) for layer in window.layers]
    whole = [layer for layer in found if layer is not None]
    return whole if len(whole) == len(found) and all(_plain(layer) for layer in whole) else None


def _has_hooks(layer: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())


def _plain(values: Iterable[Any]) -> bool:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    kinds = torch.Tensor, nn.Parameter  # not the tensors of quantization
    return all(type(x) in kinds and x.dtype == torch.float32 and x.device.type == "cpu" and x.is_contiguous() for x in tensors)


def _arrays(layer: Layer) -> Layer:
    """The same weights as numpy arrays, in place."""
    arrays: dict[str, Any] = {name: x.detach().numpy() for name, x in layer._asdict().items() if isinstance(x, torch.Tensor)}
    return layer._replace(**arrays)
