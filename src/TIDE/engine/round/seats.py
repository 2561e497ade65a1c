"""Seats: which row has which slot, and which blocks.

A row that joins gets the lowest free slot and blocks for its text. Once its text has run it takes part in rounds. Slots are for
1, 2, 4, … rows: with more rows than they hold, or with less than half of them, rows go on in others. When blocks run out, the
row that joined last has to leave; it is put back and comes again later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from TIDE.engine.cache.blocks import BLOCK, KVBlocks
from TIDE.engine.cache.slots import Slots, slots_for
from TIDE.engine.round.prefill import Entering
from TIDE.engine.row import Row
from TIDE.engine.runners.device import DeviceRunner
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.exits import Exit

AHEAD = 3 * MOST_TOKENS  # positions beyond the text: a round that was launched and the next one may write them
FIRST_BLOCKS = 17  # of K/V, before they grow
FEW = 8  # slots
FIRST_ROOM = 1024  # new tokens that slots have columns for before they are replaced by wider ones


class Seats:
    """Places of rows on slots.

    Args:
        cache_gib: of K/V at most; None: what is free.
    """

    def __init__(self, runner: DeviceRunner, exit_: Exit | None, cache_gib: float | None) -> None:
        self.runner = runner
        self.exit = exit_
        self.in_blocks = runner.has_compiled_layers  # otherwise there is one row, with all columns of its slot
        self.cache_gib = cache_gib
        self.places: dict[int, Row] = {}  # by slot
        self.entering: list[Entering] = []
        self._blocks: dict[Row, list[int]] = {}  # in the order of joining
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        assert self._slots is not None, "no row has joined"
        return self._slots

    @cached_property
    def most_blocks(self) -> int:
        """Blocks that there may be."""
        return self.runner.most_blocks(self.store, self.cache_gib)

    @property
    def store(self) -> KVBlocks:
        return self.runner.store(self.exit) if self.in_blocks else self.slots.store

    @property
    def rows(self) -> list[Row]:
        return list(self._blocks)

    @property
    def running(self) -> list[Row]:
        """Rows that take part in rounds."""
        if not self.entering:
            return list(self._blocks)
        entering = {own.row for own in self.entering}
        return [row for row in self._blocks if row not in entering]

    @property
    def is_wide(self) -> bool:
        """True if half of the slots would do. A few are as quick as one, and graphs for others take time to make."""
        return FEW < self.slots.rows >= 2 * len(self._blocks)

    def fitting(self, rows: Sequence[Row]) -> int:
        """Return how many of these rows, from the first on, can join now.

        Each must find blocks for its text, and one more for each row that is there, so that it does not have to leave soon.
        """
        free = self.store.free + self.most_blocks - self.store.blocks if self.in_blocks else 0
        most = min(len(rows), self.runner.most_rows - len(self._blocks))
        for count in range(most):
            free -= self._needed(rows[count]) if self.in_blocks else 0
            if free < (len(self._blocks) + count if self.in_blocks else 0):
                return count
        return most

    def join(self, rows: Sequence[Row]) -> None:
        self._move(len(self._blocks) + len(rows), max(map(_columns, [*self._blocks, *rows])))
        for row in rows:
            self._grow_store(self._needed(row))
            place = min(set(range(self.slots.rows)) - self.places.keys())
            blocks = self._blocks[row] = self.store.take(self._needed(row))
            row.slot = place
            self.places[place] = row
            self.slots.write_blocks(place, 0, blocks)
            self.slots.stand_at(place, row.tokens[-1], len(row.tokens) - 1)
            self.entering.append(Entering(row, place, blocks))
        self.seat()

    def seat(self) -> None:
        """Let rows whose texts have run take part in rounds."""
        done = [own for own in self.entering if own.is_done]
        self.entering = [own for own in self.entering if not own.is_done]
        for own in done:
            self.slots.active[own.place].fill_(1)

    def leave(self, row: Row) -> None:
        self.store.give_back(self._blocks.pop(row))
        del self.places[row.slot]
        self.slots.clear(row.slot)
        self.entering = [own for own in self.entering if own.row is not row]

    def shrink(self) -> None:
        """Go on in as few slots as hold the rows."""
        self._move(len(self._blocks), max(map(_columns, self._blocks)))

    def widen(self) -> bool:
        """Go on in slots with more columns if a text is about to need them; return True if so."""
        if max((row.size for row in self._blocks), default=0) + AHEAD <= self.slots.columns:
            return False
        self._move(self.slots.rows, max(map(_columns, self._blocks)))
        return True

    def reserve(self) -> list[Row]:
        """Take the blocks that rounds may need next; return the rows that had to leave for it, newest first."""
        put_back: list[Row] = []
        for row in self.running:
            while row in self._blocks and not self._extend(row):
                newest = next(reversed(self._blocks))
                if newest is row and len(self._blocks) == 1:
                    row.fail(ValueError(self.too_long(row)))
                self.leave(newest)
                put_back.append(newest)
        return [row for row in put_back if not row.finished]

    def too_long(self, row: Row) -> str:
        """Say that a text does not fit."""
        gib = self.most_blocks * self.store.block_bytes / 2**30
        return (
            f"a text of {row.size} tokens needs more K/V than the {gib:.2g} GiB there are for it. Give the cache more "
            f"(cache_gib), or shorten the text. The engine stays usable."
        )

    def close(self) -> None:
        """Give everything back."""
        for row in self.rows:
            self.leave(row)
        if self._slots is not None:
            self.runner.release(self._slots)
            self._slots = None

    def forget(self) -> None:
        """Give blocks back, and slots up."""
        for blocks in self._blocks.values():
            if self.in_blocks:
                self.store.give_back(blocks)
        self._blocks.clear()
        self.places.clear()
        self.entering = []
        if self._slots is not None:
            self.runner.drop_graphs(self._slots)
            self.runner.drop_prompts(self.exit)
            self._slots = None

    def can_ever_fit(self, row: Row) -> bool:
        """Return True if a row has room where there is no other."""
        return not self.in_blocks or self._needed(row) < self.most_blocks

    def _extend(self, row: Row) -> bool:
        """Take the blocks that a row needs next, if there are any."""
        blocks = self._blocks[row]
        if not self.in_blocks or row.size + AHEAD <= len(blocks) * BLOCK:
            return True
        missing = self.store.needed(row.size + AHEAD) - len(blocks)
        if not self._can_have(missing):
            return False
        self._grow_store(missing)
        new = self.store.take(missing)
        self.slots.write_blocks(row.slot, len(blocks), new)
        blocks += new
        return True

    def _needed(self, row: Row) -> int:
        return self.store.needed(row.size + AHEAD) if self.in_blocks else 1

    def _can_have(self, count: int) -> bool:
        return count <= self.store.free + self.most_blocks - self.store.blocks

    def _grow_store(self, count: int) -> None:
        if count > self.store.free:
            wanted = max(FIRST_BLOCKS, 2 * self.store.blocks, self.store.blocks + count)
            self.runner.grow(self.store, min(self.most_blocks, wanted))

    def _move(self, rows: int, columns: int) -> None:
        """Have slots for so many rows and columns."""
        old = self._slots
        rows = slots_for(rows)
        if old is not None and rows < old.rows <= FEW:
            rows = old.rows
        if old is not None and old.rows == rows and old.columns >= columns:
            return
        new = self._slots = self.runner.acquire(rows, columns, self.exit)
        if old is None:
            for place in range(new.rows):
                new.clear(place)
            return
        order = sorted(self.places)
        new.take_over(old, order)
        self.places = {place: self.places[was] for place, was in enumerate(order)}
        for place, row in self.places.items():
            row.slot = place
        for own in self.entering:
            own.place = own.row.slot
        self.runner.release(old)


def _columns(row: Row) -> int:
    return row.size + min(row.stop.room(row), FIRST_ROOM) + AHEAD
