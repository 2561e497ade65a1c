"""The decoder: one request, from its prompts to its last token.

A step takes the newest token of every row through segment 0, asks the exit at the checkpoint, and either emits
there, leaving the token pending for the next segment, or goes on, carrying all that is pending with it. When
tokens reach full depth the model's own logits for each of them are there: mode "exact" compares and rolls back
at the first difference, mode "fast" looks at the newest one only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.batch import Batch
from TIDE.engine.plan import Plan
from TIDE.engine.request import Request
from TIDE.engine.round.rounds import Rounds, suits
from TIDE.engine.round.sampler import Draft, Sampler
from TIDE.engine.round.segments import Segments
from TIDE.engine.round.verify import Verifier
from TIDE.engine.runners.select import check_fused
from TIDE.engine.schedule.draft_budget import Costs, DraftBudget
from TIDE.routing.policy import Candidates, ExitPolicy
from TIDE.stats import Clock, ExitStats


class Decoder:
    """Runs one request step by step."""

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: Plan,
        policy: ExitPolicy | None,
        batch: Batch,
        sampler: Sampler,
        capacity: int,
        costs: Costs | None = None,
        stats: ExitStats | None = None,
        request: Request | None = None,
    ) -> None:
        self.adapter = adapter
        self.plan = plan
        self.batch = batch
        self.sampler = sampler
        self.stats = stats or ExitStats(adapter.num_layers)
        self.clock = Clock(self.stats.seconds)
        self.exits_in_a_row = [0] * len(batch)
        self.exits = [0] * len(batch)
        self.scores: dict[int, float] = {}  # of the rows that leave in this step
        self.costs = costs or Costs()
        self.budget = DraftBudget(batch.size, self.costs, plan.weighs) if plan.rests else None
        self.asked_before = False  # the first exit after a pause has to catch up with the text and says nothing about others
        self._policy, self._capacity, self._request = policy, capacity, request

    @functools.cached_property
    def policy(self) -> ExitPolicy | None:
        return None if self._policy is None else self._policy.start(len(self.batch), self.adapter.head)

    @functools.cached_property
    def segments(self) -> Segments:
        return Segments(self.adapter, self.plan, self.batch, self._capacity, self.stats, self.policy)

    @functools.cached_property
    def verifier(self) -> Verifier:
        return Verifier(self.batch, self.sampler, self.segments, self.stats)

    def reuse_prefix(self, other: Decoder) -> None:
        """Take over what another decoder has run of a text that begins alike; it cannot go on itself then."""
        if other.plan != self.plan or other._policy is not self._policy or len(self.batch) + len(other.batch) > 2:
            return
        if self.batch.embeds is not None or other.batch.embeds is not None:
            return
        ours, theirs = (own.tokens(0, 0, own.size[0]).tolist() for own in (self.batch, other.batch))
        alike = next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        other.segments.go_on(self.batch, self.stats, min(alike, len(ours) - 1))
        self.__dict__.update(policy=other.policy, segments=other.segments)

    def run(self) -> Iterator[None]:
        """Decode until every row is finished: in rounds where they suit, which on a GPU is known after the first step."""
        yield from self._rounds()
        if self.batch.unfinished():
            self.step()
            yield
        if self.batch.unfinished() and self.adapter.fused is not None and not self.adapter.fused.is_checked:
            check_fused(self.adapter)
            yield from self._rounds()
        while self.batch.unfinished():
            self.step()
            yield

    def _rounds(self) -> Iterator[None]:
        """As far as they get."""
        if self._request is not None and suits(self.adapter, self.plan, self._policy, self._request):
            columns = self._request.columns
            yield from Rounds(self.adapter, self.plan, self._policy, self.batch, columns, self.costs.length, self.stats).run()

    def step(self) -> None:
        self.clock.start(instead="prompt" if self.batch.size == self.batch.prompt else None)
        with self.adapter.grad_off():
            self._step(self.batch.unfinished())

    def _step(self, going: list[int]) -> None:
        self._start_over_where_rope_switches(going)
        deciding, seconds, segment, last = list(going), 0.0, 0, self.segments.last
        may_leave = {row for row in going if self._may_leave(row)} if last else set()
        asked = bool(may_leave)
        while going and segment < last:
            candidates = [row for row in deciding if row in may_leave]
            counts = self._counts(segment, going)
            if not candidates:
                reached = self.segments.reaches(segment, going)
                if reached == last:
                    break  # nobody is asked on the way: one pass to the end
                if reached > segment or not self.segments.skip(segment, counts):
                    self.segments.run(segment, counts, last=reached)
                    self.clock.lap("shallow")
                segment = reached + 1
                continue
            self.segments.run(segment, counts)
            seconds += self.clock.lap("shallow")
            segment += 1
            leaving = self._ask(segment, candidates)
            going, deciding = self._leave(segment, leaving, going, deciding)
            seconds += self.clock.lap("exits")
        if asked and self.asked_before and self.budget is not None:
            self.budget.costs.exit.add(seconds)
        self.asked_before = asked
        if going:
            self._finish(segment, going, deciding)

    def _counts(self, segment: int, rows: list[int]) -> dict[int, int]:
        """How many tokens each row takes through a segment: all that wait, but never a draft that ended the text."""
        held = self.verifier.closed if segment == 0 else ()
        return {row: self.segments.waiting(segment, row) - (row in held) for row in rows}

    def _may_leave(self, row: int) -> bool:
        size, switch = self.batch.size[row], self.adapter.rope.switches_at
        new_tokens = size - self.batch.prompt[row]
        same_rope = switch is None or size < switch
        allowed = row not in self.verifier.closed and self.exits_in_a_row[row] < self.plan.max_pending
        allowed = allowed and self.plan.within_share(self.exits[row], new_tokens)
        return new_tokens > 0 and same_rope and allowed and (self.budget is None or self.budget.should_draft(row, size))

    def _start_over_where_rope_switches(self, rows: list[int]) -> None:
        switch, starts_over = self.adapter.rope
        for row in rows:
            if starts_over and self.batch.size[row] - 1 == self.segments.length(0, row) == switch:
                self.segments.rollback(row, 0)

    def _ask(self, segment: int, rows: list[int]) -> Candidates | None:
        """The rows whose newest token the policy lets out before `segment`."""
        if not rows or self.policy is None:
            return None
        positions = [self.segments.length(segment - 1, row) - 1 for row in rows]
        states = [self.segments.entering(segment, row, at, at + 1) for row, at in zip(rows, positions, strict=True)]
        joined = states[0] if len(states) == 1 else torch.cat(states)
        candidates = Candidates(self.plan.spans[segment].start, joined, rows, positions)
        scores = self.policy.score(candidates)
        if scores.shape != (len(rows),):
            raise ValueError(
                f"an exit policy must give one score per candidate: expected ({len(rows)},), found {tuple(scores.shape)}."
            )
        values = scores.tolist()
        chosen = self._chosen(candidates, scores, values)
        if not chosen:
            return None
        self.scores = {rows[i]: values[i] for i in chosen}
        if len(chosen) == len(rows):
            return candidates
        return Candidates(
            candidates.depth, candidates.states[chosen], [rows[i] for i in chosen], [positions[i] for i in chosen]
        )

    def _chosen(self, candidates: Candidates, scores: torch.Tensor, values: list[float]) -> list[int]:
        """Which candidates leave."""
        threshold, budget = self.plan.threshold(candidates.depth), self.budget
        if budget is None:
            return (scores >= threshold).nonzero()[:, 0].tolist()
        return [i for i, score in enumerate(values) if budget.should_exit(candidates.rows[i], score, threshold)]

    def _leave(
        self, segment: int, leaving: Candidates | None, going: list[int], deciding: list[int]
    ) -> tuple[list[int], list[int]]:
        """Emit the exits. Return the rows that go on, and those of them whose newest token is still undecided."""
        if leaving is None:
            return going, deciding
        staying = [row for row in going if row not in leaving.rows]
        ride_along = self.plan.catches_up and len(staying) > self.plan.compaction_threshold * len(self.batch.unfinished())
        if ride_along and self.plan.exact:
            return going, deciding  # they are verified with the others at once: no draft is needed
        self._emit(segment, leaving)
        deciding = [row for row in deciding if row not in leaving.rows]
        return (going if ride_along else staying), deciding

    def _emit(self, segment: int, leaving: Candidates) -> None:
        assert self.policy is not None
        logits = self.policy.predict(leaving, self.adapter.head)
        drafts = self.sampler.draft(leaving.rows, logits, leaving.depth)
        drafts = [draft._replace(score=self.scores[row]) for row, draft in zip(leaving.rows, drafts, strict=True)]
        for row in leaving.rows:
            self.exits[row] += 1
            self.exits_in_a_row[row] += 1
            self.stats.drafted_by_step[self.exits_in_a_row[row]] += 1
        if self.plan.exact:
            self.verifier.add(leaving.rows, drafts)
            return
        self._append(leaving.rows, drafts)
        if not self.plan.catches_up:
            for later in range(segment, len(self.plan.spans)):
                self.segments.write_skipped_kv(later, leaving.rows, leaving.states, self.plan.kv_cache_strategy)
            for row in leaving.rows:
                self.segments.settle(row)

    def _finish(self, segment: int, going: list[int], deciding: list[int]) -> None:
        """Run the segments from this one on, which are level, in one pass, and take what the full model says."""
        last, final = self.segments.last, list(self.batch.final)
        counts = self._counts(segment, going)
        if self.plan.exact:
            wanted = {row: self.batch.final[row] - 1 for row in going}
        else:
            wanted = {row: self.segments.length(last, row) + counts[row] - 1 for row in going}
        self.stats.catch_ups += any(self._beyond_prompt(row, count) > 1 for row, count in counts.items())
        logits = self.segments.run(segment, counts, wanted, last)
        seconds = self.clock.lap("deep")
        if self.plan.exact:
            self.verifier.verify(logits)
        else:
            self._decide(deciding, logits)
        for row in going:
            self.segments.settle(row)
        seconds += self.clock.lap("choosing")
        for row in deciding:
            self.exits_in_a_row[row] = 0
        if self.budget is not None:
            self._note(self.budget, {row: self.batch.final[row] - final[row] for row in going}, max(counts.values()), seconds)

    def _beyond_prompt(self, row: int, count: int) -> int:
        """How many of the next `count` tokens of a row in the last segment are not of its prompt."""
        start = self.segments.length(self.segments.last, row)
        return start + count - max(start, self.batch.prompt[row])

    def _note(self, budget: DraftBudget, gained: dict[int, int], tokens: int, seconds: float) -> None:
        """Keep what a round brought and what its pass of so many tokens took; prompts are none."""
        if tokens > self.plan.max_pending + 1:
            return
        budget.costs.saw_pass(tokens, seconds)
        for row, count in gained.items():
            budget.verified(row, self.batch.size[row], count)

    def _decide(self, rows: list[int], logits: dict[int, torch.Tensor]) -> None:
        """The newest tokens that did not exit are decided by the full model."""
        if rows:
            self._append(rows, self.sampler.draft(rows, torch.cat([logits[row] for row in rows]), self.adapter.num_layers))

    def _append(self, rows: list[int], tokens: list[Draft]) -> None:
        """Tokens that are final at once."""
        for row, token in zip(rows, tokens, strict=True):
            self.batch.append(row, token.token)
            self.batch.finish(row, token.depth, token.score)
            self.stats.count_token(token.depth, self.exits_in_a_row[row])
        for row in self.batch.stops(rows):
            self.batch.finished[row] = True
