"""Prefill on slots: a prompt into its slot, and the full model's next token.

The model's own layers run the prompt, padded behind its end to one of a few lengths so that a graph can be replayed. Padding is
never attended to, and later rounds overwrite it. What a memory head keeps of the prompt is made in the same pass.
"""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import PassInputs
from TIDE.engine.cache.slots import Memory, Slots
from TIDE.engine.round.device_choice import DeviceChoice
from TIDE.engine.runners.device import DeviceRunner
from TIDE.routing.heads import input_depths, memory_depths, seen_depths

MIN_PREFILL = 32  # more than compiled layers take
LONGEST = 2048  # tokens of a prompt whose pass is captured; a longer one keeps the device busy anyway


def padded_length(tokens: int) -> int:
    """Return the length that a prompt is padded to. There are four to each doubling."""
    if tokens > LONGEST:
        return tokens
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return max(MIN_PREFILL, -(-tokens // step) * step)


class Prefill:
    """Takes prompts into slots whose exit is at a depth."""

    def __init__(self, runner: DeviceRunner, slots: Slots, depth: int, choice: DeviceChoice) -> None:
        self.runner = runner
        self.slots = slots
        self.depth = depth
        self.choice = choice

    def run(self, row: int, prompt: list[int]) -> bool:
        """Take a prompt into the slot of a row; return True if that was as fast as it will be from now on."""
        tokens, width = len(prompt), padded_length(len(prompt))
        self.slots.text[row, :tokens].copy_(torch.tensor(prompt))
        self.slots.stand_at(row, tokens - 1)
        if tokens > LONGEST:
            self._run(row, width)
            is_typical = True
        else:
            is_typical = self.runner.launch(self.slots, ("prefill", row, width), lambda: self._run(row, width))
        # by itself, so that prompts of a length are captured once, however their tokens are chosen
        return self.runner.launch(self.slots, ("first", row, self.choice.features), lambda: self._choose(row)) and is_typical

    def _run(self, row: int, width: int) -> None:
        slots, adapter, last = self.slots, self.runner.adapter, self.runner.num_layers
        cache = slots.cache(self.runner.stores, row, slots.columns)
        inputs = PassInputs(slots.text[row : row + 1, :width], slots.positions[None, :width], None, cache)
        with cache.open(0, [0], [width]):
            passed = adapter.run(0, last, inputs, taps=tuple(depth for depth in self._seen() if depth < last))
        if slots.memory is not None:
            states = passed.taps | {last: passed.states}
            self._remember(slots.memory, {depth: own[0] for depth, own in states.items()}, width)
        slots.newest.copy_(passed.states[0].index_select(0, slots.starts[0, row : row + 1].long()))

    def _choose(self, row: int) -> None:
        """Choose the token after the prompt."""
        slots, own = self.slots, slice(row, row + 1)
        self.choice.choose(slots.newest, self.choice.newest_of(row), slots.found[0, own], slots.best[0, own])

    def _seen(self) -> list[int]:
        """Return the depths that a memory head sees."""
        memory = self.slots.memory
        return [] if memory is None else seen_depths(self.depth, self.runner.num_layers, memory.head.sizes)

    def _remember(self, memory: Memory, states: dict[int, torch.Tensor], width: int) -> None:
        head, sizes = memory.head, memory.head.sizes
        deep = [states[depth] for depth in memory_depths(self.runner.num_layers, sizes.memories)]
        memory.before[1 : width + 1] = head.remember(torch.cat(deep, -1))
        shallow = torch.cat([states[depth] for depth in input_depths(self.depth, sizes.inputs)], -1)
        x = head.enter(shallow[None], memory.before[None, :width])
        keys, values = head.keys_and_values(x, self.slots.positions[None, :width])
        memory.keys[:, :, :width] = keys
        memory.values[:, :, :width] = values
