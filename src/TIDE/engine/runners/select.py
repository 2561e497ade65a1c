"""Fused layers: spans of a Llama-like model through compiled code instead of its own modules.

A model is fused where there is compiled code for its device and dtype, its layers have features, nobody hangs hooks on
them, and a check on a few tokens gives the states its own layers give. Everything else, and passes of more than
`MOST_TOKENS` tokens, run through the model's own layers. `TIDE_NO_KERNELS=1` leaves all models unfused, `TIDE_NO_CUDA=1` those
on a GPU.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.features import layer_features, norm_features
from TIDE.adapters.weights import is_stock, version
from TIDE.engine.runners.check import TOLERANCE, TOLERANCE_HALF, first_fused_difference
from TIDE.engine.runners.int8_head import Int8LMHead
from TIDE.engine.runners.own_layers import OwnLayers
from TIDE.engine.runners.snapshot import ModelSnapshot, has_hooks
from TIDE.engine.runners.triton_runner import GPULayers
from TIDE.kernels.dispatch import arrays, compiled_exits, compiled_ops, compiled_rounds, missing_compiler, why_no_kernels
from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
PATIENCE = 5.0  # seconds without a word


class FusedLayers:
    """The decoder layers of a model, run by compiled CPU code.

    Attributes:
        embedding, norm: the model's own, where nothing else happens to ids before the first layer and to states between the
            last one and the LM head; None where something does.
    """

    has_rounds = False
    writes_skipped_kv = False  # whether it makes K/V of tokens in layers that they skip
    is_checked = True  # before it is used

    def __init__(self, layers: list[Layer], ops: Any) -> None:
        self.ops = ops
        self.layers = [arrays(layer) for layer in layers]
        self.embedding: nn.Module | None = None
        self.norm: nn.Module | None = None
        self._int8: tuple[tuple[Any, ...], Int8LMHead, Any] | None = None

    def takes(self, states: torch.Tensor, cache: Any) -> bool:
        """Whether a pass is small enough, and has a cache to work on."""
        return cache is not None and states.shape[0] * states.shape[1] <= MOST_TOKENS

    def run(
        self, span: range, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: Any, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(n, q, hidden) states before a span -> those after it, and at the depths of `taps`."""
        self.ops.use_threads(torch.get_num_threads())
        rows, tokens, hidden = states.shape
        x = states.reshape(rows * tokens, hidden).clone()
        cos, sin = (part.expand(rows, -1, -1).reshape(rows * tokens, -1).numpy() for part in angles)
        view, own = cache.view, cache.segments[cache.view.segment]
        places = np.array(view.rows), np.array([own.origin[row] for row in view.rows])
        going = Pass(x.numpy(), cos, sin, *places, view.start, tokens)
        tapped = np.empty((len(taps), *going.x.shape), np.float32)
        for index in span:
            if index in taps:
                tapped[taps.index(index)] = going.x
            layer = self.layers[index]
            keys, values = cache.room(index, len(layer.k) // layer.head_dim, layer.head_dim, x)
            self.ops.decoder_layer(layer, going, keys.numpy(), values.numpy())
        return x.view_as(states), dict(zip(taps, torch.from_numpy(tapped).view(-1, *states.shape), strict=True))

    def multiplies(self, states: torch.Tensor, weight: torch.Tensor) -> bool:
        return states.shape[0] * states.shape[1] <= MOST_TOKENS and _plain((weight, states), torch.float32, CPU)

    def linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(n, q, hidden), (m, hidden) -> (n, q, m)"""
        found = self.ops.linear(states.flatten(0, 1).numpy(), weight.detach().numpy())
        return torch.from_numpy(found).view(*states.shape[:2], -1)

    def int8_head(self, weight: torch.Tensor, vocabulary: torch.Tensor | None) -> Int8LMHead | None:
        """Norm and LM head as exits use them; made anew where the weight was changed."""
        exits = compiled_exits(weight.device, weight.dtype)
        if exits is None or self.norm is None:
            return None
        kept, now = self._int8, (id(weight), weight.data_ptr(), version(weight), id(vocabulary))
        if kept is None or kept[0] != now:
            head = Int8LMHead(norm_features(self.norm, weight), weight, vocabulary, exits)
            self._int8 = kept = now, head, (weight, vocabulary)  # held, so that nothing else is put where they are
        return kept[1]


def fuse(adapter: ModelAdapter) -> None:
    """Let a window run fused layers, if there is compiled code for them; on a GPU the others run in graphs.

    On a CPU they are checked at once. On a GPU compiling takes seconds, so they are checked after the first prompt.
    """
    adapter.fused = None
    adapter.why_plain = why_no_kernels(adapter.device, adapter.model.dtype)
    if adapter.why_plain is not None and adapter.why_plain == missing_compiler(adapter.device):
        _say_once(adapter.why_plain)
    ops, on_gpu = compiled_ops(adapter.device, adapter.model.dtype), adapter.device.type == "cuda"
    layers = None if ops is None else _features(adapter)
    adapter.parts = None if ops is None else ModelSnapshot(adapter.model)
    if layers is not None:
        adapter.fused = GPULayers(adapter, layers, ops, *compiled_rounds()) if on_gpu else FusedLayers(layers, ops)
    elif ops is not None and on_gpu and OwnLayers.suit(adapter) and not any(map(has_hooks, adapter.model.modules())):
        adapter.fused = OwnLayers(adapter, ops, compiled_rounds()[0])
    elif ops is not None:
        adapter.why_plain = _why_not_fused(adapter)
    if adapter.fused is not None and not on_gpu:
        with _saying_what_takes_so_long():
            check_fused(adapter)


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("no compiled layers: %s", reason)


def _why_not_fused(adapter: ModelAdapter) -> str:
    if any(map(has_hooks, adapter.model.modules())):
        return "there are hooks on its modules, which compiled layers would not call"
    kinds = sorted({type(layer).__name__ for layer in adapter.layers})
    return f"there is no compiled layer for {', '.join(kinds)} as it is here"


@contextmanager
def _saying_what_takes_so_long() -> Iterator[None]:
    said = "preparing compiled layers (may take a minute the first time on a machine)"
    note = threading.Timer(PATIENCE, print, [said], {"file": sys.stderr})
    note.start()
    try:
        yield
    finally:
        note.cancel()


def check_fused(adapter: ModelAdapter) -> None:
    """Use fused layers, or rounds of a model's own, from now on, if they give what the model gives."""
    adapter.fused.is_checked = True
    try:
        wrong = _what_is_wrong(adapter)
    except Exception as problem:  # compilers refuse cards, dtypes and sizes in many ways
        wrong = f"{type(problem).__name__}: {problem}"
    if wrong is not None:
        adapter.fused, adapter.why_plain = None, wrong
        logger.warning("%s runs as it is, without compiled layers or graphs: %s", type(adapter.model).__name__, wrong)
    elif not isinstance(adapter.fused, OwnLayers):
        _take_short_cuts(adapter)


def _what_is_wrong(adapter: ModelAdapter) -> str | None:
    if isinstance(adapter.fused, OwnLayers):
        share, allowed = adapter.fused.difference(), TOLERANCE.get(adapter.model.dtype, TOLERANCE_HALF)
        return None if share <= allowed else f"with a static cache its states are {share:.1%} off."
    layer = first_fused_difference(adapter)
    if layer is None:
        return None
    name = type(adapter.layers[layer]).__name__
    return f"the fused layer gives other states than layer {layer} ({name}). Please report the model."


@torch.no_grad()
def _take_short_cuts(adapter: ModelAdapter) -> None:
    """Leave out the model's `forward` where embedding or norm alone give the same."""
    ids = torch.arange(3, 7, device=adapter.device)[:, None] % adapter.vocab_size
    states = adapter.run(0, 0, PassInputs(ids, torch.zeros_like(ids), None, None)).states
    logits = adapter.head(states[:, 0])
    embedding, norm = adapter.model.get_input_embeddings(), getattr(adapter.model.get_decoder(), "norm", None)
    if torch.equal(embedding(ids), states):
        adapter.fused.embedding = embedding
    if norm is not None and is_stock(norm) and adapter.plain_head is not None:
        found = adapter.fused.linear(norm(states), adapter.plain_head)
        close = 1e-4 if logits.dtype == torch.float32 else 3e-2
        if torch.allclose(found[:, 0], logits, rtol=close, atol=close * float(logits.abs().max())):
            adapter.fused.norm, adapter.fused.head = norm, adapter.plain_head


def _fused_modules(adapter: ModelAdapter) -> list[nn.Module]:
    tops = [module for module in (*_around(adapter), *adapter.layers) if module is not None]
    return [module for top in tops for module in top.modules()]


def _around(adapter: ModelAdapter) -> list[nn.Module | None]:
    model = adapter.model
    return [model.get_input_embeddings(), model.get_output_embeddings(), getattr(model.get_decoder(), "norm", None)]


def _features(adapter: ModelAdapter) -> list[Layer] | None:
    config, model = adapter.model.config.get_text_config(decoder=True), adapter.model
    if any(has_hooks(module) for module in _fused_modules(adapter)):
        return None
    found = [layer_features(layer, config) for layer in adapter.layers]
    whole = [layer for layer in found if layer is not None]
    return whole if len(whole) == len(found) and all(_plain(layer, model.dtype, adapter.device) for layer in whole) else None


def _plain(values: Iterable[Any], dtype: torch.dtype, device: torch.device) -> bool:
    tensors = [value for value in values if isinstance(value, torch.Tensor) and len(value)]
    kinds = torch.Tensor, nn.Parameter  # not the tensors of quantization
    return all(type(x) in kinds and x.dtype == dtype and x.device == device and x.is_contiguous() for x in tensors)
