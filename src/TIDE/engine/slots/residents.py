"""Residents: the rows that have a slot and blocks. They join, wait until their texts have run, are decoded, and leave.

A row that joins gets the lowest free slot (`allocator.py`) and blocks for its text (`block_manager.py`), of which those that
other texts begin with are shared (`prefix_sharing.py`). Once its text has run it takes part in rounds. When blocks run out, the
row that joined last has to leave; it is put back and comes again later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from TIDE.engine.cache.slots import Slots
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.allocator import SlotAllocator
from TIDE.engine.slots.block_manager import BlockManager, WholeSlot
from TIDE.engine.slots.prefill import Entering
from TIDE.engine.slots.prefix_sharing import PrefixSharing
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.exits import Exit

AHEAD = 3 * MOST_TOKENS  # positions beyond the text that rounds may write; trees need more


class Residents:
    """The rows on slots.

    Args:
        cache_gib: of K/V at most; None: what is free.
        ahead: positions beyond the text that rounds which were launched and the next ones may write.
        shares: blocks of texts that begin alike are shared; otherwise each row has its own, and others never find them.
        trees: drafts of a tree by the slots that have trees.
        most_rows: that are here at a time; None: as many as the runner takes.

    Attributes:
        is_short: rows were turned away for want of K/V.
        entering: rows whose texts have not run yet.
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
        self.exit = exit_
        self.most_rows = runner.most_rows if most_rows is None else most_rows
        self.is_short = False
        self.allocator = SlotAllocator(runner.pool, exit_, ahead, trees)
        self.blocks: BlockManager | WholeSlot = WholeSlot()
        self.sharing: PrefixSharing | None = None
        if runner.has_compiled_layers:
            self.blocks = BlockManager(runner.pool, exit_, cache_gib, ahead, self.allocator.write_blocks)
            self.sharing = PrefixSharing(self.blocks) if shares else None
        self.entering: list[Entering] = []

    @property
    def slots(self) -> Slots:
        return self.allocator.slots

    @property
    def rows(self) -> list[Row]:
        """All of them, in the order of joining."""
        return list(self.blocks.of)

    @property
    def running(self) -> list[Row]:
        """Rows that take part in rounds."""
        if not self.entering:
            return self.rows
        entering = {own.row for own in self.entering}
        return [row for row in self.blocks.of if row not in entering]

    def fitting(self, rows: Sequence[Row]) -> int:
        """Return how many of these rows, from the first on, can join now."""
        rows = rows[: max(0, self.most_rows - len(self.blocks.of))]
        count = self.blocks.fitting(rows)
        self.is_short = count < len(rows)
        return count

    def join(self, rows: Sequence[Row]) -> None:
        self.runner.forget_old_kv()
        self.allocator.make_room(rows)
        for row in rows:
            place = self.allocator.take(row)
            own = Entering(row, self.blocks.begin(row))
            if self.sharing is not None:
                self.sharing.begin(own)
            self.blocks.fill(row)
            self.slots.store.begin(own.blocks[0])
            self.slots.write_blocks(place, 0, own.blocks)
            self.slots.stand_at(place, row.tokens[-1], len(row.tokens) - 1)
            self.entering.append(own)
        self.start_ready()

    def ready(self) -> list[Entering]:
        """Return the rows whose texts can run now."""
        if self.sharing is not None:
            return self.sharing.ready(self.entering)
        return [own for own in self.entering if not own.is_done]

    def start_ready(self) -> None:
        """Let rows whose texts have run take part in rounds, and others find what they left."""
        if self.sharing is not None:
            for own in self.entering:
                self.sharing.keep(own.row, own.text, min(own.done, len(own.text)))
        for own in self.entering:
            if own.is_done:
                self.slots.control.active[own.place].fill_(1)
        self.entering = [own for own in self.entering if not own.is_done]

    def has_more_to_keep(self, row: Row) -> bool:
        """Return True if a row has whole blocks of final tokens that it does not share yet."""
        if self.sharing is None or any(own.row is row for own in self.entering):
            return False
        return self.sharing.has_more_to_keep(row)

    def keep(self, row: Row) -> None:
        """Let others find all whole blocks of a row's final tokens."""
        if self.sharing is not None:
            self.sharing.keep(row, row.tokens[:-1], len(row.tokens) - 1)

    def leave(self, row: Row) -> None:
        if isinstance(row.error, FloatingPointError):
            self.slots.store.forget_prefixes()  # NaN may be in them
        self._free_blocks(row)
        self.allocator.free(row)
        self.entering = [own for own in self.entering if own.row is not row]

    def _free_blocks(self, row: Row) -> None:
        if self.sharing is not None:
            self.sharing.detach(row)
        self.blocks.free(row)

    def reserve(self) -> list[Row]:
        """Take the blocks that rounds may need next; return the rows that had to leave for it, newest first."""
        put_back: list[Row] = []
        for row in self.running:
            while row in self.blocks.of and not self.blocks.extend(row):
                leaves = self.rows[-1]
                if (why := self.blocks.why_never(row)) is not None:
                    row.fail(ValueError(why))
                    leaves = row
                self.leave(leaves)
                put_back.append(leaves)
        return [row for row in put_back if not row.finished]

    def close(self) -> None:
        """Give everything back."""
        for row in self.rows:
            self.leave(row)
        self.allocator.close()

    def forget(self) -> None:
        """Give blocks back, and slots up: what is in them may be half done."""
        if isinstance(self.blocks, BlockManager):
            self.blocks.store.forget_prefixes()
        for row in self.rows:
            self._free_blocks(row)
        self.entering = []
        self.allocator.forget()
