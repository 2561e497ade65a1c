"""Seats: which row has which slot, and which blocks.

A row that joins gets the lowest free slot and blocks for its text. Once its text has run it takes part in rounds. Slots are for
1, 2, 4, … rows: with more rows than they hold, or with less than half of them, rows go on in others. When blocks run out, the
row that joined last has to leave; it is put back and comes again later.

Whole blocks of texts that begin alike are shared: see `prefixes.py`. A row finds those that are there when it joins, and waits
for those that a row before it is about to make.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

from TIDE.engine.cache.kv_blocks import BLOCK, KVBlocks
from TIDE.engine.cache.prefix_tree import Held
from TIDE.engine.cache.slots import Slots, slots_for
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.prefill import Entering
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.exits import Exit

AHEAD = 3 * MOST_TOKENS  # positions beyond the text that rounds may write; trees need more
FIRST_BLOCKS = 17  # of K/V, before they grow
FIRST_GIB = 1.0  # and on a GPU
FEW = 8  # slots
SOME = 16  # tokens for which rows move to slots with trees
SOME_MORE = 64  # and from trees to larger ones
FIRST_ROOM = 1024  # new tokens that slots have columns for before they are replaced by wider ones


class Seats:
    """Places of rows on slots.

    Args:
        cache_gib: of K/V at most; None: what is free.
        ahead: positions beyond the text that rounds which were launched and the next ones may write.
        shares: blocks of texts that begin alike are shared; otherwise each row has its own, and others never find them.
        trees: drafts of a tree by the slots that have trees; rows draft more there than on others.
        most_rows: that are here at a time; None: as many as the runner takes.

    Attributes:
        is_short: rows were turned away for want of K/V.
    """

    def __init__(
        self,
        runner: DeviceRunner,
        exit_: Exit | None,
        cache_gib: float | None,
        ahead: int = AHEAD,
        shares: bool = True,
        trees: Mapping[int, int] | None = None,
        most_rows: int | None = None,
    ) -> None:
        self.runner = runner
        self.most_rows = runner.most_rows if most_rows is None else most_rows
        self.is_short = False
        self.exit = exit_
        self.in_blocks = runner.has_compiled_layers  # otherwise there is one row, with all columns of its slot
        self.cache_gib = cache_gib
        self.shares = shares and self.in_blocks
        self.ahead = ahead
        self.trees = trees or {}
        self.places: dict[int, Row] = {}  # by slot
        self.entering: list[Entering] = []
        self._blocks: dict[Row, list[int]] = {}  # in the order of joining
        self._held: dict[Row, Held] = {}  # the first ones of its blocks, which others may share
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        assert self._slots is not None, "no row has joined"
        return self._slots

    @property
    def most_blocks(self) -> int:
        """Blocks that there may be."""
        if self.cache_gib is None:
            return self._free_blocks
        return self.runner.most_blocks(self.store, self.cache_gib)

    @cached_property
    def _free_blocks(self) -> int:
        return self.runner.most_blocks(self.store, None)

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
        """True if half of the slots would do. A few are as quick as one, and graphs for others take time to make; but the last
        rows of several go to slots that are quicker, if those were used before and one of the rows has some way to go."""
        if self.slots.rows > FEW:
            return self.slots.rows >= 2 * len(self._blocks)
        some = SOME_MORE if self.slots.rows in self.trees else SOME
        return max(row.stop.room(row) for row in self._blocks) > some and self._may_go_to_fewer(self._blocks)

    def _may_go_to_fewer(self, rows: Collection[Row]) -> bool:
        """Return True if rows have larger trees on slots that just hold them than on those at hand. Where rows are decoded such
        slots must have been used before."""
        slots, drafts = slots_for(len(rows)), self.trees
        if self._slots is None or slots >= self.slots.rows or drafts.get(slots, 0) <= drafts.get(self.slots.rows, 0):
            return False
        return not self._blocks or self.runner.has_free(slots, max(map(self._columns, rows)), self.exit)

    def fitting(self, rows: Sequence[Row]) -> int:
        """Return how many of these rows, from the first on, can join now.

        Each must find blocks for its text, and one more for each row that is there, so that it does not have to leave soon.
        """
        if not self._blocks:
            self.__dict__.pop("_free_blocks", None)  # there may be more by now
        free = self.store.free + self.most_blocks - self.store.blocks if self.in_blocks else 0
        most = min(len(rows), self.most_rows - len(self._blocks))
        self.is_short = False
        for count in range(most):
            free -= self._needed(rows[count]) if self.in_blocks else 0
            if free < (len(self._blocks) + count if self.in_blocks else 0):
                self.is_short = True
                return count
        return most

    def join(self, rows: Sequence[Row]) -> None:
        self.runner.forget_old_kv()
        together = [*self._blocks, *rows]
        self._move(len(together), max(map(self._columns, together)), self._may_go_to_fewer(together))
        for row in rows:
            self._grow_store(self._needed(row))
            place = min(set(range(self.slots.rows)) - self.places.keys())
            row.slot = place
            self.places[place] = row
            own = Entering(row, place, [])
            self._blocks[row] = own.blocks
            if self.shares:
                self._held[row] = self.store.prefixes.begin(row.salt)
                self._find_more(own)
            own.blocks += self.store.take(self._needed(row) - len(own.blocks))
            self.store.begin(own.blocks[0])
            self.slots.write_blocks(place, 0, own.blocks)
            self.slots.stand_at(place, row.tokens[-1], len(row.tokens) - 1)
            self.entering.append(own)
        self.seat()

    def ready(self) -> list[Entering]:
        """Return the rows whose texts can run now: those that do not wait for a block that one before them makes."""
        if not self.shares:
            return [own for own in self.entering if not own.is_done]
        found, promised = [], set()
        for own in self.entering:
            self._find_more(own)
            if own.is_done:
                continue
            prefixes, held = self.store.prefixes, self._held[own.row]
            key = prefixes.key(held, own.text)
            next_block = id(prefixes.behind(held)), key
            if len(key) < BLOCK or next_block not in promised:
                found.append(own)
            promised.add(next_block)
        return found

    def seat(self) -> None:
        """Let rows whose texts have run take part in rounds, and others find what they left."""
        for own in self.entering:
            self._keep(own.row, own.text, min(own.done, len(own.text)))
        done = [own for own in self.entering if own.is_done]
        self.entering = [own for own in self.entering if not own.is_done]
        for own in done:
            self.slots.active[own.place].fill_(1)

    def has_more_to_keep(self, row: Row) -> bool:
        """Return True if a row has whole blocks of final tokens that it does not share yet."""
        held = self._held.get(row)
        if held is None or not self.store.prefixes.is_shared(held) or any(own.row is row for own in self.entering):
            return False
        return (len(row.tokens) - 1) // BLOCK > len(held.nodes)

    def keep(self, row: Row) -> None:
        """Let others find all whole blocks of a row's final tokens."""
        self._keep(row, row.tokens[:-1], len(row.tokens) - 1)

    def leave(self, row: Row) -> None:
        if self.in_blocks and isinstance(row.error, FloatingPointError):
            self.store.forget_prefixes()  # NaN may be in them
        self._give_back(row)
        del self.places[row.slot]
        self.slots.clear(row.slot)
        self.entering = [own for own in self.entering if own.row is not row]

    def _give_back(self, row: Row) -> None:
        """Give a row's blocks back: those that it alone has, and of the others those that nobody can find."""
        blocks, held = self._blocks.pop(row), self._held.pop(row, None)
        if held is not None:
            shared = len(held.nodes)
            blocks = [*self.store.prefixes.release(held), *blocks[shared:]]
        self.store.give_back(blocks)

    def _find_more(self, own: Entering) -> None:
        """Hold the blocks behind those that a row holds, as far as they are there and it has not run them itself.

        What a memory head remembers of a token lies with the place behind it, in the next block: so the last token of a block
        that was found runs again.
        """
        held, prefixes, count = self._held[own.row], self.store.prefixes, len(self._held[own.row].nodes)
        while own.done <= BLOCK * len(held.nodes) and (node := prefixes.hold_next(held, own.text)) is not None:
            self._use(own.blocks, len(held.nodes) - 1, node.block, own.row)
            own.done = BLOCK * len(held.nodes) - (self.store.head is not None)
        own.row.stats.reused_tokens += BLOCK * (len(held.nodes) - count)

    def _keep(self, row: Row, text: Sequence[int], done: int) -> None:
        """Let others find the whole blocks of a text whose first `done` tokens have run."""
        if row not in self._held or not self.store.prefixes.is_shared(self._held[row]):
            return
        held, prefixes, blocks = self._held[row], self.store.prefixes, self._blocks[row]
        while BLOCK * (len(held.nodes) + 1) <= done:
            number = len(held.nodes)
            if (node := prefixes.hold_next(held, text)) is None:
                prefixes.add(held, text, blocks[number])
            else:  # another row has made the same
                self._use(blocks, number, node.block, row)

    def _use(self, blocks: list[int], number: int, block: int, row: Row) -> None:
        """Put a block in the place of a row's own one, if it has one."""
        if number == len(blocks):
            blocks.append(block)
            return
        self.store.give_back([blocks[number]])
        blocks[number] = block
        self.slots.write_blocks(row.slot, number, [block])

    def make_room(self, rows: int, tokens: int) -> None:
        """Have slots for `rows` rows, whose texts have `tokens` tokens at first, before any joins."""
        self._move(rows, tokens + FIRST_ROOM + self.ahead)

    def grow(self, rows: int, tokens: int) -> None:
        """Have blocks for `rows` rows of `tokens` tokens, but not more than a quarter of all that there may be."""
        if self.in_blocks:
            self._grow_store(min(rows * self.store.needed(tokens + self.ahead), self.most_blocks // 4))

    def shrink(self) -> None:
        """Go on in as few slots as hold the rows."""
        self._move(len(self._blocks), max(map(self._columns, self._blocks)), is_fewer=True)

    def widen(self) -> bool:
        """Go on in slots with more columns if a text is about to need them; return True if so."""
        if max((row.size for row in self._blocks), default=0) + self.ahead <= self.slots.columns:
            return False
        self._move(self.slots.rows, max(map(self._columns, self._blocks)))
        return True

    def reserve(self) -> list[Row]:
        """Take the blocks that rounds may need next; return the rows that had to leave for it, newest first."""
        put_back: list[Row] = []
        for row in self.running:
            while row in self._blocks and not self._extend(row):
                leaves = next(reversed(self._blocks))
                if not self.can_ever_fit(row):
                    row.fail(ValueError(self.too_long(row)))
                    leaves = row
                self.leave(leaves)
                put_back.append(leaves)
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
        if self.in_blocks:
            self.store.forget_prefixes()
            for row in self.rows:
                self._give_back(row)
        self._blocks.clear()
        self.places.clear()
        self.entering = []
        if self._slots is not None:
            self.runner.drop_graphs(self._slots)
            self.runner.drop_prompts(self.exit)
            self._slots = None

    def can_ever_fit(self, row: Row) -> bool:
        """Return True if a row has room where there is no other."""
        return not self.in_blocks or self._needed(row) < self.runner.most_blocks(self.store, self.cache_gib, alone=True)

    def _extend(self, row: Row) -> bool:
        """Take the blocks that a row needs next, if there are any."""
        blocks = self._blocks[row]
        if not self.in_blocks or row.size + self.ahead <= len(blocks) * BLOCK:
            return True
        missing = self.store.needed(row.size + self.ahead) - len(blocks)
        if not self._can_have(missing):
            return False
        self._grow_store(missing)
        new = self.store.take(missing)
        self.slots.write_blocks(row.slot, len(blocks), new)
        blocks += new
        return True

    def _needed(self, row: Row) -> int:
        return self.store.needed(row.size + self.ahead) if self.in_blocks else 1

    def _can_have(self, count: int) -> bool:
        return count <= self.store.free + self.most_blocks - self.store.blocks

    def _grow_store(self, count: int) -> None:
        if count > self.store.free:
            wanted = max(self._first_blocks(), 2 * self.store.blocks, self.store.blocks + count)
            self.runner.grow(self.store, min(self.most_blocks, wanted), self.cache_gib)

    def _first_blocks(self) -> int:
        """Return how many blocks there are at first: on a GPU some for texts that come again."""
        some = int(FIRST_GIB * 2**30 / self.store.block_bytes) if self.store.like.is_cuda else 0
        return max(FIRST_BLOCKS, min(some, self.most_blocks // 4))

    def _move(self, rows: int, columns: int, is_fewer: bool = False) -> None:
        """Have slots for `rows` rows and `columns` columns; `is_fewer`: not more of them, even if they are few."""
        old = self._slots
        rows = slots_for(rows)
        if old is not None and rows < old.rows <= FEW and not is_fewer:
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

    def _columns(self, row: Row) -> int:
        return row.size + min(row.stop.room(row), FIRST_ROOM) + self.ahead
