"""The layers of a family without fused ones, in CUDA graphs: rounds run the model's own modules.

A pass of a round starts at a column that only the device knows. The cache is static for it: it writes there and always answers
with the same columns, and masks hide those that are not filled. Unlike fused layers, modules may give other bits to a token
computed alone and to one computed among others, so in half precision near-ties may fall either way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.probe import Store
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.cache.slots import KVShape, Slots
from TIDE.engine.inputs import context_of
from TIDE.engine.runners.base import RoundLayers
from TIDE.routing.exits import Exit

BEFORE, TOGETHER = 40, 3  # tokens of the check: those of a text, and some at once behind it


class OwnLayers(RoundLayers):
    """What `GPULayers` is for families with fused layers."""

    def __init__(self, adapter: ModelAdapter, ops: Any, exits: Any) -> None:
        super().__init__(adapter, ops, exits)
        self._kv_shapes: list[KVShape] = []

    @staticmethod
    def suit(adapter: ModelAdapter) -> bool:
        """Whether all that a model keeps of tokens is K/V, positions mean one thing, and weights are plain and in one place."""
        kinds, device = (torch.Tensor, torch.nn.Parameter), adapter.device
        plain = all(type(x) in kinds and x.device == device for x in adapter.model.parameters())
        return plain and adapter.rope.switches_at is None and all(store is Store.KV for store in adapter.stores)

    @property
    def has_rounds(self) -> bool:
        """Rounds without graphs would be slower than passes on an ordinary cache."""
        forbidden = os.environ.get("TIDE_NO_GRAPHS") == "1"
        return self.is_checked and not forbidden and (self.without_rounds or self.slot_pool.without_graphs) is None

    def takes(self, states: torch.Tensor, cache: Any) -> bool:
        return False

    def multiplies(self, states: torch.Tensor, weight: torch.Tensor) -> bool:
        return False

    def through(
        self, slots: Slots, span: range, states: torch.Tensor, own: slice, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Take tokens of a round through layers: their (n, hidden) states change. Those at the depths of `taps` are shown."""
        columns, starts = min(most, slots.columns), slots.starts[own].long()
        cache = slots.cache(self.adapter.stores, columns, static=True)
        filled = (slots.places[:columns] <= starts[-1]).long()
        with cache.open_at(starts[0], len(states)):
            feed = PassInputs(slots.tokens[None, own], slots.positions[None, starts], filled[None], cache)
            inside = tuple(depth for depth in taps if span.start < depth < span.stop)
            passed = self.adapter.run(span.start, span.stop, feed, hidden=states[None], taps=inside)
        states.copy_(passed.states[0])
        for depth, found in passed.taps.items():
            yield depth, found[0]
        if span.stop in taps:
            yield span.stop, states

    def difference(self) -> float:
        """How far states of a static pass are from those of an ordinary one, as a share of the largest of them."""
        adapter, columns, last = self.adapter, 2 * BEFORE, self.adapter.num_layers
        ids = (torch.arange(BEFORE + TOGETHER, device=adapter.device) * 37 + 11) % min(adapter.vocab_size, 997)

        def run(cache: SegmentCache, start: int, stop: int) -> torch.Tensor:
            positions = torch.arange(start, stop, device=ids.device)
            with cache.open(0, [0], [stop - start]):
                return adapter.run(0, last, PassInputs(ids[None, start:stop], positions[None], None, cache)).states[0]

        with adapter.grad_off():
            cache = SegmentCache(1, [range(last)], adapter.stores, columns)
            run(cache, 0, BEFORE)
            self._kv_shapes = [KVShape(own.keys.shape[1], own.keys.shape[3], own.values.shape[3]) for own in cache.layers]
            expected = run(cache, BEFORE, BEFORE + TOGETHER)
            slots, own = self._slots(columns, None), slice(0, TOGETHER)
            run(slots.cache(adapter.stores, columns), 0, BEFORE)
            slots.stand_at(BEFORE)
            slots.tokens[own] = ids[BEFORE:]
            states = slots.states[own]
            self.embed(slots, own, states)
            list(self.through(slots, range(last), states, own, columns, ()))
        return float((states - expected).abs().max() / expected.abs().max())

    def _slots(self, columns: int, exit_: Exit | None) -> Slots:
        model = self.adapter.model
        like = torch.zeros(self.adapter.hidden_dim, dtype=model.dtype, device=self.adapter.device)
        return Slots(like, self._kv_shapes, None, columns, exit_, context_of(model).limit)
