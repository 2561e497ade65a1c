"""Exit heads that remember, on slots: the parts of a draft in which memory heads and EAGLE-3 heads differ.

    note        what will be remembered of a token that runs all layers, from its states at some depths
    remember    the memory that this becomes, at the place of the token behind it
    enter       what the head sees of a token itself
    join        that and the memory before it, as the head's block takes them
    guess       the block, which also leaves a memory for the next draft

`MemoryHead` and `EagleHead` define in torch what is computed here by kernels. An EAGLE-3 head has a norm and an LM head of its
own too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from TIDE.engine.cache.slots import Memory, Slots, Tokens
from TIDE.engine.runners.device import DeviceRunner, LMHeadOnSlots
from TIDE.kernels.layer_steps import end_layer
from TIDE.kernels.weights import Dense
from TIDE.routing.eagle3.head import EagleHead
from TIDE.routing.heads import EPS, DraftHead, MemoryHead


class DeviceHead(ABC):
    """A head that remembers, as kernels run it.

    Attributes:
        inputs: depths at which it sees a token itself.
        depths: those whose states it remembers.
    """

    def __init__(self, runner: DeviceRunner, head: DraftHead, depth: int) -> None:
        self.runner = runner
        self.inputs, self.depths = head.seen(depth, runner.num_layers)

    @abstractmethod
    def note(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Write what will be remembered of (n, hidden) states at the depth of that number.

        Args:
            places: the rows of `out` that they go to; None: all in their order.
        """

    @abstractmethod
    def remember(self, parts: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
        """Write memories, made of what was noted of tokens, to the rows of a table that (n,) places name."""

    @abstractmethod
    def enter(
        self, number: int, table: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None
    ) -> None:
        """Write what the head sees of tokens themselves, by their states at the input of that number.

        Args:
            table, rows: as `DeviceRunner.embedded` returns them.
            places: the rows of `out` that they go to; None: all in their order.
        """

    @abstractmethod
    def join(self, joined: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return tokens as the block takes them: `joined` has what was entered, and room for the memories of a table."""

    @abstractmethod
    def guess(self, slots: Slots, tokens: Tokens, x: torch.Tensor, most: int, table: torch.Tensor, out: torch.Tensor) -> None:
        """Run the block for what `join` returned; write guesses, and to a table the memories that they stand for."""

    @abstractmethod
    def carry(self, guesses: torch.Tensor) -> None:
        """Turn guesses, in place, into the memories that they stand for."""

    def keep(self, slots: Slots, tokens: Tokens, x: torch.Tensor) -> None:
        """Write the head's K/V of tokens."""
        memory, store = _memory(slots), slots.store
        h = self.runner.ops.norm(x, memory.layer.attention_norm)
        own = slots.pass_of(x, tokens, memory.angles)
        self.runner.ops.project(memory.only_kv, own, h, store.keys[-1], store.values[-1])


class DeviceMemoryHead(DeviceHead):
    """A memory head."""

    def __init__(self, runner: DeviceRunner, head: MemoryHead, depth: int) -> None:
        super().__init__(runner, head, depth)
        self.head = head

    def note(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        self.runner.exits.normalize_into(states, None, out, EPS, places=places)

    def remember(self, parts: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
        if self.head.recall is None:
            table.index_copy_(0, places, parts)
        else:
            self.runner.exits.linear_into(parts, Dense(self.head.recall.weight), table, places)

    def enter(
        self, number: int, table: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None
    ) -> None:
        own = slice(number * out.shape[1], (number + 1) * out.shape[1])
        center, spread = self.head.shallow_center[own], self.head.shallow_spread[own]
        self.runner.exits.normalize_into(table, rows, out, EPS, center, spread, places)

    def join(self, joined: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        head, own = self.head, joined[:, -self.head.sizes.hidden_dim :]
        self.runner.exits.normalize_into(table, places, own, EPS, head.deep_center, head.deep_spread)
        found: torch.Tensor = self.runner.ops.linear(joined, Dense(head.fuse.weight))
        return found

    def guess(self, slots: Slots, tokens: Tokens, x: torch.Tensor, most: int, table: torch.Tensor, out: torch.Tensor) -> None:
        memory, store = _memory(slots), slots.store
        own = slots.pass_of(x, tokens, memory.angles)
        self.runner.ops.decoder_layer(memory.layer, own, store.keys[-1], store.values[-1], most)
        self.runner.exits.denormalize(x, self.head.deep_center, self.head.deep_spread, tokens.after, table, out)

    def carry(self, guesses: torch.Tensor) -> None:
        """A guess is a state of full depth, as memories are."""


class DeviceEagleHead(DeviceHead):
    """An EAGLE-3 head: queries, keys and values are made of the joined inputs, and the residual stream is the memory alone."""

    def __init__(self, runner: DeviceRunner, head: EagleHead, depth: int) -> None:
        super().__init__(runner, head, depth)
        self.head = head
        self.norm = head.norm_with(head.gain)
        self.lm_head = LMHeadOnSlots(runner, (self.norm, Dense(head.lm_head.weight)))

    def note(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        gains = self.head.part_gains
        if gains is not None:
            self.runner.exits.normalize_into(states, None, out, self.head.sizes.eps, places=places, gain=gains[number])
        elif places is None:
            out.copy_(states)
        else:
            out.index_copy_(0, places, states)

    def remember(self, parts: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> None:
        if self.head.fc_gain is not None:
            parts = self.runner.ops.norm(parts, self.head.norm_with(self.head.fc_gain))
        self.runner.exits.linear_into(parts, Dense(self.head.fc.weight), table, places)

    def enter(
        self, number: int, table: torch.Tensor, rows: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None
    ) -> None:
        self.runner.exits.normalize_into(table, rows, out, self.head.sizes.eps, places=places, gain=self.head.token_gain)

    def join(self, joined: torch.Tensor, table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        own = joined[:, self.head.sizes.hidden_dim :]
        self.runner.exits.normalize_into(table, places, own, self.head.sizes.eps, gain=self.head.memory_gain)
        return joined

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

    def carry(self, guesses: torch.Tensor) -> None:
        if self.head.sizes.norm_output:
            guesses.copy_(self.runner.ops.norm(guesses, self.norm))


def device_head(runner: DeviceRunner, head: object, depth: int) -> DeviceHead | None:
    """Return a head at a depth as kernels run it, if it is one that remembers."""
    if isinstance(head, EagleHead):
        return DeviceEagleHead(runner, head, depth)
    return DeviceMemoryHead(runner, head, depth) if isinstance(head, MemoryHead) else None


def _memory(slots: Slots) -> Memory:
    assert slots.memory is not None, "these slots have no room for what a head remembers"
    return slots.memory
