"""Blocks of rows: which row has which blocks of K/V, and how many there may be.

A row takes blocks for its text when it joins, and more as it grows. Memory for blocks is taken when it is needed, in steps that
double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

from TIDE.engine.cache.kv_blocks import BLOCK, KVBlocks
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device_pool import DevicePool
from TIDE.routing.exits import Exit

FIRST_BLOCKS = 17  # of K/V, before they grow
FIRST_GIB = 1.0  # and on a GPU

Write = Callable[[Row, int, list[int]], None]  # puts blocks into a row's table, from a number on


class BlockManager:
    """The blocks of rows that share one store.

    Args:
        cache_gib: of K/V at most; None: what is free.
        ahead: positions beyond the text that rounds which were launched and the next ones may write.
        write: called when a row that is on its slot gets a block.

    Attributes:
        of: the blocks of each row, in the order of joining.
    """

    def __init__(self, pool: DevicePool, exit_: Exit | None, cache_gib: float | None, ahead: int, write: Write) -> None:
        self.pool = pool
        self.exit = exit_
        self.cache_gib = cache_gib
        self.ahead = ahead
        self.write = write
        self.of: dict[Row, list[int]] = {}

    @property
    def store(self) -> KVBlocks:
        return self.pool.store(self.exit)

    @property
    def most(self) -> int:
        """Blocks that there may be."""
        return self._most_free if self.cache_gib is None else self.pool.most_blocks(self.store, self.cache_gib)

    @cached_property
    def _most_free(self) -> int:
        return self.pool.most_blocks(self.store, None)

    @property
    def available(self) -> int:
        """Blocks that rows may still take."""
        return self.store.free + self.most - self.store.blocks

    def needed(self, row: Row) -> int:
        return self.store.needed(row.size + self.ahead)

    def fitting(self, rows: Sequence[Row]) -> int:
        """Return how many of these rows, from the first on, find blocks for their texts, and one more for each row that is
        there, so that it does not have to leave soon."""
        if not self.of:
            self.__dict__.pop("_most_free", None)  # there may be more by now
        free = self.available
        for count, row in enumerate(rows):
            free -= self.needed(row)
            if free < len(self.of) + count:
                return count
        return len(rows)

    def why_never(self, row: Row) -> str | None:
        """Return why a row has no room even where there is no other; None: it has."""
        if self.needed(row) < self.pool.most_blocks(self.store, self.cache_gib, alone=True):
            return None
        gib = self.most * self.store.block_bytes / 2**30
        return (
            f"a text of {row.size} tokens needs more K/V than the {gib:.2g} GiB there are for it. Give the cache more "
            f"(cache_gib), or shorten the text. The engine stays usable."
        )

    def begin(self, row: Row) -> list[int]:
        """Return the blocks of a row that joins, none yet; there is room for those it needs."""
        self._grow_store(self.needed(row))
        self.of[row] = []
        return self.of[row]

    def fill(self, row: Row) -> None:
        """Take the blocks that a row lacks for its text."""
        blocks = self.of[row]
        blocks += self.store.take(self.needed(row) - len(blocks))

    def extend(self, row: Row) -> bool:
        """Take the blocks that a row needs next; return False if there are too few."""
        blocks = self.of[row]
        if row.size + self.ahead <= len(blocks) * BLOCK:
            return True
        if (missing := self.needed(row) - len(blocks)) > self.available:
            return False
        self._grow_store(missing)
        first = len(blocks)
        blocks += self.store.take(missing)
        self.write(row, first, blocks[first:])
        return True

    def put(self, row: Row, number: int, block: int) -> None:
        """Let a row have a block that is there already, in place of its own one if it has one."""
        blocks = self.of[row]
        if number == len(blocks):
            blocks.append(block)
            return
        self.store.give_back([blocks[number]])
        blocks[number] = block
        self.write(row, number, [block])

    def free(self, row: Row) -> None:
        """Give a row's blocks back."""
        self.store.give_back(self.of.pop(row))

    def grow(self, rows: int, tokens: int) -> None:
        """Have blocks for `rows` rows of `tokens` tokens, but not more than a quarter of all that there may be."""
        self._grow_store(min(rows * self.store.needed(tokens + self.ahead), self.most // 4))

    def _grow_store(self, count: int) -> None:
        store = self.store
        if count <= store.free:
            return
        some = int(FIRST_GIB * 2**30 / store.block_bytes) if store.like.is_cuda else 0  # for texts that come again
        first = max(FIRST_BLOCKS, min(some, self.most // 4))
        self.pool.grow(store, min(self.most, max(first, 2 * store.blocks, store.blocks + count)), self.cache_gib)


class WholeSlot:
    """The K/V of families that run through their own modules: one row, which has all columns of its slot."""

    def __init__(self) -> None:
        self.of: dict[Row, list[int]] = {}

    def fitting(self, rows: Sequence[Row]) -> int:
        return len(rows)

    def why_never(self, row: Row) -> str | None:
        return None

    def begin(self, row: Row) -> list[int]:
        self.of[row] = [0]
        return self.of[row]

    def fill(self, row: Row) -> None:
        """Its one block is there."""

    def extend(self, row: Row) -> bool:
        return True

    def free(self, row: Row) -> None:
        del self.of[row]

    def grow(self, rows: int, tokens: int) -> None:
        """There is nothing to grow."""
