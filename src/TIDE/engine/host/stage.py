"""Rounds on the host: rows that come and go, any exit policy, several checkpoints, any sampler.

A row that joins while others are running has its prompt run between their rounds, a part at a time, so that they do not wait
for long. A row that fails (see `Row.fail`) is finished, and in no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import count as count_up

from TIDE.engine.cache.prefix_store import Texts
from TIDE.engine.cache.segment_cache import STEP
from TIDE.engine.host.prefix_copier import Beginnings
from TIDE.engine.host.round import HostRound
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.segments import Segments
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched, run_round
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.routing.policy import ExitPolicy
from TIDE.stats import Clock, Seconds

PROMPT_CHUNK = 512  # tokens of prompts that run between two rounds


class HostStage:
    """The rows on a runner.

    Args:
        policy: the exits; None: every token runs all layers.
        sampler: chooses the tokens; the stage tells it which rows there are.
        planner: of the drafts of its rows.
        most_rows: that are in it at a time.
        texts: that have ended, for rows that begin alike; None: every row runs all of its text.

    Attributes:
        rows: in order of joining. Those that have ended are passed over until they leave.
        joining: those whose prompts have not run.
    """

    is_planned = False  # scores decide about drafts while a round runs
    most_ahead = 0  # a round is over when `launch` returns
    shape = None
    is_short = False  # the cache grows with its texts

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        policy: ExitPolicy | None,
        sampler: Sampler,
        planner: DraftPlanner,
        most_rows: int,
        texts: Texts | None = None,
    ) -> None:
        self.runner = runner
        self.plan = plan
        self.sampler = sampler
        self.planner = planner
        self.most_rows = most_rows
        self.policy = None if policy is None else policy.start(most_rows, runner.head)
        self.beginnings = Beginnings(runner, plan, policy, self.policy, texts)
        self.segments = self._no_segments()
        self.rows: list[Row] = []
        self.joining: list[Row] = []
        self.clock = Clock(Seconds())
        self.has_asked = False  # an exit in the last round: the first one after a pause catches up with the text

    def admit(self, rows: Sequence[Row]) -> int:
        """Take in the first of these rows, as many as there is room for; return how many. One whose text begins like that of a
        row whose prompt has not run, and those behind it, come when it has."""
        count = 0
        for row in list(rows)[: self.most_rows - len(self.rows)]:
            if not count:
                self.beginnings.follow()
            if self.beginnings.should_wait(row, self.segments, self.rows, self.joining):
                break
            self._take(row)
            count += 1
        if count:
            self.sampler.serve(self.rows)
        return count

    def _take(self, row: Row) -> None:
        """Take a row in before the next round. All its tokens run as a prompt does, those that were written before too."""
        taken = {other.slot for other in self.rows}
        row.slot = next(slot for slot in count_up() if slot not in taken)
        row.drafts = []
        row.exits_in_a_row = 0
        self.rows.append(row)
        self.joining.append(row)
        self.segments.make_room(row.slot + 1)
        with self.runner.grad_off():
            self.beginnings.begin(row, self.segments, self.rows)

    def reserve(self) -> list[Row]:
        """Return no rows: the cache grows with its texts."""
        return []

    def leave(self, *rows: Row) -> None:
        """Let rows go: they have ended, or are put back and join again later. Nothing of the others changes."""
        for row in rows:
            self.rows.remove(row)
            self.joining = [other for other in self.joining if other is not row]
            row.drafts = []
            with self.runner.grad_off():
                self.beginnings.keep(row, self.segments)
                self.segments.clear(row)
        if not self.rows:
            self.segments = self._no_segments()  # a long text has had room that others need not have
        self.sampler.serve(self.rows)

    @property
    def waits(self) -> bool:
        """True if rows that leave wait for the others."""
        return self.plan.exact or not self.runner.gathers_rows

    @property
    def width(self) -> int:
        return self.most_rows

    def close(self) -> None:
        """Let all rows go."""
        for row in list(self.rows):
            self.leave(row)

    def launch(self) -> Launched:
        """Run a round; it is over when this returns.

        Where no row is running, prompts run in the round. Otherwise a part of them runs before it, and rows whose prompts have
        run take part.
        """
        joining = set(self.joining)
        is_prefill = all(row.finished or row in joining for row in self.rows)
        self.clock.start(instead="prompt")
        with self.runner.grad_off(), self.runner.threads(), self._timed():
            if self.joining and not is_prefill:
                self._run_prompts()
            self.clock.start(instead="prompt" if is_prefill else None)
            round_ = HostRound(self, is_prefill)
            run_round(round_)
        if is_prefill:
            self.joining = []
        results = round_.results
        return Launched(lambda: results, is_prefill=is_prefill)

    def _no_segments(self) -> Segments:
        return Segments(self.runner, self.plan.spans, (), STEP, self.policy, self.plan.prompt_pass)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Add what the block takes, by its parts, to the seconds of every request that has rows here."""
        own = self.clock.seconds = Seconds()
        requests = {id(row.stats.seconds): row.stats.seconds for row in self.rows if not row.finished}
        try:
            yield
        finally:
            for seconds in requests.values():
                for part in fields(own):
                    seconds.add(part.name, getattr(own, part.name))

    def _run_prompts(self) -> None:
        """Run the next tokens of prompts through all layers, all but the newest of each; rows that are done take part."""
        counts: dict[Row, int] = {}
        for row in self.joining:
            room = PROMPT_CHUNK - sum(counts.values())
            counts[row] = min(room, row.size - 1 - self.segments.length(0, row))
        self.segments.run_prompts(counts)
        for row in self.joining:
            self.segments.commit(row)
        self.joining = [row for row in self.joining if self.segments.length(0, row) < row.size - 1]
        self.clock.lap("prompt")
