"""Slots and stores of a device, taken by requests and given back: what was captured on them serves those that come later.
Single blocks are taken from a store and given back to it: see `cache/kv_blocks.py`."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from TIDE.engine.cache.kv_blocks import KVBlocks
from TIDE.engine.cache.prefill_buffers import ROWS, Prompts
from TIDE.engine.cache.slots import Slots
from TIDE.engine.runners.graphs import GraphPool
from TIDE.routing.exits import Exit

COLUMNS = 1024  # of the smallest slots; others have twice as many, and so on
MARGIN = 0.1  # of a device's memory, that K/V leave free; half of it where less than that is free
MOST_BLOCKS = 1 << 20


class Maker(Protocol):
    """A runner, which knows the shapes."""

    @property
    def device(self) -> torch.device: ...

    def make_store(self, exit_: Exit | None) -> KVBlocks: ...

    def make_slots(self, rows: int, columns: int, exit_: Exit | None) -> Slots: ...


class DevicePool:
    """Slots, and K/V by the exit that drafts for their rows.

    Args:
        graphs: what was captured on slots is given up with them.
    """

    def __init__(self, runner: Maker, graphs: GraphPool) -> None:
        self._runner: Maker = weakref.proxy(runner)  # a runner that is dropped lets its model go at once
        self.device = runner.device
        self.graphs = graphs
        self.stores: list[tuple[Exit | None, KVBlocks]] = []
        self.free_slots: list[Slots] = []  # that wait for their next rows
        self._prompts: list[tuple[Exit | None, Prompts]] = []
        self._acquired: weakref.WeakSet[Slots] = weakref.WeakSet()

    def store(self, exit_: Exit | None) -> KVBlocks:
        """Return the K/V of all rows that an exit drafts for."""
        found = next((store for known, store in self.stores if known is exit_), None)
        if found is None:
            found = self._runner.make_store(exit_)
            self.stores.append((exit_, found))
        return found

    @property
    def use(self) -> tuple[float, float]:
        """GiB of blocks that rows have, and of all that are allocated."""
        stores = [store for _, store in self.stores]
        taken = sum((store.blocks - 1 - store.free) * store.block_bytes for store in stores)
        return taken / 2**30, sum(store.blocks * store.block_bytes for store in stores) / 2**30

    def most_blocks(self, store: KVBlocks, cache_gib: float | None, alone: bool = False) -> int:
        """Return how many blocks K/V may have: by their budget, or by what is free. K/V of other exits that no row uses count
        as free.

        Args:
            alone: as if no other K/V were in use.
        """
        others = [own for _, own in self.stores if own is not store]
        used = 0 if alone else sum(own.block_bytes * own.blocks for own in others if not self._is_idle(own))
        if cache_gib is not None:
            free = cache_gib * 2**30 - used
        elif self.device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = max(free - MARGIN * whole, free / 2) + store.block_bytes * store.blocks
            free += sum(own.block_bytes * own.blocks for own in others) - used
        else:
            return MOST_BLOCKS
        return max(2, min(MOST_BLOCKS, int(free // store.block_bytes)))

    def _is_idle(self, store: KVBlocks) -> bool:
        return store.free == store.blocks - 1 and all(slots.store is not store for slots in self._acquired)

    def grow(self, store: KVBlocks, blocks: int, cache_gib: float | None) -> None:
        """Give K/V more blocks. Graphs know their old addresses, so they are made again. Others that no row uses are given up
        where there is no room beside them."""
        idle = [(exit_, own) for exit_, own in self.stores if own is not store and self._is_idle(own)]
        beside = self.most_blocks(store, cache_gib) - sum(own.block_bytes * own.blocks for _, own in idle) // store.block_bytes
        if blocks > beside:
            for exit_, own in idle:
                self._drop_store(exit_, own)
        for slots in [own for own in self.graphs.of if own.store is store]:
            self.graphs.drop(slots)
        store.grow(blocks)

    def _drop_store(self, exit_: Exit | None, store: KVBlocks) -> None:
        self.drop_prompts(exit_)
        for slots in [own for own in self.free_slots if own.store is store]:
            self.free_slots.remove(slots)
            self.graphs.drop(slots)
        self.stores.remove((exit_, store))

    def acquire(self, rows: int, columns: int, exit_: Exit | None) -> Slots:
        """Return slots with room for `rows` rows and `columns` columns, which have to be released."""
        alike = [slots for slots in self.free_slots if slots.drafts.exit is exit_ and slots.rows == rows]
        found = next((slots for slots in alike if slots.columns >= columns), None)
        if found is not None:
            self.free_slots.remove(found)
            self._acquired.add(found)
            return found
        for slots in alike:  # too narrow for what is asked now
            self.free_slots.remove(slots)
            self.graphs.drop(slots)
        made = self._runner.make_slots(rows, _rounded(columns), exit_)
        self._acquired.add(made)
        return made

    def has_free(self, rows: int, columns: int, exit_: Exit | None) -> bool:
        """Return True if there are such slots already, with what was captured on them."""
        return any(slots.drafts.exit is exit_ and slots.rows == rows and slots.columns >= columns for slots in self.free_slots)

    def prompts(self, exit_: Exit | None, columns: int) -> Prompts:
        """Return buffers for texts of up to `columns` tokens, on slots that no row is decoded on."""
        found = next((prompts for known, prompts in self._prompts if known is exit_), None)
        if found is None or found.slots.columns < columns:
            self.drop_prompts(exit_)
            found = Prompts(self._runner.make_slots(ROWS, _rounded(columns), exit_))
            self._prompts.append((exit_, found))
        return found

    def drop_prompts(self, exit_: Exit | None) -> None:
        """Give up buffers for texts, and what was captured on them."""
        for known, prompts in list(self._prompts):
            if known is exit_:
                self._prompts.remove((known, prompts))
                self.graphs.drop(prompts.slots)

    def release(self, slots: Slots) -> None:
        """Take slots back, for rows that come later."""
        self._acquired.discard(slots)
        self.free_slots.append(slots)


def _rounded(columns: int) -> int:
    return max(COLUMNS, 1 << (columns - 1).bit_length())
