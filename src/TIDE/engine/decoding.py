"""Decoding a request: its rows in a batch of their own, until all have ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from TIDE.engine.batch import Asked, Batch
from TIDE.engine.cache.prefix_store import Texts
from TIDE.engine.request.plan import Plan
from TIDE.engine.request.request import Request
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.routing.policy import ExitPolicy

logger = logging.getLogger(__name__)

PATIENCE = 5.0  # seconds for which a request waits for K/V of rows that nobody decodes


class Decoding:
    """The rows of one request.

    Args:
        replace_runner: called with the runner that takes the place of one that was checked and found wanting.
        texts: that rows on the host may begin with.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        policy: ExitPolicy | None,
        request: Request,
        rows: list[Row],
        scheduler: Scheduler,
        replace_runner: Callable[[Runner], None],
        texts: Texts,
    ) -> None:
        self.plan = plan
        self.policy = policy
        self.request = request
        self.rows = rows
        self._waiting: tuple[int, float] | None = None  # what was launched when it began to wait, and when that was
        self.batch = Batch(runner, scheduler, request.ids.device, replace_runner, texts)

    @property
    def reason(self) -> str | None:
        """Why rows are decoded on the host; None: they are not."""
        return self.batch.reason

    def why_not(self) -> str | None:
        """Return why the rows cannot be decoded in whole rounds; None: they can."""
        reasons = (self.batch.why_not(Asked(row, self.plan, self.policy), len(self.rows)) for row in self.rows)
        return next((reason for reason in reasons if reason is not None), None)

    def run(self) -> Iterator[None]:
        """Decode until every row has ended, or one has failed: its error is the request's."""
        self.batch.add(self.rows, self.plan, self.policy)
        try:
            while any(not row.finished for row in self.rows):
                self.batch.step()
                for row in self.rows:
                    if row.error is not None:
                        raise row.error
                self._wait_for_others()
                yield
        finally:
            self.batch.close()

    def _wait_for_others(self) -> None:
        """Wait while others have all K/V, but not for rows that nobody decodes: they may be this thread's own."""
        runner = self.batch.runner
        if not isinstance(runner, DeviceRunner) or not self.batch.is_waiting:
            self._waiting = None
            return
        if self._waiting is None or self._waiting[0] != runner.graphs.launched:
            self._waiting = runner.graphs.launched, time.monotonic()
        if time.monotonic() - self._waiting[1] > PATIENCE:
            raise RuntimeError(
                f"all K/V there are for rows belong to others, none of which was decoded for {PATIENCE:g} s. Finish or close "
                f"streams that are open, step or remove rows that were added, or give the cache more (cache_gib)."
            )
        time.sleep(0.001)

    def columns(self) -> Iterator[torch.Tensor]:
        """Decode, and yield the columns of new tokens, each as soon as it is final in every row."""
        rows, request = self.rows, self.request
        shown = request.prompt_columns
        for _ in self.run():
            for column in range(shown, request.final_columns(rows)):
                yield request.column(rows, column)
            shown = max(shown, request.final_columns(rows))
        self._warn_where_cut_short()

    def finish(self) -> None:
        """Decode to the end, with nobody looking on."""
        for _ in self.run():
            pass
        self._warn_where_cut_short()

    def _warn_where_cut_short(self) -> None:
        rows = self.rows
        if cut := [row.index for row in rows if row.cut_short]:
            longest = max(len(row.tokens) for row in rows)
            logger.warning("stopped at the model's context of %d tokens in rows %s.", longest, cut)
