"""Prefill on slots: everything of a row's text but its newest token, which the next round takes like any other.

    compiled layers     tokens of any rows in one pass, which has nothing but a few tokens of padding
    modules             of a long prompt, whole stretches of 128 tokens, which the model's own layers run faster; of families
                        without compiled layers the whole prompt, padded to one of a few lengths

How a token is run depends on its row alone, and compiled layers give it the same bits in any company. So a row that was put
back and comes again has the K/V that it had.
"""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import PassInputs
from TIDE.engine.cache.blocks import BLOCK
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.cache.slots import CHUNK, Memory, Slots
from TIDE.engine.round.device_drafter import DeviceDrafter
from TIDE.engine.row import Row
from TIDE.engine.runners.device import DeviceRunner
from TIDE.routing.heads import input_depths, memory_depths, seen_depths

LONG = 512  # tokens of a prompt from which on modules are faster
STRETCH = 2 * BLOCK  # modules take so many of its tokens, or twice as many, and so on
MIN_PREFILL = 32  # more than compiled layers take
LONGEST = 2048  # tokens of a pass of modules that is captured; a longer one keeps the device busy anyway


def padded_length(tokens: int) -> int:
    """Return the length that a prompt is padded to for modules alone. There are four to each doubling."""
    if tokens > LONGEST:
        return tokens
    step = 1 << max(0, (tokens - 1).bit_length() - 3)
    return max(MIN_PREFILL, -(-tokens // step) * step)


class Entering:
    """A row on its way in.

    Attributes:
        done: tokens that have run.
        target: tokens that have to.
    """

    def __init__(self, row: Row, place: int, blocks: list[int]) -> None:
        self.row = row
        self.place = place
        self.blocks = blocks
        self.text = row.tokens[:-1]
        self.done = 0

    @property
    def target(self) -> int:
        return len(self.text)

    def token(self, position: int, size: int) -> tuple[int, int, int, int, int]:
        """Return the id, row, position and both places of a token; blocks have `size` positions."""
        place, after = (self.blocks[at // size] * size + at % size for at in (position, position + 1))
        return self.text[position], self.place, position, place, after

    @property
    def is_done(self) -> bool:
        return self.done == self.target


class Prefill:
    """Takes texts into slots.

    Args:
        depth: of the exit.
    """

    def __init__(self, runner: DeviceRunner, slots: Slots, depth: int, drafter: DeviceDrafter | None) -> None:
        self.runner = runner
        self.slots = slots
        self.depth = depth
        self.drafter = drafter
        self.prompts = slots.prompts

    def run(self, entering: list[Entering], most: int) -> bool:
        """Run one pass of what the first of these rows need; return True if that was as fast as it will be from now on.

        Args:
            most: no row has more tokens.
        """
        first = entering[0]
        if count := self._by_modules(first):
            return self._run_modules(first, count)
        given: list[tuple[int, int, int, int, int]] = []
        for own in entering:
            if len(given) == CHUNK or self._by_modules(own):
                break
            stop = min(own.target, own.done + CHUNK - len(given))
            given += [own.token(position, self.slots.store.size) for position in range(own.done, stop)]
            own.row.stats.layers_run += (stop - own.done) * self.runner.num_layers
            own.done = stop
        count = self.prompts.write(given)
        return self.runner.launch(self.slots, ("prompts", count, most), lambda: self._run_compiled(count, most))

    def _by_modules(self, own: Entering) -> int:
        """Return how many tokens modules take of a row that is about to begin."""
        if own.done:
            return 0
        if not self.runner.has_compiled_layers:
            return own.target
        return (own.row.prompt - 1) // STRETCH * STRETCH if own.row.prompt > LONG else 0

    def _run_compiled(self, count: int, most: int) -> None:
        slots, drafter, last = self.slots, self.drafter, self.runner.num_layers
        tokens = self.prompts.first(count)
        states = slots.like.new_empty(count, len(slots.like))
        self.runner.embed_on_slots(slots, tokens, states)
        if drafter is None:
            for _ in self.runner.layers_on_slots(slots, range(last), states, tokens, most, ()):
                pass
            return
        noted = None if slots.memory is None else states.new_empty(count, slots.memory.seen)
        drafter.through(range(self.depth), states, tokens, most, noted)
        deep = states.clone()
        drafter.through(range(self.depth, last), deep, tokens, most, noted)
        if noted is not None:
            drafter.remember_prompt(tokens, states, noted)

    def _run_modules(self, own: Entering, count: int) -> bool:
        width = padded_length(count) if self.slots.store.is_dense else count
        self.prompts.text[0, :count].copy_(torch.tensor(own.text[:count]), non_blocking=True)
        self.prompts.blocks[: len(own.blocks)].copy_(torch.tensor(own.blocks), non_blocking=True)
        own.row.stats.layers_run += width * self.runner.num_layers
        own.done = count
        if count > LONGEST:
            self._through_modules(width)
            return True
        return self.runner.launch(self.slots, ("modules", width), lambda: self._through_modules(width))

    def _through_modules(self, width: int) -> None:
        slots, last = self.slots, self.runner.num_layers
        cache = self._cache(width)
        inputs = PassInputs(self.prompts.text[:, :width], slots.positions[None, :width], None, cache)
        with cache.open(0, [0], [width]):
            passed = self.runner.adapter.run(0, last, inputs, taps=tuple(depth for depth in self._seen() if depth < last))
        if not slots.store.is_dense:
            self._write_blocks(cache, width)
        if slots.memory is not None:
            self._remember(
                slots.memory, {depth: own[0] for depth, own in passed.taps.items()} | {last: passed.states[0]}, width
            )

    def _cache(self, width: int) -> SegmentCache:
        """Return a cache for one pass of one row: that of a slot, or one whose K/V are copied into blocks."""
        slots, stores = self.slots, self.runner.stores
        return (
            slots.cache(stores, slots.columns) if slots.store.is_dense else SegmentCache(1, [range(len(stores))], stores, width)
        )

    def _write_blocks(self, cache: SegmentCache, width: int) -> None:
        store = self.slots.store
        blocks = self.prompts.blocks[: width // store.size]
        for index in range(self.runner.num_layers):
            own = cache.layers[index]
            for found, table in ((own.keys, store.keys[index]), (own.values, store.values[index])):
                pieces = found[0, :, :width].unflatten(1, (len(blocks), store.size)).transpose(0, 1)
                table.index_copy_(0, blocks, pieces.contiguous())

    def _seen(self) -> list[int]:
        """Return the depths that a memory head sees."""
        memory = self.slots.memory
        return [] if memory is None else seen_depths(self.depth, self.runner.num_layers, memory.head.sizes)

    def _remember(self, memory: Memory, states: dict[int, torch.Tensor], width: int) -> None:
        """Let a memory head see the prompt."""
        head, sizes, slots = memory.head, memory.head.sizes, self.slots
        deep = torch.cat([states[depth] for depth in memory_depths(self.runner.num_layers, sizes.memories)], -1)
        shallow = torch.cat([states[depth] for depth in input_depths(self.depth, sizes.inputs)], -1)
        positions = slots.columns_ids[: width + 1]
        places = self.prompts.blocks[positions // slots.store.size] * slots.store.size + positions % slots.store.size
        before = slots.store.before
        before.index_copy_(0, places[1:], head.remember(deep[None])[0])
        x = head.enter(shallow[None], before[places[None, :-1]])
        found = head.keys_and_values(x, slots.positions[None, :width])
        for table, own in zip((slots.store.keys[-1], slots.store.values[-1]), found, strict=True):
            table[places[:-1] // slots.store.size, :, places[:-1] % slots.store.size] = own[0].transpose(0, 1)
