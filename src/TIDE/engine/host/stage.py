"""Rounds on the host: rows that come and go, any exit policy, several checkpoints, any sampler.

A row's newest token runs segment after segment, and at each checkpoint the policy is asked. A token that leaves becomes a
draft, and what it did not run stays pending; a row whose token does not leave waits at the last segment until none leaves. Then
all rows go to full depth in one pass, each with all that it has pending. In mode "fast" a token that leaves is final at once.

Where passes of some rows gather their K/V first (a model's own modules), mode "fast" does not wait: see `_leave`.

A row that joins while others are running has its prompt run between their rounds, a part at a time, so that they do not wait
for long. A row that fails (see `Row.fail`) is finished, and in no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import count as count_up

import torch

from TIDE.engine.cache.prefix_store import Texts
from TIDE.engine.cache.segment_cache import STEP
from TIDE.engine.host.prefix_copier import Beginnings
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.segments import Segments
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched, accept, run_round
from TIDE.engine.rows.row import Draft, RoundResult, Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.schedule.costs import Costs, RoundCosts
from TIDE.routing.policy import Candidates, ExitPolicy
from TIDE.stats import Clock, Seconds

PROMPT_CHUNK = 512  # tokens of prompts that run between two rounds


class HostStage:
    """The rows on a runner.

    Args:
        policy: the exits; None: every token runs all layers.
        sampler: chooses the tokens; the stage tells it which rows there are.
        costs: to record how long passes and exits take.
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
        costs: Costs,
        most_rows: int,
        texts: Texts | None = None,
    ) -> None:
        self.runner = runner
        self.plan = plan
        self.source = policy
        self.sampler = sampler
        self.costs = RoundCosts(costs)
        self.most_rows = most_rows
        self.policy = None if policy is None else policy.start(most_rows, runner.head)
        self.beginnings = Beginnings(runner, plan, policy, self.policy, texts)
        self.segments = self._no_segments()
        self.rows: list[Row] = []
        self.joining: list[Row] = []
        self.clock = Clock(Seconds())
        self.waits = plan.exact or not runner.gathers_rows  # for the rows that leave
        self.is_prefill = False  # the round at hand runs prompts
        self.segment = 0  # where the rows on their way are
        self.entry = 0  # the segment where the deep pass begins
        self.going: list[Row] = []  # rows on their way to it
        self.held: list[Row] = []  # rows that wait before it
        self.left: list[Row] = []  # rows whose token left in this step
        self.deciding: list[Row] = []  # rows whose newest token is undecided
        self.logits: dict[Row, torch.Tensor] = {}
        self.found: dict[Row, list[int]] = {}
        self.results: list[tuple[Row, RoundResult]] = []
        self._tokens = 0  # of the longest row of the deep pass
        self._seconds = 0.0  # that it took
        self._asked_before = False  # the first exit after a pause catches up with the text, and its time is not typical

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
        if row.budget is not None:
            row.budget.costs = self.costs
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
    def width(self) -> int:
        return self.most_rows

    def close(self) -> None:
        """Let all rows go."""
        for row in list(self.rows):
            self.leave(row)

    def change_runner(self, runner: Runner) -> None:
        """Go on with another runner of the same model."""
        self.runner = self.beginnings.runner = runner
        self.segments.change_runner(runner)

    def launch(self) -> Launched:
        """Run a round; it is over when this returns.

        Where no row is running, prompts run in the round. Otherwise a part of them runs before it, and rows whose prompts have
        run take part.
        """
        joining = set(self.joining)
        self.is_prefill = all(row.finished or row in joining for row in self.rows)
        self.clock.start(instead="prompt")
        with self.runner.grad_off(), self.runner.threads(), self._timed():
            if self.joining and not self.is_prefill:
                self._run_prompts()
            self.clock.start(instead="prompt" if self.is_prefill else None)
            run_round(self)
        if self.is_prefill:
            self.joining = []
        results = self.results
        return Launched(lambda: results, is_prefill=self.is_prefill)

    def _no_segments(self) -> Segments:
        settling = None if self.plan.settles_at is None or self.source is None else self.source.settling
        return Segments(self.runner, self.plan.spans, (), STEP, self.policy, settling)

    @property
    def _active(self) -> list[Row]:
        """The rows that take part in the round."""
        return [row for row in self.rows if not row.finished and (self.is_prefill or row not in self.joining)]

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
        segment = 0
        while segment <= self.segments.last:
            reached = self.segments.reaches(segment, self.joining)
            self.segments.run(segment, counts, last=reached, are_prompts=True)
            segment = reached + 1
        for row in self.joining:
            self.segments.settle(row)
        self.joining = [row for row in self.joining if self.segments.length(0, row) < row.size - 1]
        self.clock.lap("prompt")

    # ---- the parts of a round ---------------------------------------------------------------------------------------------

    def draft(self, step: int) -> bool:
        """Let the newest token of every row leave where its exit allows it; True: there is another step."""
        active = self._active
        if not step:
            self.held = []
            self.costs.begin_round(max(1, len(active)))
        self.going = self.deciding = [row for row in self.left if not row.finished] if step and self.waits else active
        self.left = []
        self._start_over_where_rope_switches(self.going)
        may_leave = {row for row in self.going if self._may_leave(row)} if len(self.plan.spans) > 1 else set()
        seconds = 0.0
        self.segment = 0
        while self.going and self.segment < self.segments.last:
            candidates = [row for row in self.deciding if row in may_leave]
            if not candidates:
                if self._pass_by():
                    break
                continue
            self.segments.run(self.segment, self._counts())
            seconds += self.clock.lap("shallow")
            self.segment += 1
            self._leave(self._ask(candidates))
            seconds += self.clock.lap("exits")
        if may_leave and self._asked_before:
            self.costs.exit.add(seconds / len(may_leave))
        self._asked_before = bool(may_leave)
        if self.going:
            self.held += self.going
            self.entry = self.segment
        if self.waits:
            return bool(self.left)
        return not self.going and bool(self._active)

    def deep_pass(self, drafted: int) -> None:
        """Run the remaining segments, which stand alike, in one pass."""
        self.logits = {}
        self.going = self.held
        self.segment, self.deciding = self.entry, self.going if self.waits else self.deciding
        if not self.going:
            return
        counts = self._counts()
        last = self.segments.last
        if self.plan.exact:
            wanted = {row: len(row.tokens) - 1 for row in self.going}
        else:
            wanted = {row: self.segments.length(last, row) + counts[row] - 1 for row in self.going}
        for row, tokens in counts.items():
            row.stats.catch_ups += tokens > 1 and row not in self.joining
        best_only = self.sampler.takes_best_only(self.going)
        self.logits = self.segments.run(self.segment, counts, wanted, last, best_only, self.is_prefill)
        self._tokens = sum(counts.values())
        self._seconds = self.clock.lap("deep")

    def sample(self, drafted: int) -> None:
        if self.plan.exact:
            self.found = self.sampler.verify(self.logits)
        elif self.deciding:
            logits = torch.cat([self.logits[row] for row in self.deciding])
            chosen = self.sampler.sample(self.deciding, logits, self.runner.num_layers)
            self.found = {row: [draft.token] for row, draft in chosen.items()}
        else:
            self.found = {}

    def accept(self, drafted: int) -> None:
        """Turn what was found into results; drafts are verified or rolled back."""
        self.results = []
        for row, found in self.found.items():
            result = accept(row.drafts, found, self.runner.num_layers)
            if result.accepted < len(row.drafts):
                self.segments.rollback(row, len(row.tokens) + result.accepted)
            row.drafts = []
            row.exits_in_a_row = 0
            self.results.append((row, result))
        for row in self.going:
            self.segments.settle(row)
        seconds = self._seconds + self.clock.lap("choosing")
        if self.going and self._tokens <= (self.plan.max_pending + 1) * len(self.going):  # prompts say nothing about steps
            self.costs.saw_pass(self._tokens, seconds)

    # ---- drafts ------------------------------------------------------------------------------------------------------------

    def _pass_by(self) -> bool:
        """Take rows that are not asked through segments that stand alike; True: nothing but the deep pass is left."""
        reached = self.segments.reaches(self.segment, self.going)
        if reached == self.segments.last:
            if not self.held and not (self.waits and self.left):
                return True
            reached -= 1  # the others stand before the last segment
        counts = self._counts()
        if reached > self.segment or not self.segments.skip(self.segment, counts):
            self.segments.run(self.segment, counts, last=reached, are_prompts=self.is_prefill)
            self.clock.lap("shallow")
        self.segment = reached + 1
        return False

    def _counts(self) -> dict[Row, int]:
        """Return how many tokens each row takes through the segment: all that wait, but no draft that ends the text."""
        held = {row for row in self.going if self.segment == 0 and row.is_closed}
        return {row: self.segments.waiting(self.segment, row) - (row in held) for row in self.going}

    def _may_leave(self, row: Row) -> bool:
        size, switch = row.size, self.runner.rope.switches_at
        new_tokens = size - row.prompt
        if not new_tokens or row in self.joining or row.is_closed or (switch is not None and size >= switch):
            return False
        if row.wanted is not None:
            return row.exits_in_a_row < row.wanted
        allowed = row.exits_in_a_row < self.plan.max_pending and self.plan.within_share(row.exits, new_tokens)
        return allowed and (row.budget is None or row.budget.should_draft(size))

    def _start_over_where_rope_switches(self, rows: list[Row]) -> None:
        switch, starts_over = self.runner.rope
        for row in rows:
            if starts_over and row.size - 1 == self.segments.length(0, row) == switch:
                self.segments.rollback(row, 0)

    def _ask(self, rows: list[Row]) -> tuple[Candidates, list[Row], list[float]] | None:
        """Return the rows that the policy lets out at this checkpoint, with their scores."""
        assert self.policy is not None
        positions = [self.segments.length(self.segment - 1, row) - 1 for row in rows]
        states = [self.segments.entering(self.segment, row, at, at + 1) for row, at in zip(rows, positions, strict=True)]
        joined = states[0] if len(states) == 1 else torch.cat(states)
        candidates = Candidates(self.plan.spans[self.segment].start, joined, [row.slot for row in rows], positions)
        scores = self.policy.score(candidates)
        if scores.shape != (len(rows),):
            raise ValueError(
                f"an exit policy must give one score per candidate: expected ({len(rows)},), found {tuple(scores.shape)}."
            )
        values = scores.tolist()
        # thresholds are compared in the policy's own precision
        reached = (scores >= self.plan.threshold(candidates.depth)).tolist()
        chosen = [i for i, row in enumerate(rows) if self._leaves(row, values[i], reached[i], candidates.depth)]
        if not chosen:
            return None
        if len(chosen) < len(rows):
            slots, at = [rows[i].slot for i in chosen], [positions[i] for i in chosen]
            candidates = Candidates(candidates.depth, candidates.states[chosen], slots, at)
        return candidates, [rows[i] for i in chosen], [values[i] for i in chosen]

    def _leaves(self, row: Row, score: float, is_sure: bool, depth: int) -> bool:
        if row.wanted is not None:
            return is_sure or self.plan.weighs
        if row.budget is None:
            return is_sure
        return row.budget.should_exit(score, self.plan.threshold(depth))

    def _leave(self, leaving: tuple[Candidates, list[Row], list[float]] | None) -> None:
        """Draft the tokens that leave."""
        if leaving is None:
            return
        candidates, rows, scores = leaving
        rides_along = not self.waits and self._rides_along(len(self.going) - len(rows))
        left = self._emit(candidates, rows, scores)
        self.left += left
        self.deciding = [row for row in self.deciding if row not in left]
        self.going = self.going if rides_along else [row for row in self.going if row not in left]

    def _rides_along(self, staying: int) -> bool:
        """Return True if rows that leave go on with those that stay: a deep pass costs almost the same for more rows."""
        if self.segments.watched:
            return False  # what an exit sees of finished tokens, and so the text, must not depend on other rows
        return self.plan.catches_up and staying > self.plan.compaction_threshold * len(self._active)

    def _emit(self, candidates: Candidates, rows: list[Row], scores: list[float]) -> list[Row]:
        """Give rows the tokens that their exits predict; return those that leave. One whose exit predicts none stays."""
        assert self.policy is not None
        logits = self.policy.predict(candidates, self.runner.head)
        drafts = self.sampler.sample(rows, logits, candidates.depth, is_final=not self.plan.exact)
        for row, score in zip(rows, scores, strict=True):
            if row in drafts:
                self._add(row, drafts[row]._replace(score=score))
        if not self.plan.catches_up:
            for later in range(self.segment, len(self.plan.spans)):
                self.segments.write_skipped_kv(later, rows, candidates.states, self.plan.kv_cache_strategy)
            for row in rows:
                self.segments.settle(row)
        return [row for row in rows if row in drafts or row.finished]

    def _add(self, row: Row, draft: Draft) -> None:
        row.exits_in_a_row += 1
        if self.plan.exact:
            row.drafts.append(draft)
        else:
            row.extend(RoundResult([draft], 1, 1, row.exits_in_a_row))
