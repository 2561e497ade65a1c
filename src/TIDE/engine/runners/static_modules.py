"""The model's own modules in CUDA graphs, for families that no compiled layer describes.

A pass of a round starts at a column that only the device knows. The cache is static for it: it writes there and always answers
with the same columns, and masks hide those that are not filled. Unlike compiled layers, modules may give other bits to a token
computed alone and to one computed among others, so in half precision near-ties may fall either way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.probe import Store
from TIDE.adapters.snapshot import ModelSnapshot
from TIDE.engine.cache.kv_blocks import KVBlocks, KVShape, draft_head
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.rows.stop import context_of
from TIDE.engine.runners.device import DeviceRunner, a_state
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.kernels.interfaces import ExitOps, LayerOps, SamplingOps
from TIDE.routing.exits import Exit

BEFORE, TOGETHER = 40, 3  # tokens of the check: of a text, and of a pass behind it


class StaticModuleRunner(ModuleRunner, DeviceRunner):
    """Runs rounds through the model's modules on a static cache; single passes as `ModuleRunner` does."""

    embedding = None

    def __init__(self, adapter: ModelAdapter, ops: LayerOps, exits: ExitOps, sampling: SamplingOps) -> None:
        super().__init__(adapter)
        self.prepare_rounds(ops, exits, sampling)
        self.snapshot = ModelSnapshot(adapter.model)
        self._kv_shapes: list[KVShape] = []

    @staticmethod
    def why_not_for(adapter: ModelAdapter) -> str | None:
        """Return why a model cannot run on a static cache; None: it can."""
        kinds = (torch.Tensor, torch.nn.Parameter)
        weights = list(adapter.model.parameters())
        if any(type(weight) not in kinds for weight in weights):
            return "its weights are quantized"
        if any(weight.device != adapter.device for weight in weights):
            return "it is spread over several devices"
        if adapter.rope.switches_at is not None:
            return "its rotary embedding changes with the length of the text"
        if not all(store is Store.KV for store in adapter.stores):
            return "some of its layers keep something else than K/V of their own"
        return None

    @property
    def words(self) -> str:
        without = self.failed or self.graphs.without
        return f"the model's own layers, without graphs: {without}" if without else "the model's own layers, in CUDA graphs"

    def why_not(self, row: Any) -> str | None:
        if os.environ.get("TIDE_NO_GRAPHS") == "1" or (self.device.type == "cuda" and self.graphs.without):
            return f"{self.graphs.without}; without graphs single passes are faster"
        return super().why_not(row)

    def layers_on_slots(
        self, slots: Slots, span: range, states: torch.Tensor, tokens: Tokens, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        columns, starts = min(most, slots.columns), tokens.positions.long()
        cache = slots.cache(self.adapter.stores, columns, static=True)
        filled = (torch.arange(columns, device=starts.device) <= starts[-1]).long()
        with cache.open_at(starts[0], len(states)):
            inputs = PassInputs(tokens.ids[None], slots.inputs.positions[None, starts], filled[None], cache)
            inside = tuple(depth for depth in taps if span.start < depth < span.stop)
            passed = self.adapter.run(span.start, span.stop, inputs, hidden=states[None], taps=inside)
        states.copy_(passed.states[0])
        for depth, found in passed.taps.items():
            yield depth, found[0]
        if span.stop in taps:
            yield span.stop, states

    def difference(self) -> float:
        """Return how far states of a static pass are from those of an ordinary one, as a share of the largest of them."""
        adapter, columns, last = self.adapter, 2 * BEFORE, self.num_layers
        ids = (torch.arange(BEFORE + TOGETHER, device=self.device) * 37 + 11) % min(adapter.vocab_size, 997)

        def run(cache: SegmentCache, start: int, stop: int) -> torch.Tensor:
            positions = torch.arange(start, stop, device=ids.device)
            with cache.open(0, [0], [stop - start]):
                return adapter.run(0, last, PassInputs(ids[None, start:stop], positions[None], None, cache)).states[0]

        with self.grad_off():
            cache = SegmentCache(1, [range(last)], self.adapter.stores, columns)
            run(cache, 0, BEFORE)
            expected = run(cache, BEFORE, BEFORE + TOGETHER)
            slots = self.make_slots(1, columns, None)
            run(slots.cache(self.adapter.stores, columns), 0, BEFORE)
            slots.stand_at(0, 0, BEFORE)
            slots.chain.tokens[:TOGETHER, 0] = ids[BEFORE:]
            tokens, states = slots.of(slice(0, TOGETHER)), slots.states[:TOGETHER]
            self.embed_on_slots(slots, tokens, states)
            list(self.layers_on_slots(slots, range(last), states, tokens, columns, ()))
        return float((states - expected).abs().max() / expected.abs().max())

    def make_slots(self, rows: int, columns: int, exit_: Exit | None) -> Slots:
        model = self.adapter.model
        if not self._kv_shapes:
            self._kv_shapes = self._measured_kv_shapes()
        like = a_state(self.adapter)
        store = KVBlocks(like, self._kv_shapes, 1, columns, draft_head(exit_))
        return Slots(store, None, rows, columns, exit_, context_of(model).limit)

    def _measured_kv_shapes(self) -> list[KVShape]:
        """Run one token, and see what layers keep of it."""
        cache = SegmentCache(1, [range(self.num_layers)], self.adapter.stores, 1)
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        with self.grad_off(), cache.open(0, [0], [1]):
            self.adapter.run(0, self.num_layers, PassInputs(ids, torch.zeros_like(ids), None, cache))
        return [KVShape(own.keys.shape[1], own.keys.shape[3], own.values.shape[3]) for own in cache.layers]
