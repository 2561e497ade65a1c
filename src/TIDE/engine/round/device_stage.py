"""Rounds on a device, launched as a whole and without the host in between.

A round is one graph. The host reads one small result buffer per round while the next round is already running; a round's
inputs never leave the device. With exits off a round is a step of the full model. Where a row has processors of its own, the
host chooses between two graphs: drafts and deep pass before it, acceptance behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from TIDE.engine.cache.slots import Slots
from TIDE.engine.plan import Plan
from TIDE.engine.round import sampler as host
from TIDE.engine.round.device_choice import DeviceChoice
from TIDE.engine.round.device_drafter import DeviceDrafter, exit_of
from TIDE.engine.round.prefill import Prefill, padded_length
from TIDE.engine.round.round import Launched, run_passes, run_round
from TIDE.engine.row import Draft, RoundResult, Row
from TIDE.engine.runners.device import DeviceRunner, device_errors
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.result import ACCEPTED, DRAFTED, NOTHING_LEFT, SCORES, TOKENS

AHEAD = 4 * MOST_TOKENS  # columns beyond the text: a round may run ahead
MIN_COLUMNS = 1024  # a graph is made for so many columns; then for four times as many, and so on


class DeviceStage:
    """The rows of one request on slots.

    Args:
        columns: of the longest text that may come of the request.
        sampler: chooses for rows with processors of their own.
    """

    is_planned = True

    def __init__(
        self, runner: DeviceRunner, plan: Plan, policy: object, rows: Sequence[Row], columns: int, sampler: host.Sampler
    ) -> None:
        self.runner = runner
        self.plan = plan
        self.rows = rows
        exit_ = None if len(plan.spans) == 1 else exit_of(plan, policy)
        self.depth = 0 if plan.checkpoint is None else plan.checkpoint
        self.threshold = 0.0 if plan.weighs or exit_ is None else plan.threshold(self.depth)
        with device_errors():
            self.slots: Slots = runner.acquire(len(rows), columns + AHEAD, exit_)
            self.choice = DeviceChoice(runner, self.slots, rows, sampler)
        self.drafter = None
        if exit_ is not None:
            vocabulary = getattr(policy, "vocabulary", None)
            self.drafter = DeviceDrafter(runner, self.slots, exit_, self.depth, vocabulary, self.choice)
        self._launched = 0
        self._most = MIN_COLUMNS  # columns that attention is planned for

    def close(self) -> None:
        """Give the slots back."""
        self.runner.pool.release(self.slots)

    def launch(self) -> Launched:
        """Hand a round to the device: the prompts first, then rounds that start from what the one before left there."""
        with self.runner.grad_off(), self.runner.device_guard():
            if not self._launched:
                return self._prefill()
            self._stop_ended_rows()
            drafts = min(max(row.wanted or 0 for row in self.rows), MOST_TOKENS // len(self.rows) - 1)
            while self._most < max(row.size for row in self.rows) + AHEAD:
                self._most *= 4
            is_typical = self._launch_round(drafts)
            for row in self.rows:  # counted when they run: a round launched ahead of the text's end is work too
                row.stats.layers_run += 0 if row.finished else (drafts + 1) * self.runner.num_layers
            return self._read_later(drafts, is_typical)

    def _launch_round(self, drafts: int) -> bool:
        """Launch a round; return True if that was as fast as it will be from now on."""
        key = (drafts, self._most, self.plan.exact, self.threshold, self.choice.features)
        with device_errors():
            is_typical = self.drafter is None or self.drafter.prepare(drafts)
            if not self.choice.on_host:
                return self.runner.launch(self.slots, ("round", *key), lambda: run_round(self, drafts)) and is_typical
            is_typical &= self.runner.launch(self.slots, ("passes", *key), lambda: run_passes(self, drafts))
        logits = self.slots.logits_of((drafts + 1) * len(self.rows))
        for place in self.choice.on_host:
            if not self.rows[place].finished:
                self.choice.choose_on_host(place, drafts, logits[place :: len(self.rows)])
        with device_errors():
            return self.runner.launch(self.slots, ("accept", *key), lambda: self.accept(drafts)) and is_typical

    def _prefill(self) -> Launched:
        prefill, typical = Prefill(self.runner, self.slots, self.depth, self.choice), []
        for place, row in enumerate(self.rows):
            with device_errors():
                typical.append(prefill.run(place, row.tokens))
            if place in self.choice.on_host:
                self.choice.choose_on_host(place, 0, self.slots.logits_of(1))
        with device_errors():
            self.accept(0)
        if self.slots.memory is not None:
            self.slots.memory.fed.copy_(self.slots.starts[0])
        for row in self.rows:
            row.stats.layers_run += padded_length(row.prompt) * self.runner.num_layers
        return self._read_later(None, all(typical))

    def _stop_ended_rows(self) -> None:
        for place, row in enumerate(self.rows):
            if row.finished and len(self.rows) > 1:
                self.slots.active[place] = 0

    def _read_later(self, drafts: int | None, is_typical: bool) -> Launched:
        """Copy the result to the host; whoever asks for it waits for the copy."""
        copy, event = self.slots.pinned[self._launched % 2], None
        copy.copy_(self.slots.result, non_blocking=True)
        if self.slots.result.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._launched += 1

        def results() -> list[tuple[Row, RoundResult]]:
            if event is not None:
                with device_errors():
                    event.synchronize()
            fields = copy.tolist()
            going = [(row, own) for row, own in zip(self.rows, fields, strict=True) if not row.finished]
            for row, _ in going:
                row.stats.catch_ups += bool(drafts)
            return [(row, self._result(own)) for row, own in going]

        return Launched(results, drafts, is_prefill=drafts is None, is_typical=is_typical)

    def _result(self, fields: list[float]) -> RoundResult:
        accepted, drafted = int(fields[ACCEPTED]), int(fields[DRAFTED])
        if accepted == NOTHING_LEFT:
            raise ValueError(host.NOTHING_LEFT)
        if accepted < 0:
            raise FloatingPointError(host.NAN)
        scores = fields[SCORES : SCORES + drafted]
        drafts = [Draft(int(fields[TOKENS + i]), self.depth, scores[i]) for i in range(accepted)]
        full = Draft(int(fields[TOKENS + accepted]), self.runner.num_layers)
        return RoundResult([*drafts, full], drafted, accepted, scores=scores)

    # ---- the parts of a round: what a graph captures ------------------------------------------------------------------------

    def draft(self, step: int) -> bool:
        assert self.drafter is not None
        self.drafter.draft(step, self._most)
        return True

    def deep_pass(self, drafted: int) -> None:
        slots, rows = self.slots, self.slots.rows
        count = (drafted + 1) * rows
        own = slice(0, drafted + 1)
        at = None if drafted else slots.starts[0]
        if self.depth and self.drafter is not None:
            self.drafter.shallow(drafted, self._most, at)
        else:
            self.runner.embed_on_slots(slots, own, slots.states[:count])
        # the exit head will want the states at the checkpoint again
        self._states = slots.states[:count].clone() if self.drafter is not None else slots.states[:count]
        span = range(self.depth, self.runner.num_layers)
        if self.drafter is not None:
            self.drafter.through(span, self._states, own, self._most, at)
            self.drafter.observe(drafted)
        else:
            for _ in self.runner.layers_on_slots(slots, span, self._states, own, self._most, ()):
                pass

    def sample(self, drafted: int) -> None:
        found, best = self.slots.found[: drafted + 1].flatten(), self.slots.best[: drafted + 1].flatten()
        self.choice.choose(self._states, self.choice.of(slice(0, drafted + 1)), found, best)

    def accept(self, drafted: int) -> None:
        slots = self.slots
        self.runner.exits.accept(
            slots.found, slots.best, slots.tokens, slots.starts, slots.scores, slots.active, slots.result,
            drafted, self.threshold, self.plan.exact,
        )  # fmt: skip
        self.choice.count()
        if self.drafter is not None:
            self.drafter.settle(drafted)
