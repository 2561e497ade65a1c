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

from TIDE.adapters.probe import Store
from TIDE.adapters.window import Feed, Window
from TIDE.engine.cache import SegmentCache
from TIDE.engine.circuit import Circuit, Room
from TIDE.engine.inputs import context_of
from TIDE.engine.round_layers import RoundLayers
from TIDE.routing.exits import Exit

BEFORE, TOGETHER = 40, 3  # tokens of the check: those of a text, and some at once behind it


class OwnLayers(RoundLayers):
    """What `GPULayers` is for families with fused layers."""

    def __init__(self, window: Window, ops: Any, exits: Any) -> None:
        super().__init__(window, ops, exits)
        self._rooms: list[Room] = []

    @staticmethod
    def suit(window: Window) -> bool:
        """Whether all that a model keeps of tokens is K/V, positions mean one thing, and weights are plain and in one place."""
        kinds, device = (torch.Tensor, torch.nn.Parameter), window.device
        plain = all(type(x) in kinds and x.device == device for x in window.model.parameters())
        return plain and window.rope.switches_at is None and all(store is Store.KV for store in window.stores)

    @property
    def has_rounds(self) -> bool:
        """Rounds without graphs would be slower than passes on an ordinary cache."""
        forbidden = os.environ.get("TIDE_NO_GRAPHS") == "1"
        return self.is_checked and not forbidden and (self.without_rounds or self.circuits.without_graphs) is None

    def takes(self, states: torch.Tensor, cache: Any) -> bool:
        return False

    def multiplies(self, states: torch.Tensor, weight: torch.Tensor) -> bool:
        return False

    def through(
        self, circuit: Circuit, span: range, states: torch.Tensor, own: slice, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Take tokens of a round through layers: their (n, hidden) states change. Those at the depths of `taps` are shown."""
        columns, starts = min(most, circuit.columns), circuit.starts[own].long()
        cache = circuit.cache(self.window.stores, columns, static=True)
        filled = (circuit.places[:columns] <= starts[-1]).long()
        with cache.open_at(starts[0], len(states)):
            feed = Feed(circuit.tokens[None, own], circuit.positions[None, starts], filled[None], cache)
            inside = tuple(depth for depth in taps if span.start < depth < span.stop)
            passed = self.window.run(span.start, span.stop, feed, hidden=states[None], taps=inside)
        states.copy_(passed.states[0])
        for depth, found in passed.taps.items():
            yield depth, found[0]
        if span.stop in taps:
            yield span.stop, states

    def difference(self) -> float:
        """How far states of a static pass are from those of an ordinary one, as a share of the largest of them."""
        window, columns, last = self.window, 2 * BEFORE, self.window.num_layers
        ids = (torch.arange(BEFORE + TOGETHER, device=window.device) * 37 + 11) % min(window.vocab_size, 997)

        def run(cache: SegmentCache, start: int, stop: int) -> torch.Tensor:
            positions = torch.arange(start, stop, device=ids.device)
            with cache.open(0, [0], [stop - start]):
                return window.run(0, last, Feed(ids[None, start:stop], positions[None], None, cache)).states[0]

        with window.grad_off():
            cache = SegmentCache(1, [range(last)], window.stores, columns)
            run(cache, 0, BEFORE)
            self._rooms = [Room(own.keys.shape[1], own.keys.shape[3], own.values.shape[3]) for own in cache.layers]
            expected = run(cache, BEFORE, BEFORE + TOGETHER)
            circuit, own = self._circuit(columns, None), slice(0, TOGETHER)
            run(circuit.cache(window.stores, columns), 0, BEFORE)
            circuit.stand_at(BEFORE)
            circuit.tokens[own] = ids[BEFORE:]
            states = circuit.states[own]
            self.embed(circuit, own, states)
            list(self.through(circuit, range(last), states, own, columns, ()))
        return float((states - expected).abs().max() / expected.abs().max())

    def _circuit(self, columns: int, exit_: Exit | None) -> Circuit:
        model = self.window.model
        like = torch.zeros(self.window.hidden_dim, dtype=model.dtype, device=self.window.device)
        return Circuit(like, self._rooms, None, columns, exit_, context_of(model).limit)
