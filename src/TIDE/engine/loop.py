"""The main loop: let rows in, launch a round, read the one before it, extend rows, let those go that have ended.

    step:   stage.admit(waiting)                 as many as there is room for
            ahead = stage.launch()               drafts · deep pass · accept, for all rows
            for row, result in the round before:
                row.extend(result)               final tokens, stop rule, stats: the only place
                scheduler.saw(row, result)       acceptance and seconds decide about the next drafts

With overlap the host reads a round while the next one already runs on the device. Without, it reads a round as soon as it is
launched: the plain loop, which is the reference for the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from TIDE.engine.plan import Plan
from TIDE.engine.round.round import Launched
from TIDE.engine.row import Row
from TIDE.engine.schedule.scheduler import Scheduler


class Launcher(Protocol):
    """A stage that launches rounds: `HostStage` or `DeviceStage`."""

    is_planned: bool  # drafts are chosen before a round runs

    @property
    def may_overlap(self) -> bool:
        """True if a round may be launched before the one before it is read."""

    @property
    def width(self) -> int:
        """Rows that a round has room for."""

    @property
    def rows(self) -> list[Row]:
        """Rows in it, in the order in which they joined."""

    @property
    def tree_levels(self) -> int:
        """Levels of the tree that a planned round may have; 0: its drafts are in a row."""

    def admit(self, rows: Sequence[Row]) -> int:
        """Let the first of these rows join, as many as there is room for; return how many."""

    def leave(self, row: Row) -> None:
        """Let a row go that has ended or was removed."""

    def reserve(self) -> list[Row]:
        """Make room for the next round; return the rows, newest first, that had to leave for it."""

    def launch(self) -> Launched: ...


class Loop:
    """Decodes rows on a stage.

    Args:
        overlap: read a round while the next one runs, where the stage allows it.

    Attributes:
        waiting: rows that have not joined yet, or were put back.
    """

    def __init__(self, stage: Launcher, plan: Plan, scheduler: Scheduler, overlap: bool = False) -> None:
        self.stage = stage
        self.plan = plan
        self.scheduler = scheduler
        self.overlap = overlap
        self.waiting: deque[Row] = deque()
        self._in_flight: Launched | None = None
        self._read_at = time.perf_counter()

    def add(self, rows: Sequence[Row]) -> None:
        """Decode these rows too, as soon as there is room."""
        self.waiting += rows

    @property
    def rows(self) -> list[Row]:
        """Rows that have not ended."""
        return [row for row in dict.fromkeys((*self.stage.rows, *self.waiting)) if not row.finished]

    def run(self) -> Iterator[None]:
        """Decode until every row has ended."""
        while self.rows:
            self.step()
            yield

    def step(self) -> None:
        """Launch a round and read the one that is due."""
        have_changed = self._change_rows()
        rows = self.stage.rows
        if not rows:
            self._in_flight = None  # launched ahead of the end
            return
        overlap = self.overlap and self.stage.may_overlap
        if self._in_flight is not None and (not overlap or _is_last(rows)):
            self._read(self._in_flight, is_typical=False)
            self._in_flight = None
            if all(row.finished for row in rows):
                return
        if self.stage.is_planned:
            self.scheduler.begin_round(rows, self.plan, self.stage.width, self.stage.tree_levels)
        for row in rows:
            row.wanted = self.scheduler.drafts(row, self.plan, self.stage.is_planned)
        ahead = self.stage.launch()
        due: Launched | None = ahead
        if overlap:
            due, self._in_flight = self._in_flight, ahead
        if due is not None:
            self._read(due, due.is_timed and ahead.is_timed and not have_changed)

    def _change_rows(self) -> bool:
        """Let rows go that have ended and others come, and put back those that there is no room for; return True if any did."""
        before = self.stage.rows
        for row in [row for row in before if row.finished]:
            self.stage.leave(row)
        self.waiting = deque(row for row in self.waiting if not row.finished)
        for _ in range(self.stage.admit(self.waiting)):
            self.waiting.popleft()
        if self.stage.rows:
            self.waiting.extendleft(self.stage.reserve())
        return self.stage.rows != before

    def _read(self, round_: Launched, is_typical: bool) -> None:
        """Extend the rows of a round.

        Args:
            is_typical: there was nothing but the round since the one before was read.
        """
        results = round_.results()
        now = time.perf_counter()
        seconds = now - self._read_at
        self._read_at = now
        for row, result in results:
            if self.stage.is_planned and row is results[0][0]:
                row.stats.seconds.add("prompt" if round_.is_prefill else "deep", seconds)
            row.extend(result)
            self.scheduler.saw(row, self.plan, result, round_, seconds if is_typical else None)
            is_typical = False  # a round is timed once


def _is_last(rows: Sequence[Row]) -> bool:
    """Return True if the round in flight is the last one of all rows that take part in it: it gives each a token at least."""
    return all(row.stop.room(row) <= 1 for row in rows)
