"""Counts of all requests of an engine: of those that are over, and of those that are running."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from TIDE.engine.row import Row, total
from TIDE.stats import ExitStats


class Counts:
    """The counts of an engine's requests. Rows that come and go, each a request of its own, are counted when they end.

    Attributes:
        running: rows of the requests that are running, without those that come and go.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.running: list[list[Row]] = []
        self._over = ExitStats(num_layers)
        self._lock = threading.Lock()

    def all(self, others: Sequence[Row] = ()) -> ExitStats:
        """Return the counts of all requests, with those of other rows that are running."""
        rows = [*self.running, *([row] for row in others)]
        return sum((total(own, self.num_layers) for own in rows), start=self._over)

    @contextmanager
    def counted(self, rows: list[Row]) -> Iterator[None]:
        """Count a request from its first step on, however it ends."""
        self.running.append(rows)
        try:
            yield
        finally:
            self.running.remove(rows)
            with self._lock:
                self._over += total(rows, self.num_layers)

    def saw_step(self, rows: Sequence[Row], seconds: float) -> None:
        """Count a step of rows that come and go, and those that have ended in it."""
        with self._lock:
            for row in rows:
                row.stats.seconds.whole += seconds
                if row.finished and not row.removed:
                    self._over += total([row], self.num_layers)

    def remove(self, row: Row) -> None:
        """End a row that comes and goes before its text does."""
        with self._lock:
            if row.removed:
                raise ValueError("this row was removed before. Add its prompt again to go on with it.")
            if not row.finished:
                row.removed = row.finished = True
                self._over += total([row], self.num_layers)
