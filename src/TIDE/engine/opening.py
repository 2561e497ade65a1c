"""The opening of a request in rounds: its text so far into a circuit, and the full model's next token.

The model's own layers run the text, padded behind its end to one of a few lengths so that a graph can be replayed. Nothing
sees what stands there, and rounds overwrite it. What a memory head keeps of the text is made in the same pass. An opening ends
as a round without drafts does.
"""

from __future__ import annotations

import torch

from TIDE.adapters.window import Feed, Window
from TIDE.engine.circuit import Circuit, Memory
from TIDE.routing.heads import input_depths, memory_depths, seen_depths

FEWEST = 32  # more than fused layers take
LONGEST = 2048  # tokens of a text whose opening is captured; a longer one keeps the device busy anyway


def padded(tokens: int) -> int:
    """The length that a text is padded to. There are four to each doubling."""
    if tokens > LONGEST:
        return tokens
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return max(FEWEST, -(-tokens // step) * step)


class Opening:
    """Takes texts into a circuit whose exit is at a depth."""

    def __init__(self, window: Window, circuit: Circuit, depth: int) -> None:
        self.window = window
        self.circuit = circuit
        self.depth = depth

    def run(self, text: torch.Tensor) -> bool:
        """Take (n,) ids into the circuit; whether that was as quick as it will be from now on."""
        tokens, width = len(text), padded(len(text))
        self.circuit.text[:tokens].copy_(text)
        self.circuit.stand_at(tokens - 1)
        if tokens > LONGEST:
            self._open(width)
            return True
        return self.circuit.openings.run(width, lambda: self._open(width))

    def _open(self, width: int) -> None:
        circuit, window, last = self.circuit, self.window, self.window.num_layers
        cache = circuit.cache(window.stores, circuit.columns)
        feed = Feed(circuit.text[None, :width], circuit.positions[None, :width], None, cache)
        with cache.open(0, [0], [width]):
            passed = window.run(0, last, feed, taps=tuple(depth for depth in self._seen() if depth < last))
        if circuit.memory is not None:
            states = passed.taps | {last: passed.states}
            self._remember(circuit.memory, {depth: own[0] for depth, own in states.items()}, width)
        newest = passed.states[0].index_select(0, circuit.starts[:1])
        window.fused.choose(newest, circuit.found[:1], circuit.best[:1])
        result = circuit.starts, circuit.scores, circuit.out
        window.fused.exits.accept(circuit.found, circuit.best, circuit.tokens, *result, 0, 0.0, True)
        if circuit.memory is not None:
            circuit.memory.fed.copy_(circuit.starts[:1])

    def _seen(self) -> list[int]:
        """Depths that a memory head sees."""
        memory = self.circuit.memory
        return [] if memory is None else seen_depths(self.depth, self.window.num_layers, memory.head.sizes)

    def _remember(self, memory: Memory, states: dict[int, torch.Tensor], width: int) -> None:
        head, sizes = memory.head, memory.head.sizes
        deep = [states[depth] for depth in memory_depths(self.window.num_layers, sizes.memories)]
        memory.before[1 : width + 1] = head.remember(torch.cat(deep, -1))
        shallow = torch.cat([states[depth] for depth in input_depths(self.depth, sizes.inputs)], -1)
        x = head.enter(shallow[None], memory.before[None, :width])
        keys, values = head.keys_and_values(x, self.circuit.positions[None, :width])
        memory.keys[:, :, :width] = keys
        memory.values[:, :, :width] = values
