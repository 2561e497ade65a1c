"""A round on the host, which decides between passes.

A row's newest token runs segment after segment, and at each checkpoint the policy is asked. A token that leaves becomes a
draft, and what it did not run stays pending; a row whose token does not leave waits at the last segment until none leaves. Then
all rows go to full depth in one pass, each with all that it has pending. In mode "fast" a token that leaves is final at once.

Where passes of some rows gather their K/V first (a model's own modules), mode "fast" does not wait: see `_leave`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.segments import Segments
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import row_result
from TIDE.engine.rows.row import RoundResult, Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.routing.policy import Candidates, ExitPolicy
from TIDE.stats import Clock


class Stage(Protocol):
    """What a round needs of its stage.

    Attributes:
        has_asked: an exit in the last round, or in this one.
    """

    runner: Runner
    plan: Plan
    policy: ExitPolicy | None
    sampler: Sampler
    segments: Segments
    planner: DraftPlanner
    clock: Clock
    rows: list[Row]
    joining: list[Row]
    has_asked: bool

    @property
    def waits(self) -> bool:
        """True if rows that leave wait for the others."""


class HostRound:
    """The parts of a round, and where it has got to.

    Args:
        is_prefill: it runs prompts.
    """

    def __init__(self, stage: Stage, is_prefill: bool) -> None:
        self.stage = stage
        self.is_prefill = is_prefill
        self.segment = 0  # where the rows on their way are
        self.entry = 0  # the segment where the deep pass begins
        self.going: list[Row] = []  # rows on their way to it
        self.held: list[Row] = []  # rows that wait before it
        self.left: list[Row] = []  # rows whose token left in this step
        self.deciding: list[Row] = []  # rows whose newest token is undecided
        self.logits: dict[Row, torch.Tensor] = {}
        self.found: dict[Row, list[int]] = {}
        self.results: list[tuple[Row, RoundResult]] = []
        self._pass = 0, 0.0  # tokens of the deep pass, and its seconds

    @property
    def _active(self) -> list[Row]:
        """The rows that take part."""
        joining = self.stage.joining
        return [row for row in self.stage.rows if not row.finished and (self.is_prefill or row not in joining)]

    def draft(self, step: int) -> bool:
        """Let the newest token of every row leave where its exit allows it; True: there is another step."""
        active = self._active
        if not step:
            self.held = []
            self.stage.planner.begin_round(active)
        self.going = self.deciding = [row for row in self.left if not row.finished] if step and self.stage.waits else active
        self.left = []
        self._start_over_where_rope_switches(self.going)
        if self.is_prefill:  # no token of it leaves
            self.held, self.stage.has_asked = self.going, False
            return False
        may_leave = {row for row in self.going if self._may_leave(row)} if len(self.stage.plan.spans) > 1 else set()
        seconds = 0.0
        self.segment = 0
        while self.going and self.segment < self.stage.segments.last:
            candidates = [row for row in self.deciding if row in may_leave]
            if not candidates:
                if self._pass_by():
                    break
                continue
            self.stage.segments.run(self.segment, self._counts())
            seconds += self.stage.clock.lap("shallow")
            self.segment += 1
            self._leave(self._ask(candidates))
            seconds += self.stage.clock.lap("exits")
        if may_leave and self.stage.has_asked:
            self.stage.planner.costs.exit.add(seconds / len(may_leave))
        self.stage.has_asked = bool(may_leave) or (step > 0 and self.stage.has_asked)
        if self.going:
            self.held += self.going
            self.entry = self.segment
        if self.stage.waits:
            return bool(self.left)
        return not self.going and bool(self._active)

    def deep_pass(self, drafted: int) -> None:
        """Run the remaining segments, which stand alike, in one pass."""
        self.logits = {}
        self.going = self.held
        self.segment, self.deciding = self.entry, self.going if self.stage.waits else self.deciding
        if not self.going:
            return
        counts = self._counts()
        last = self.stage.segments.last
        if self.stage.plan.exact:
            wanted = {row: len(row.tokens) - 1 for row in self.going}
        else:
            wanted = {row: self.stage.segments.length(last, row) + counts[row] - 1 for row in self.going}
        for row, tokens in counts.items():
            row.stats.catch_ups += tokens > 1 and row not in self.stage.joining
        best_only = self.stage.sampler.takes_best_only(self.going)
        if self.is_prefill:
            self.logits = self.stage.segments.run_prompts(counts, wanted, best_only)
        else:
            self.logits = self.stage.segments.run(self.segment, counts, wanted, last, best_only)
        self._pass = sum(counts.values()), self.stage.clock.lap("deep")

    def sample(self, drafted: int) -> None:
        if self.stage.plan.exact:
            self.found = self.stage.sampler.verify(self.logits)
        elif self.deciding:
            logits = torch.cat([self.logits[row] for row in self.deciding])
            chosen = self.stage.sampler.sample(self.deciding, logits, self.stage.runner.num_layers)
            self.found = {row: [draft.token] for row, draft in chosen.items()}
        else:
            self.found = {}

    def accept(self, drafted: int) -> None:
        """Turn what was found into results; drafts are verified or rolled back."""
        self.results = []
        for row, found in self.found.items():
            result = row_result(row.drafts, found, self.stage.runner.num_layers)
            if result.accepted < len(row.drafts):
                self.stage.segments.rollback(row, len(row.tokens) + result.accepted)
            row.drafts = []
            row.exits_in_a_row = 0
            self.results.append((row, result))
        for row in self.going:
            self.stage.segments.commit(row)
        tokens, seconds = self._pass
        seconds += self.stage.clock.lap("choosing")
        if self.going and tokens <= (self.stage.plan.max_pending + 1) * len(self.going):  # prompts say nothing about steps
            self.stage.planner.costs.saw_pass(tokens, seconds)

    def _pass_by(self) -> bool:
        """Take rows that are not asked through segments that stand alike; True: nothing but the deep pass is left."""
        reached = self.stage.segments.reaches(self.segment, self.going)
        if reached == self.stage.segments.last:
            if not self.held and not (self.stage.waits and self.left):
                return True
            reached -= 1  # the others stand before the last segment
        counts = self._counts()
        if reached > self.segment or not self.stage.segments.skip(self.segment, counts):
            self.stage.segments.run(self.segment, counts, last=reached)
            self.stage.clock.lap("shallow")
        self.segment = reached + 1
        return False

    def _counts(self) -> dict[Row, int]:
        """Return how many tokens each row takes through the segment: all that wait, but no draft that ends the text."""
        held = {row for row in self.going if self.segment == 0 and row.is_closed}
        return {row: self.stage.segments.waiting(self.segment, row) - (row in held) for row in self.going}

    def _may_leave(self, row: Row) -> bool:
        size, switch = row.size, self.stage.runner.rope.switches_at
        new_tokens = size - row.prompt
        if not new_tokens or row in self.stage.joining or row.is_closed or (switch is not None and size >= switch):
            return False
        if row.wanted is not None:
            return row.exits_in_a_row < row.wanted
        allowed = row.exits_in_a_row < self.stage.plan.max_pending and self.stage.plan.within_share(row.exits, new_tokens)
        return allowed and (not self.stage.plan.rests or self.stage.planner.should_draft(row))

    def _start_over_where_rope_switches(self, rows: list[Row]) -> None:
        switch, starts_over = self.stage.runner.rope
        for row in rows:
            if starts_over and row.size - 1 == self.stage.segments.length(0, row) == switch:
                self.stage.segments.rollback(row, 0)

    def _ask(self, rows: list[Row]) -> tuple[Candidates, list[Row], list[float]] | None:
        """Return the rows that the policy lets out at this checkpoint, with their scores."""
        assert self.stage.policy is not None
        positions = [self.stage.segments.length(self.segment - 1, row) - 1 for row in rows]
        states = [self.stage.segments.entering(self.segment, row, at, at + 1) for row, at in zip(rows, positions, strict=True)]
        joined = states[0] if len(states) == 1 else torch.cat(states)
        candidates = Candidates(self.stage.plan.spans[self.segment].start, joined, [row.slot for row in rows], positions)
        scores = self.stage.policy.score(candidates)
        if scores.shape != (len(rows),):
            raise ValueError(
                f"an exit policy must give one score per candidate: expected ({len(rows)},), found {tuple(scores.shape)}."
            )
        values = scores.tolist()
        # thresholds are compared in the policy's own precision
        reached = (scores >= self.stage.plan.threshold(candidates.depth)).tolist()
        chosen = [i for i, row in enumerate(rows) if self._leaves(row, values[i], reached[i], candidates.depth)]
        if not chosen:
            return None
        if len(chosen) < len(rows):
            slots, at = [rows[i].slot for i in chosen], [positions[i] for i in chosen]
            candidates = Candidates(candidates.depth, candidates.states[chosen], slots, at)
        return candidates, [rows[i] for i in chosen], [values[i] for i in chosen]

    def _leaves(self, row: Row, score: float, is_sure: bool, depth: int) -> bool:
        if row.wanted is not None:
            return is_sure or self.stage.plan.weighs
        plan = self.stage.plan
        return self.stage.planner.should_exit(row, score, plan.threshold(depth)) if plan.rests else is_sure

    def _leave(self, leaving: tuple[Candidates, list[Row], list[float]] | None) -> None:
        """Draft the tokens that leave."""
        if leaving is None:
            return
        candidates, rows, scores = leaving
        rides_along = not self.stage.waits and self._rides_along(len(self.going) - len(rows))
        left = self._emit(candidates, rows, scores)
        self.left += left
        self.deciding = [row for row in self.deciding if row not in left]
        self.going = self.going if rides_along else [row for row in self.going if row not in left]

    def _rides_along(self, staying: int) -> bool:
        """Return True if rows that leave go on with those that stay: a deep pass costs almost the same for more rows."""
        if self.stage.segments.watched:
            return False  # what an exit sees of finished tokens, and so the text, must not depend on other rows
        return self.stage.plan.catches_up and staying > self.stage.plan.compaction_threshold * len(self._active)

    def _emit(self, candidates: Candidates, rows: list[Row], scores: list[float]) -> list[Row]:
        """Give rows the tokens that their exits predict; return those that leave. One whose exit predicts none stays."""
        assert self.stage.policy is not None
        logits = self.stage.policy.predict(candidates, self.stage.runner.head)
        drafts = self.stage.sampler.sample(rows, logits, candidates.depth, is_final=not self.stage.plan.exact)
        for row, score in zip(rows, scores, strict=True):
            if row not in drafts:
                continue
            draft = drafts[row]._replace(score=score)
            row.exits_in_a_row += 1
            if self.stage.plan.exact:
                row.drafts.append(draft)
            else:
                row.extend(RoundResult([draft], 1, 1, row.exits_in_a_row))
        if not self.stage.plan.catches_up:
            for later in range(self.segment, len(self.stage.plan.spans)):
                self.stage.segments.write_skipped_kv(later, rows, candidates.states, self.stage.plan.kv_cache_strategy)
            for row in rows:
                self.stage.segments.commit(row)
        return [row for row in rows if row in drafts or row.finished]
