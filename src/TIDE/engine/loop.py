"""The main loop: launch a round, read the one before it, extend rows.

    step:   ahead = stage.launch()               drafts · deep pass · accept, for all rows
            for row, result in the round before:
                row.extend(result)               final tokens, stop rule, stats: the only place
                scheduler.saw(row, result)       acceptance and seconds decide about the next drafts

With overlap the host reads a round while the next one already runs on the device. Without, it reads a round as soon as it is
launched: the plain loop, which is the reference for the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Protocol

from TIDE.engine.plan import Plan
from TIDE.engine.round.round import Launched
from TIDE.engine.row import Row
from TIDE.engine.schedule.scheduler import Scheduler


class Launcher(Protocol):
    """A stage that launches rounds: `HostStage` or `DeviceStage`."""

    is_planned: bool  # drafts are chosen before a round runs

    def launch(self) -> Launched: ...


class Loop:
    """Decodes the rows of one request.

    Args:
        overlap: read a round while the next one runs.
    """

    def __init__(self, stage: Launcher, rows: Sequence[Row], plan: Plan, scheduler: Scheduler, overlap: bool = False) -> None:
        self.stage = stage
        self.rows = rows
        self.plan = plan
        self.scheduler = scheduler
        self.overlap = overlap
        self._in_flight: Launched | None = None
        self._read_at = time.perf_counter()

    def run(self) -> Iterator[None]:
        """Decode until every row has ended."""
        while any(not row.finished for row in self.rows):
            self.step()
            yield

    def step(self) -> None:
        """Launch a round and read the one that is due."""
        for row in self.rows:
            row.wanted = 0 if row.finished else self.scheduler.drafts(row, self.plan, self.stage.is_planned)
        ahead = self.stage.launch()
        due: Launched | None = ahead
        if self.overlap:
            due, self._in_flight = self._in_flight, ahead
        if due is not None:
            self._read(due, due.is_typical and ahead.is_typical)
        for row in self.rows:
            if row.error is not None:
                raise row.error

    def _read(self, round_: Launched, is_typical: bool) -> None:
        """Extend the rows of a round.

        Args:
            is_typical: nothing was compiled or captured since the round before was read.
        """
        results = round_.results()
        now = time.perf_counter()
        seconds = now - self._read_at
        self._read_at = now
        if self.stage.is_planned:
            self.rows[0].stats.seconds.add("prompt" if round_.is_prefill else "deep", seconds)
        for row, result in results:
            row.extend(result)
            self.scheduler.saw(row, result, round_, seconds if is_typical else None)
