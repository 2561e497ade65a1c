"""Prefill of families without compiled layers: the text in one pass of the model's modules, padded to one of some lengths.

Such a family has one row, and one block with room for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from TIDE.adapters.adapter import PassInputs
from TIDE.engine.cache.slots import MemoryBuffers, Slots
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.prefill import Entering
from TIDE.kernels.transfer import write

SHORTEST = 32  # tokens of a pass
LONGEST = 2048  # tokens of a pass that is captured; a longer one keeps the device busy anyway


def padded_length(tokens: int) -> int:
    """Return the length that a text is padded to. There are four to each doubling."""
    if tokens > LONGEST:
        return tokens
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return max(SHORTEST, -(-tokens // step) * step)


class ModulePrefill:
    """Takes the text of the only row into its slot.

    Args:
        depth: of the exit.
    """

    def __init__(self, runner: DeviceRunner, slots: Slots, depth: int) -> None:
        self.runner = runner
        self.slots = slots
        self.depth = depth

    def run(self, entering: Sequence[Entering], columns: int, others_wait: bool) -> bool:
        """Run the text; return True if that was as fast as it will be from now on."""
        (own,) = entering
        width, own.done = padded_length(own.target), own.target
        write(self.slots.inputs.text[0, : own.target], torch.tensor(own.text))
        own.row.stats.layers_run += width * self.runner.num_layers
        if width > LONGEST:
            self._through(width)
            return True
        return self.runner.graphs.launch(self.slots, ("modules", width), lambda: self._through(width))

    def run_nothing(self, count: int) -> None:
        """Run a pass of `count` tokens that are nobody's; it is captured then."""
        self.runner.graphs.launch(self.slots, ("modules", count), lambda: self._through(count))

    def _through(self, width: int) -> None:
        slots, last = self.slots, self.runner.num_layers
        memory, seen = slots.memory, set[int]()
        if memory is not None:
            seen = {depth for own in memory.head.seen(self.depth, last) for depth in own}
        cache = slots.cache(self.runner.adapter.stores, slots.columns)
        inputs = PassInputs(slots.inputs.text[:, :width], slots.inputs.positions[None, :width], None, cache)
        with cache.open(0, [0], [width]):
            passed = self.runner.adapter.run(0, last, inputs, taps=tuple(depth for depth in seen if depth < last))
        if memory is not None:
            states = {depth: own[0] for depth, own in passed.taps.items()} | {last: passed.states[0]}
            self._remember(memory, states, width)

    def _remember(self, memory: MemoryBuffers, states: dict[int, torch.Tensor], width: int) -> None:
        """Let a head that remembers see the text."""
        head, store = memory.head, self.slots.store
        seen = head.seen(self.depth, self.runner.num_layers)
        shallow, deep = (torch.cat([states[depth] for depth in depths], -1) for depths in seen)
        store.before[1 : width + 1] = head.remember(deep[None])[0]
        x = head.enter(shallow[None], store.before[None, :width])
        for table, own in zip(
            (store.keys[-1], store.values[-1]), head.keys_and_values(x, self.slots.inputs.positions[None, :width]), strict=True
        ):
            table[0, :, :width] = own[0]
