"""The decoder layers of a Llama-like model on a GPU, run by Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.features import norm_features
from TIDE.engine.cache.slots import KVShape, Slots, Turns
from TIDE.engine.runners.base import RoundLayers
from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass
from TIDE.routing.exits import Exit


class GPULayers(RoundLayers):
    """What `FusedLayers` is on a CPU."""

    writes_skipped_kv = True

    def __init__(self, adapter: ModelAdapter, layers: list[Layer], ops: Any, exits: Any, propagate: Any) -> None:
        super().__init__(adapter, ops, exits)
        self.layers = layers
        self.propagate = propagate
        self.head: torch.Tensor | None = None  # the weight of the LM head; comes with the norm
        self.rotary = getattr(adapter.model.get_decoder(), "rotary_emb", None)
        self.is_constant = adapter.rope.switches_at is None

    @property
    def has_rounds(self) -> bool:
        """Whether whole rounds can run on the device; not before the layers were checked."""
        return self.is_checked and self.rotary is not None and self.is_constant and self.without_rounds is None

    def through(
        self, slots: Slots, span: range, states: torch.Tensor, own: slice, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Take tokens of a round through layers: their (n, hidden) states change. Those at the depths of `taps` are shown."""
        assert slots.turns is not None
        going = slots.going(states, own, slots.turns)
        for index in span:
            self.ops.decoder_layer(self.layers[index], going, slots.keys[index], slots.values[index], most)
            if index + 1 in taps:
                yield index + 1, states

    def choose(
        self,
        states: torch.Tensor,
        token: torch.Tensor,
        best: torch.Tensor,
        signals: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """The tokens after (n, hidden) states at full depth, their logits, and what a router wants to know of the others."""
        if self.norm is None:
            super().choose(states, token, best, signals, vocabulary)
        else:
            normed = self.ops.norm(states, norm_features(self.norm, states))
            self.exits.best_tokens(normed, self.head, best, token, signals, vocabulary)

    def _slots(self, columns: int, exit_: Exit | None) -> Slots:
        kv_shapes = [KVShape(len(layer.k) // layer.head_dim, layer.head_dim, layer.head_dim) for layer in self.layers]
        return Slots(self.layers[0].q[0], kv_shapes, self._turns(columns), columns, exit_)

    def _turns(self, columns: int) -> Turns:
        weight = self.layers[0].q
        positions = torch.arange(columns, device=weight.device)[None]
        assert self.rotary is not None
        cos, sin = self.rotary(weight.new_zeros(1, 1, 1), positions)
        return Turns(cos[0].contiguous(), sin[0].contiguous())

    def takes(self, states: torch.Tensor, cache: Any) -> bool:
        return self.is_checked and cache is not None and states.shape[0] * states.shape[1] <= MOST_TOKENS

    def run(
        self, span: range, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: Any, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(n, q, hidden) states before a span -> those after it, and at the depths of `taps`."""
        x, tapped = states.flatten(0, 1).clone(), {}
        going = self._pass(x, states.shape, angles, cache)
        for index in span:
            if index in taps:
                tapped[index] = x.view_as(states).clone()
            keys, values = self._room(index, x, cache)
            with self.device_guard():
                self.ops.decoder_layer(self.layers[index], going, keys, values, cache.view.stop)
        return x.view_as(states), tapped

    def write_skipped_kv(
        self, span: range, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: Any
    ) -> None:
        """K/V of (n, q, hidden) states in layers that they skip."""
        x = states.flatten(0, 1).contiguous()
        going, caches = self._pass(x, states.shape, angles, cache), [self._room(index, x, cache) for index in span]
        with self.device_guard():
            self.propagate([self.layers[index] for index in span], going, caches)

    def _pass(self, x: torch.Tensor, shape: torch.Size, angles: tuple[torch.Tensor, torch.Tensor], cache: Any) -> Pass:
        rows, tokens, _ = shape
        cos, sin = (part.expand(rows, -1, -1).reshape(rows * tokens, -1).contiguous() for part in angles)
        view, own = cache.view, cache.segments[cache.view.segment]
        places = torch.tensor([*view.rows, *(own.origin[row] for row in view.rows), view.start], dtype=torch.int32)
        places = places.to(x.device, non_blocking=True)
        return Pass(x, cos, sin, places[:rows], places[rows : 2 * rows], places[-1:], tokens)

    def _room(self, index: int, x: torch.Tensor, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[index]
        found: tuple[torch.Tensor, torch.Tensor] = cache.room(index, len(layer.k) // layer.head_dim, layer.head_dim, x)
        return found

    def multiplies(self, states: torch.Tensor, weight: torch.Tensor) -> bool:
        return self.is_checked and states.shape[0] * states.shape[1] <= MOST_TOKENS

    def linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(n, q, hidden), (m, hidden) -> (n, q, m)"""
        with self.device_guard():
            return self.ops.linear(states.flatten(0, 1), weight).view(*states.shape[:2], -1)
