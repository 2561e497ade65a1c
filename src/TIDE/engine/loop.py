"""The main loop: let rows in, launch rounds, read those before them, extend rows, let those go that have ended.

    step:   stage.admit(waiting)                 as many as there is room for
            ahead = stage.launch(), …            drafts · deep pass · accept, for all rows
            for row, result in the rounds before:
                row.extend(result)               final tokens, stop rule, stats: the only place
                planner.saw(row, result)         acceptance and seconds decide about the next drafts

With overlap the host reads rounds while the next ones already run on the device: one, or where the device would wait for the
host, some at once. Without, it reads a round as soon as it is launched: the plain loop, which is the reference for the other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Protocol

from TIDE.engine.cache.slots import AT_ONCE
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import Row
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.kernels.reference.trees import TreeShape


class Launcher(Protocol):
    """A stage that launches rounds: `HostStage` or `SlotStage`."""

    is_planned: bool  # drafts are chosen before a round runs

    @property
    def most_ahead(self) -> int:
        """Rounds that may be launched before those before them are read; 0: each is read at once."""

    @property
    def width(self) -> int:
        """Rows that a round has room for."""

    @property
    def rows(self) -> list[Row]:
        """Rows in it, in the order in which they joined."""

    @property
    def is_short(self) -> bool:
        """True if rows could not join for want of K/V, which other stages may have."""

    @property
    def shape(self) -> TreeShape | None:
        """The tree that a planned round may have; None: its drafts are in a row."""

    def admit(self, rows: Sequence[Row]) -> int:
        """Let the first of these rows join, as many as there is room for; return how many."""

    def leave(self, *rows: Row) -> None:
        """Let rows go that have ended or were removed."""

    def reserve(self) -> list[Row]:
        """Make room for the next round; return the rows, newest first, that had to leave for it."""

    def launch(self) -> Launched: ...


class Loop:
    """Decodes rows on a stage.

    Args:
        overlap: read rounds while the next ones run, where the stage allows it.

    Attributes:
        waiting: rows that have not joined yet, or were put back.
        last_arrival: rows that arrived after this one do not join: an older one waits elsewhere for K/V.
        at_once: rounds to launch in a step.
    """

    def __init__(self, stage: Launcher, plan: Plan, planner: DraftPlanner, overlap: bool = False) -> None:
        self.stage = stage
        self.plan = plan
        self.planner = planner
        self.overlap = overlap
        self.waiting: deque[Row] = deque()
        self.last_arrival = math.inf
        self.at_once = 1
        self._in_flight: list[Launched] = []
        self._read_at = time.perf_counter()
        self._last: Launched | None = None  # that was read

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
        """Launch rounds and read those that are due."""
        is_idle = bool(self._in_flight) and self._in_flight[-1].is_over
        have_changed = self._change_rows()
        rows = self.stage.rows
        if not rows:
            self._in_flight = []  # launched ahead of the end
            return
        most = self.stage.most_ahead if self.overlap else 0
        count = self._needed(rows, most)
        if self._in_flight and not count:
            self._read(self._in_flight, is_typical=False)
            self._in_flight = []
            if all(row.finished for row in rows):
                return
            count = self._needed(rows, most)
        if self.stage.is_planned:
            self.planner.plan_round(rows, self.stage.width, self.stage.shape)
        for row in rows:
            row.wanted = self.planner.drafts(row, self.stage.is_planned)
        ahead = [self.stage.launch() for _ in range(max(1, count))]
        due = ahead
        if most:
            due, self._in_flight = self._in_flight, ahead
        if due:
            self._pace(is_idle, self._read(due, all(one.is_timed for one in (*due, *ahead)) and not have_changed))

    def _needed(self, rows: Sequence[Row], most: int) -> int:
        """Return how many rounds to launch, at most `most`: each gives a row a token at least, so that those in flight may be
        the last ones."""
        found = min(self.at_once, most)
        while found and all(row.finished or row.stop.room(row) < len(self._in_flight) + found for row in rows):
            found -= 1
        return found

    def _pace(self, is_idle: bool, waited: float) -> None:
        """Launch more rounds at once if the device had nothing to do, and fewer if the host waited for longer than one takes.

        Args:
            waited: for rounds, by the time that all of them took.
        """
        if is_idle:
            self.at_once = min(self.at_once + 1, AT_ONCE)
        elif waited * self.at_once > 1:
            self.at_once = max(self.at_once - 1, 1)

    def _change_rows(self) -> bool:
        """Let rows go that have ended and others come, and put back those that there is no room for; return True if any did."""
        before = self.stage.rows
        if ended := [row for row in before if row.finished]:
            self.stage.leave(*ended)
        self.waiting = deque(row for row in self.waiting if not row.finished)
        may_join = list(takewhile(lambda row: row.arrival <= self.last_arrival, self.waiting))
        for _ in range(self.stage.admit(may_join)):
            self.waiting.popleft()
        if self.stage.rows:
            self.waiting.extendleft(self.stage.reserve())
        return self.stage.rows != before

    def _read(self, rounds: Sequence[Launched], is_typical: bool) -> float:
        """Extend the rows of rounds. Return for how much of the time since those before were read the host waited for them.

        Args:
            is_typical: there was nothing but these rounds since then.
        """
        since, waited, before = self._read_at, 0.0, self._last
        for round_ in rounds:
            began = time.perf_counter()
            results = round_.results()
            now = time.perf_counter()
            waited += now - began
            seconds, self._read_at = now - self._read_at, now
            if results and self.stage.is_planned:
                results[0][0].stats.seconds.add("prompt" if round_.is_prefill else "deep", seconds)
            is_seen = round_ is rounds[-1]  # all are alike
            took = self._took(before, round_, now - since) / len(rounds) if is_typical and is_seen else None
            for row, result in results:
                if row.finished:
                    continue  # removed while the round ran
                row.extend(result)
                if is_seen:
                    self.planner.saw(row, result, round_, took)
                    took = None
        self._last = rounds[-1]
        return waited / max(self._read_at - since, 1e-9)

    @staticmethod
    def _took(before: Launched | None, last: Launched, seconds: float) -> float:
        """Return the seconds of rounds: by the device, or by the host's clock, which knows of a device's only when it looks."""
        found = None if before is None else last.seconds_since(before)
        return seconds if found is None else found
