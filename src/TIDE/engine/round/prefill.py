"""The opening of a request in rounds: its text so far into a circuit, and the full model's next token.

The model's own layers run the text, padded behind its end to one of a few lengths so that a graph can be replayed. Nothing
sees what stands there, and rounds overwrite it. What a memory head keeps of the text is made in the same pass. An opening ends
as a round without drafts does.
"""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.engine.cache.slots import Memory, Slots
from TIDE.routing.heads import input_depths, memory_depths, seen_depths

FEWEST = 32  # more than fused layers take
LONGEST = 2048  # tokens of a text whose opening is captured; a longer one keeps the device busy anyway


def padded(tokens: int) -> int:
    """The length that a text is padded to. There are four to each doubling."""
    if tokens > LONGEST:
        return tokens
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return max(FEWEST, -(-tokens // step) * step)


class Prefill:
    """Takes texts into a circuit whose exit is at a depth."""

    def __init__(self, adapter: ModelAdapter, slots: Slots, depth: int) -> None:
        self.adapter = adapter
        self.slots = slots
        self.depth = depth

    def run(self, text: torch.Tensor) -> bool:
        """Take (n,) ids into the circuit; whether that was as quick as it will be from now on."""
        tokens, width = len(text), padded(len(text))
        self.slots.text[:tokens].copy_(text)
        self.slots.stand_at(tokens - 1)
        if tokens > LONGEST:
            self._open(width)
            return True
        return self.slots.prefills.run(width, lambda: self._open(width))

    def _open(self, width: int) -> None:
        slots, adapter, last = self.slots, self.adapter, self.adapter.num_layers
        cache = slots.cache(adapter.stores, slots.columns)
        feed = PassInputs(slots.text[None, :width], slots.positions[None, :width], None, cache)
        with cache.open(0, [0], [width]):
            passed = adapter.run(0, last, feed, taps=tuple(depth for depth in self._seen() if depth < last))
        if slots.memory is not None:
            states = passed.taps | {last: passed.states}
            self._remember(slots.memory, {depth: own[0] for depth, own in states.items()}, width)
        newest = passed.states[0].index_select(0, slots.starts[:1])
        adapter.fused.choose(newest, slots.found[:1], slots.best[:1])
        result = slots.starts, slots.scores, slots.out
        adapter.fused.exits.accept(slots.found, slots.best, slots.tokens, *result, 0, 0.0, True)
        if slots.memory is not None:
            slots.memory.fed.copy_(slots.starts[:1])

    def _seen(self) -> list[int]:
        """Depths that a memory head sees."""
        memory = self.slots.memory
        return [] if memory is None else seen_depths(self.depth, self.adapter.num_layers, memory.head.sizes)

    def _remember(self, memory: Memory, states: dict[int, torch.Tensor], width: int) -> None:
        head, sizes = memory.head, memory.head.sizes
        deep = [states[depth] for depth in memory_depths(self.adapter.num_layers, sizes.memories)]
        memory.before[1 : width + 1] = head.remember(torch.cat(deep, -1))
        shallow = torch.cat([states[depth] for depth in input_depths(self.depth, sizes.inputs)], -1)
        x = head.enter(shallow[None], memory.before[None, :width])
        keys, values = head.keys_and_values(x, self.slots.positions[None, :width])
        memory.keys[:, :, :width] = keys
        memory.values[:, :, :width] = values
