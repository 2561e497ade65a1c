"""The slots of rows: which row has which. There are slots for 1, 2, 4, … rows; with more rows than they hold, or with less than
half of them, rows go on in others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from TIDE.engine.cache.slots import Slots, slots_for
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device_pool import DevicePool
from TIDE.routing.exits import Exit

FEW = 8  # slots
SOME = 16  # tokens for which rows move to slots with trees
SOME_MORE = 64  # and from trees to larger ones
FIRST_ROOM = 1024  # new tokens that slots have columns for before they are replaced by wider ones


class SlotAllocator:
    """Gives rows the lowest free slots.

    Args:
        ahead: positions beyond the text that rounds which were launched and the next ones may write.
        trees: drafts of a tree by the slots that have trees; rows draft more there than on others.

    Attributes:
        places: the row on each slot that has one.
    """

    def __init__(self, pool: DevicePool, exit_: Exit | None, ahead: int, trees: Mapping[int, int] | None = None) -> None:
        self.pool = pool
        self.exit = exit_
        self.ahead = ahead
        self.trees = trees or {}
        self.places: dict[int, Row] = {}
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        assert self._slots is not None, "no row has joined"
        return self._slots

    @property
    def is_oversized(self) -> bool:
        """True if half of the slots would do. A few are as quick as one, and graphs for others take time to make; but the last
        rows of several go to slots that are quicker, if those were used before and one of the rows has some way to go."""
        rows = self.places.values()
        if self.slots.rows > FEW:
            return self.slots.rows >= 2 * len(rows)
        some = SOME_MORE if self.slots.rows in self.trees else SOME
        return max(row.stop.room(row) for row in rows) > some and self._may_go_to_fewer(rows)

    def _may_go_to_fewer(self, rows: Collection[Row]) -> bool:
        """Return True if rows have larger trees on slots that just hold them than on those at hand. Where rows are decoded such
        slots must have been used before."""
        slots, drafts = slots_for(len(rows)), self.trees
        if self._slots is None or slots >= self.slots.rows or drafts.get(slots, 0) <= drafts.get(self.slots.rows, 0):
            return False
        return not self.places or self.pool.has_free(slots, max(map(self._columns, rows)), self.exit)

    def make_room(self, rows: Collection[Row]) -> None:
        """Have slots for rows that are about to join, and those that are there."""
        together = [*self.places.values(), *rows]
        self._move(len(together), max(map(self._columns, together)), self._may_go_to_fewer(together))

    def make_room_for(self, rows: int, tokens: int) -> None:
        """Have slots for `rows` rows, whose texts have `tokens` tokens at first, before any joins."""
        self._move(rows, tokens + FIRST_ROOM + self.ahead)

    def take(self, row: Row) -> int:
        """Give a row a slot."""
        row.slot = min(set(range(self.slots.rows)) - self.places.keys())
        self.places[row.slot] = row
        return row.slot

    def write_blocks(self, row: Row, first: int, blocks: list[int]) -> None:
        """Note the blocks of a row from its number `first` on."""
        self.slots.write_blocks(row.slot, first, blocks)

    def free(self, row: Row) -> None:
        del self.places[row.slot]
        self.slots.clear(row.slot)

    def shrink(self) -> None:
        """Go on in as few slots as hold the rows."""
        self._move(len(self.places), max(map(self._columns, self.places.values())), is_fewer=True)

    def widen(self) -> bool:
        """Go on in slots with more columns if a text is about to need them; return True if so."""
        rows = self.places.values()
        if max((row.size for row in rows), default=0) + self.ahead <= self.slots.columns:
            return False
        self._move(self.slots.rows, max(map(self._columns, rows)))
        return True

    def _move(self, rows: int, columns: int, is_fewer: bool = False) -> None:
        """Have slots for `rows` rows and `columns` columns; `is_fewer`: not more of them, even if they are few."""
        old = self._slots
        rows = slots_for(rows)
        if old is not None and rows < old.rows <= FEW and not is_fewer:
            rows = old.rows
        if old is not None and old.rows == rows and old.columns >= columns:
            return
        new = self._slots = self.pool.acquire(rows, columns, self.exit)
        if old is None:
            for place in range(new.rows):
                new.clear(place)
            return
        order = sorted(self.places)
        new.take_over(old, order)
        self.places = {place: self.places[was] for place, was in enumerate(order)}
        for place, row in self.places.items():
            row.slot = place
        self.pool.release(old)

    def _columns(self, row: Row) -> int:
        return row.size + min(row.stop.room(row), FIRST_ROOM) + self.ahead

    def close(self) -> None:
        """Give the slots back."""
        if self._slots is not None:
            self.pool.release(self._slots)
            self._slots = None

    def forget(self) -> None:
        """Give the slots up after an error, with their graphs."""
        self.places.clear()
        if self._slots is not None:
            self.pool.graphs.drop(self._slots)
            self.pool.drop_prompts(self.exit)
            self._slots = None
