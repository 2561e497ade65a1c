"""Exit heads that remember, on slots: memory heads and EAGLE-3 heads.

    capture         states of a token that runs all layers, at some depths
    remember        the memory that they become, at the place of the token behind it
    write_inputs    what the head sees of a token itself
    fuse            inputs and the memory before a token, as the head's block takes them
    guess           the block, which also leaves a memory for the next draft

`MemoryHead` and `EagleHead` define in torch what is computed here by kernels. An EAGLE-3 head has a norm and an LM head of its
own too. Tokens that a head has missed wait in the slots and are fed to it sixteen at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from TIDE.engine.cache.slots import MemoryBuffers, Slots, Tokens
from TIDE.engine.runners.device import DeviceRunner, LMHeadOnSlots
from TIDE.kernels.layer_steps import end_layer
from TIDE.kernels.weights import Dense
from TIDE.routing.eagle3.head import EagleHead
from TIDE.routing.heads import EPS, DraftHead, MemoryHead


class SlotHead(ABC):
    """A head that remembers, as kernels run it.

    Attributes:
        inputs: depths at which it sees a token itself.
        depths: those whose states it remembers.
    """

    def __init__(self, runner: DeviceRunner, head: DraftHead, depth: int) -> None:
        self.runner = runner
        self.inputs, self.depths = head.seen(depth, runner.num_layers)

    @abstractmethod
    def capture(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Write what will be remembered of (n, hidden) states at the depth of that number.

        Args:
            places: the rows of `out` that they go to; None: all in their order.
        """

    @abstractmethod
    def remember(self, captured: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
        """Write memories, made of captured states, to the rows of a table that (n,) places name."""

    @abstractmethod
    def write_input(
        self, number: int, table: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None
    ) -> None:
        """Write what the head sees of tokens themselves, by their states at the input of that number.

        Args:
            table, rows: as `DeviceRunner.embedded` returns them.
            places: the rows of `out` that they go to; None: all in their order.
        """

    @abstractmethod
    def fuse(self, inputs: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return tokens as the block takes them: `inputs` were written, with room for the memories of a table."""

    @abstractmethod
    def guess(self, slots: Slots, tokens: Tokens, x: torch.Tensor, most: int, table: torch.Tensor, out: torch.Tensor) -> None:
        """Run the block for fused inputs; write guesses, and to a table the memories that they stand for."""

    @abstractmethod
    def to_memory(self, guesses: torch.Tensor) -> None:
        """Turn guesses, in place, into the memories that they stand for."""

    def capture_at(self, depth: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Capture states at `depth` into that depth's columns of `out`."""
        number, width = self.depths.index(depth), states.shape[1]
        self.capture(number, states, out[:, number * width : (number + 1) * width], places)

    def write_inputs(
        self, slots: Slots, tokens: Tokens, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None
    ) -> None:
        """Write what the head sees of tokens with (n, hidden) states at the checkpoint."""
        width = states.shape[1]
        for number, depth in enumerate(self.inputs):
            table, rows = (states, None) if depth else self.runner.embedded(slots, tokens)
            self.write_input(number, table, rows, out[:, number * width : (number + 1) * width], places)

    def fused(self, slots: Slots, tokens: Tokens, states: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
        """Return tokens as the block takes them.

        Args:
            table: with memories at their places; None: that of the blocks.
        """
        inputs = states.new_empty(len(states), _memory(slots).entries.shape[1])
        self.write_inputs(slots, tokens, states, inputs)
        return self.fuse(inputs, slots.store.before if table is None else table, tokens.places)

    def draft(
        self,
        slots: Slots,
        tokens: Tokens,
        states: torch.Tensor,
        most: int,
        out: torch.Tensor,
        table: torch.Tensor | None = None,
    ) -> None:
        """Guess from tokens with (n, hidden) states at the checkpoint."""
        table = slots.store.before if table is None else table
        self.guess(slots, tokens, self.fused(slots, tokens, states, table), most, table, out)

    def keep(self, slots: Slots, tokens: Tokens, x: torch.Tensor) -> None:
        """Write the head's K/V of tokens."""
        memory, store = _memory(slots), slots.store
        h = self.runner.ops.norm(x, memory.layer.attention_norm)
        own = slots.pass_of(x, tokens, memory.angles)
        self.runner.ops.project(memory.only_kv, own, h, store.keys[-1], store.values[-1])

    def map_slots(self, slots: Slots, starts: torch.Tensor, places: torch.Tensor, ring: torch.Tensor) -> None:
        """Compute the slot mapping of tokens from positions on: their memories, and their rows among those that wait."""
        self.runner.exits.find_places(slots.tables, slots.grid.rows[0], starts, slots.store.size, places, ring)

    def feed(self, slots: Slots) -> None:
        """Make memories and K/V of tokens that wait: always sixteen, and those behind the newest are overwritten later."""
        memory, places, ring = _memory(slots), torch.zeros_like(slots.grid.places), torch.zeros_like(slots.grid.ring)
        self.map_slots(slots, memory.fed, places, ring)
        positions = (memory.fed + slots.grid.steps).flatten()
        ids, rows = slots.chain.tokens[:-1].flatten(), slots.grid.rows.flatten()
        tokens, waiting = Tokens(ids, rows, positions, places[:-1].flatten(), places[1:].flatten()), ring.flatten()
        self.remember(memory.parts[waiting], slots.store.before, tokens.after)
        self.keep(slots, tokens, self.fuse(memory.entries[waiting], slots.store.before, tokens.places))
        memory.fed.copy_(slots.grid.starts[0])


class SlotMemoryHead(SlotHead):
    """A memory head."""

    def __init__(self, runner: DeviceRunner, head: MemoryHead, depth: int) -> None:
        super().__init__(runner, head, depth)
        self.head = head

    def capture(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        self.runner.exits.normalize_into(states, None, out, EPS, places=places)

    def remember(self, captured: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
        if self.head.recall is None:
            table.index_copy_(0, places, captured)
        else:
            self.runner.exits.linear_into(captured, Dense(self.head.recall.weight), table, places)

    def write_input(
        self, number: int, table: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None
    ) -> None:
        own = slice(number * out.shape[1], (number + 1) * out.shape[1])
        center, spread = self.head.shallow_center[own], self.head.shallow_spread[own]
        self.runner.exits.normalize_into(table, rows, out, EPS, center, spread, places)

    def fuse(self, inputs: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        head, own = self.head, inputs[:, -self.head.sizes.hidden_dim :]
        self.runner.exits.normalize_into(table, places, own, EPS, head.deep_center, head.deep_spread)
        found: torch.Tensor = self.runner.ops.linear(inputs, Dense(head.fuse.weight))
        return found

    def guess(self, slots: Slots, tokens: Tokens, x: torch.Tensor, most: int, table: torch.Tensor, out: torch.Tensor) -> None:
        memory, store = _memory(slots), slots.store
        own = slots.pass_of(x, tokens, memory.angles)
        self.runner.ops.decoder_layer(memory.layer, own, store.keys[-1], store.values[-1], most)
        self.runner.exits.denormalize(x, self.head.deep_center, self.head.deep_spread, tokens.after, table, out)

    def to_memory(self, guesses: torch.Tensor) -> None:
        """A guess is a state of full depth, as memories are."""


class SlotEagleHead(SlotHead):
    """An EAGLE-3 head: queries, keys and values are made of the joined inputs, and the residual stream is the memory alone."""

    def __init__(self, runner: DeviceRunner, head: EagleHead, depth: int) -> None:
        super().__init__(runner, head, depth)
        self.head = head
        self.norm = head.norm_with(head.gain)
        self.lm_head = LMHeadOnSlots(runner, (self.norm, Dense(head.lm_head.weight)))

    def capture(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        gains = self.head.part_gains
        if gains is not None:
            self.runner.exits.normalize_into(states, None, out, self.head.sizes.eps, places=places, gain=gains[number])
        elif places is None:
            out.copy_(states)
        else:
            out.index_copy_(0, places, states)

    def remember(self, captured: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
        if self.head.fc_gain is not None:
            captured = self.runner.ops.norm(captured, self.head.norm_with(self.head.fc_gain))
        self.runner.exits.linear_into(captured, Dense(self.head.fc.weight), table, places)

    def write_input(
        self, number: int, table: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None
    ) -> None:
        self.runner.exits.normalize_into(table, rows, out, self.head.sizes.eps, places=places, gain=self.head.token_gain)

    def fuse(self, inputs: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        own = inputs[:, self.head.sizes.hidden_dim :]
        self.runner.exits.normalize_into(table, places, own, self.head.sizes.eps, gain=self.head.memory_gain)
        return inputs

    def guess(self, slots: Slots, tokens: Tokens, x: torch.Tensor, most: int, table: torch.Tensor, out: torch.Tensor) -> None:
        memory, sizes, ops = _memory(slots), self.head.sizes, self.runner.ops
        layer, keys, values = memory.layer, slots.store.keys[-1], slots.store.values[-1]
        state = x[:, sizes.hidden_dim :].contiguous() if sizes.norm_before_residual else table[tokens.places]
        own = slots.pass_of(state, tokens, memory.angles)
        queries = ops.project(layer.attention, own, x, keys, values)
        seen = ops.attend(layer.attention, own, queries, keys, values, most, self.head.begins_at)
        end_layer(ops, layer, state, seen)
        table.index_copy_(0, tokens.after, ops.norm(state, self.norm) if sizes.norm_output else state)
        out.copy_(state)  # in a tree it has the rows of the table that were just written

    def to_memory(self, guesses: torch.Tensor) -> None:
        if self.head.sizes.norm_output:
            guesses.copy_(self.runner.ops.norm(guesses, self.norm))


def slot_head(runner: DeviceRunner, head: object, depth: int) -> SlotHead | None:
    """Return a head at a depth as kernels run it, if it is one that remembers."""
    if isinstance(head, EagleHead):
        return SlotEagleHead(runner, head, depth)
    return SlotMemoryHead(runner, head, depth) if isinstance(head, MemoryHead) else None


def _memory(slots: Slots) -> MemoryBuffers:
    assert slots.memory is not None, "these slots have no room for what a head remembers"
    return slots.memory
