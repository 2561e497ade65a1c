"""Rounds on a device, launched as a whole and without the host in between.

A round is one graph. The host reads one small result buffer per round while the next round is already running; a round's
inputs never leave the device. With exits off a round is a step of the full model. Where a row has processors of its own, the
host chooses between two graphs: drafts and deep pass before it, acceptance behind it.

Rows come and go between rounds. Their texts run first, many rows in one pass, and while others decode one pass at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from TIDE.engine.cache.slots import AT_ONCE, Slots, most_slots
from TIDE.engine.host import sampler as host
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched, run_passes, run_round
from TIDE.engine.rows.row import Draft, RoundResult, Row
from TIDE.engine.runners.device import DeviceRunner, device_errors
from TIDE.engine.runners.graphs import Held
from TIDE.engine.schedule.draft_length import lengths_on
from TIDE.engine.slots.drafter import DeviceDrafter, exit_of
from TIDE.engine.slots.module_prefill import ModulePrefill
from TIDE.engine.slots.prefill import Prefill
from TIDE.engine.slots.residents import AHEAD, Residents
from TIDE.engine.slots.sampler import DeviceChoice
from TIDE.engine.slots.settled_prefill import SettledPrefill
from TIDE.engine.slots.tree_round import TreeRound, shape_for, why_no_tree
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.reference.sampling import Features
from TIDE.kernels.reference.trees import TreeShape
from TIDE.kernels.result import ACCEPTED, DRAFTED, NOTHING_LEFT, SCORES, TOKENS
from TIDE.kernels.transfer import write
from TIDE.routing.settling import Settling

MIN_COLUMNS = 1024  # of the smallest graphs; the next ones have four times as many, and so on
BEYOND = 2 * MOST_TOKENS  # columns that attention is planned for beyond the text, as far as the host knows it


class DeviceStage:
    """Rows on slots, all by one plan.

    Args:
        sampler: chooses for rows with processors of their own.
    """

    is_planned = True

    def __init__(self, runner: DeviceRunner, plan: Plan, policy: object, sampler: host.Sampler) -> None:
        self.runner = runner
        self.plan = plan
        exit_ = None if len(plan.spans) == 1 else exit_of(plan, policy)
        self.depth = 0 if plan.checkpoint is None else plan.checkpoint
        self.threshold = 0.0 if plan.weighs or exit_ is None else plan.threshold(self.depth)
        self.choice = DeviceChoice(runner, sampler)
        self.drafter = None
        if exit_ is not None:
            vocabulary = getattr(policy, "vocabulary", None)
            self.drafter = DeviceDrafter(runner, exit_, self.depth, vocabulary, self.choice)
        self.without_tree = why_no_tree(plan, runner, self.drafter)
        has_trees = plan.draft_tree > 0 and self.without_tree is None
        ahead, trees = (AHEAD + plan.draft_tree, plan.trees) if has_trees else (AHEAD, {})
        self.settling: Settling | None = None if plan.settles_at is None else getattr(policy, "settling", None)
        most = runner.most_rows if plan.exact else min(runner.most_rows, most_slots(plan.most_drafts))
        self.residents = Residents(runner, exit_, plan.cache_gib, ahead, self.settling is None, trees, most)
        self._launched = 0
        self._most = MIN_COLUMNS  # columns that attention is planned for
        self._limits: list[int] = []

    @property
    def most_ahead(self) -> int:
        """Rounds that may be launched before those before them are read. In mode "fast" how many tokens may exit depends on how
        many did. Twice as many may write before the host knows of it, and attention must be planned for that."""
        if not self.is_full or self.choice.on_host:
            return 0
        if not self.runner.has_compiled_layers or self.shape is not None:
            return 1
        return min(AT_ONCE, BEYOND // (2 * (1 + self.lengths(self.slots.rows)[-1])))

    @property
    def rows(self) -> list[Row]:
        """Rows in the stage, those included whose texts have not run yet."""
        return self.residents.rows

    @property
    def is_short(self) -> bool:
        return self.residents.is_short

    @property
    def slots(self) -> Slots:
        return self.residents.slots

    @property
    def width(self) -> int:
        return self.slots.rows

    def tree(self, rows: int) -> TreeShape | None:
        """Return the tree of each row in rounds on `rows` slots; None: drafts are in a row."""
        return None if self.without_tree is not None else shape_for(self.plan, self.choice, rows)

    @property
    def shape(self) -> TreeShape | None:
        return self.tree(self.slots.rows)

    @staticmethod
    def levels(tokens: int) -> list[int]:
        """Return the numbers of columns that attention is planned for in texts of up to `tokens` tokens."""
        found = [MIN_COLUMNS]
        while found[-1] < tokens + BEYOND:
            found.append(4 * found[-1])
        return found

    def admit(self, rows: Sequence[Row]) -> int:
        """Let the first of these rows take part as soon as their texts have run, as many as there is room for."""
        if not rows:
            self.residents.is_short = False
            return 0
        with device_errors(), self.runner.grad_off(), self.runner.device_guard():
            count = self.residents.fitting(rows)
            if count:
                self._catch_up()
                self.residents.join([rows[place] for place in range(count)])
                self._compose()
            elif (why := self.residents.blocks.why_never(rows[0])) is not None:
                rows[0].fail(ValueError(why))
        return count

    def leave(self, *rows: Row) -> None:
        """Free the slots and the blocks of rows that have ended, were removed or are put back."""
        with device_errors(), self.runner.grad_off(), self.runner.device_guard():
            for row in rows:
                self._keep(row)
                self.residents.leave(row)
            if self.residents.rows and self.residents.allocator.is_oversized:
                self._catch_up()
                self.residents.allocator.shrink()
            self._compose()

    def close(self) -> None:
        """Give the slots back."""
        with device_errors(), self.runner.grad_off(), self.runner.device_guard():
            for row in self.rows:
                self._keep(row)
            self.residents.close()

    def _keep(self, row: Row) -> None:
        """Let texts that begin with that of a row find its K/V, where the full model made all of them."""
        if self.plan.exact and row.error is None and self.residents.has_more_to_keep(row):
            self._catch_up()
            self.residents.keep(row)

    def forget(self) -> None:
        """Give the slots up after an error: what is in them, and in graphs of them, may be half done."""
        self.residents.forget()

    def _catch_up(self) -> None:
        """Feed a memory head, so that rows that move to other slots have nothing waiting."""
        if self.drafter is not None and self.residents.rows:
            self.drafter.catch_up()

    def _compose(self) -> None:
        """Serve the rows that are there now."""
        self._limits = []
        if self.residents.rows:
            self.choice.serve(self.slots, self.residents.allocator.places)

    def launch(self) -> Launched:
        """Hand work to the device: texts of rows that joined, then a round that starts from what the one before left."""
        with self.runner.grad_off(), self.runner.device_guard():
            is_prefill = bool(self.residents.entering)
            is_typical, have_run = self._prefill()
            running = self.residents.running
            if not running:
                return Launched(list, is_prefill=True, is_typical=False)
            if have_run.issuperset(running) and not self.choice.on_host:
                return self._read_later(running, 0, is_prefill, self._launch_first() and is_typical)
            wanted, lengths = max(row.wanted or 0 for row in running), self.lengths(self.slots.rows)
            drafts = next((length for length in lengths if length >= wanted), lengths[-1])
            self._write_limits(drafts)
            is_typical &= self._launch_round(drafts)
            shape = self.shape if drafts else None
            tokens = 1 + (drafts if shape is None else shape.drafts)
            for row in running:  # counted when they run: a round launched ahead of the text's end is work too
                row.stats.layers_run += tokens * self.runner.num_layers
            return self._read_later(running, drafts, is_prefill, is_typical)

    def _prefill(self) -> tuple[bool, set[Row]]:
        """Run texts of rows that joined: one pass if others wait for their next round, otherwise all.

        Returns:
            is_typical: nothing was compiled or captured for it.
            have_run: rows whose newest tokens have run too.
        """
        is_typical, entering = True, self.residents.entering
        while self.residents.entering:
            others_wait = bool(self.residents.running)
            with device_errors():
                self._plan_columns(max(row.size for row in self.rows))
                if ready := self.residents.ready():
                    for own in ready:
                        own.takes_newest |= self.may_choose_first and not others_wait
                    is_typical &= self.texts().run(ready, self._most, others_wait)
                self.residents.start_ready()
            if others_wait:
                break
        return is_typical, {own.row for own in entering if own.takes_newest and own.is_done}

    @property
    def may_choose_first(self) -> bool:
        """True if rows may begin without a round. In mode "fast" the drafts of that round may be part of the text."""
        return self.is_full and self.runner.has_compiled_layers

    @property
    def is_full(self) -> bool:
        """True if every new token is chosen by the full model."""
        return self.plan.exact or self.drafter is None

    def texts(self) -> Prefill | ModulePrefill:
        """Return what runs texts of rows that joined."""
        if not self.runner.has_compiled_layers:
            return ModulePrefill(self.runner, self.slots, self.depth)
        prompts = self.runner.prompts(self.residents.exit, self.slots.columns)
        if self.settling is not None:
            return SettledPrefill(self.runner, prompts, self.depth, self.drafter, self.slots, self.settling)
        return Prefill(self.runner, prompts, self.depth, self.drafter, self.slots)

    def _plan_columns(self, longest: int) -> None:
        self._most = max(self._most, self.levels(longest)[-1])

    def reserve(self) -> list[Row]:
        """Take the blocks that the next rounds may need; return the rows, newest first, that had to leave for it."""
        with device_errors(), self.runner.grad_off(), self.runner.device_guard():
            moved = self.residents.allocator.widen()
            put_back = self.residents.reserve()
            if moved or put_back:
                self._compose()
            if self.residents.rows:
                self._plan_columns(max(row.size for row in self.rows))
        return put_back

    def lengths(self, rows: int) -> list[int]:
        """Return the numbers of drafts that rounds on `rows` slots have, of trees the levels. Rows may be limited to
        fewer of them."""
        if (shape := self.tree(rows)) is not None:
            return [0, shape.levels]
        most = self.plan.most_drafts
        return lengths_on(rows, most) if self.plan.exact else sorted({0, most})

    def run_nothing(self, rows: int, tokens: int, columns: int, drafts: int, features: Features | None) -> None:
        """Run a round on `rows` empty slots, planned for texts of `tokens` tokens; it is captured then.

        Args:
            columns: that attention is planned for: one of `levels`.
        """
        self._serve_nobody(rows, tokens, features)
        self._most = columns
        if self.drafter is not None:
            self.drafter.waiting = 1
            self.drafter.catch_up()
        self._launch_round(drafts)

    def choose_nothing(self, rows: int, tokens: int, features: Features | None) -> None:
        """Choose first tokens on such slots without any row; it is captured then."""
        self._serve_nobody(rows, tokens, features)
        self._launch_first()

    def _serve_nobody(self, rows: int, tokens: int, features: Features | None) -> None:
        self.residents.allocator.make_room_for(rows, tokens)
        self.choice.serve(self.slots, {}, features)

    def _write_limits(self, drafts: int) -> None:
        limits = [MOST_TOKENS] * self.slots.rows
        for place, row in self.residents.allocator.places.items():
            if (row.wanted or 0) < drafts:
                limits[place] = row.wanted or 0
        if limits != self._limits:
            write(self.slots.limits, torch.tensor(limits, dtype=torch.int32))
            self._limits = limits

    def _launch_round(self, drafts: int) -> bool:
        """Launch a round; return True if that was as fast as it will be from now on."""
        shape = self.shape if drafts else None
        vocabulary = Held(None if self.drafter is None else self.drafter.vocabulary)
        key = (shape or drafts, self._most, self.plan.exact, self.threshold, self.choice.features, vocabulary)
        with device_errors():
            is_typical = self.drafter is None or self.drafter.prepare(drafts)
            if shape is not None and self.drafter is not None:
                round_ = TreeRound(self.slots, shape, self.drafter, self._most, self.accept)
                return self.runner.launch(self.slots, ("tree", *key), lambda: run_round(round_, drafts)) and is_typical
            if not self.choice.on_host:
                return self.runner.launch(self.slots, ("round", *key), lambda: run_round(self, drafts)) and is_typical
            is_typical &= self.runner.launch(self.slots, ("passes", *key), lambda: run_passes(self, drafts))
        self.choice.choose_on_host(drafts)
        with device_errors():
            return self.runner.launch(self.slots, ("accept", *key), lambda: self.accept(drafts)) and is_typical

    def _launch_first(self) -> bool:
        """Launch the choice of the first new tokens of all rows; return True if that was as fast as it will be from now on."""
        with device_errors():
            return self.runner.launch(self.slots, ("first", self.choice.features), self.choose_first)

    def _read_later(self, rows: list[Row], drafts: int, is_prefill: bool, is_typical: bool) -> Launched:
        """Copy the result to the host; whoever asks for it waits for the copy."""
        copy, event = self.slots.pinned[self._launched % len(self.slots.pinned)], None
        copy.copy_(self.slots.result, non_blocking=True)
        if self.slots.result.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._launched += 1
        places, made = [row.slot for row in rows], [min(drafts, row.wanted or 0) for row in rows]
        shape = self.shape

        def results() -> list[tuple[Row, RoundResult]]:
            if event is not None:
                with device_errors():
                    event.synchronize()
            fields, found, layers = copy[:, : (SCORES if drafts else TOKENS + 1) + drafts].tolist(), [], self.runner.num_layers
            for row, place, count in zip(rows, places, made, strict=True):
                if not row.finished:
                    row.stats.catch_ups += bool(drafts)
                    if (result := self._result(row, fields[place], count, shape is not None, layers)) is not None:
                        found.append((row, result))
            return found

        return Launched(results, drafts, is_prefill, is_typical, self.slots.rows, shape, event)

    def _result(self, row: Row, fields: list[float], made: int, is_tree: bool, layers: int) -> RoundResult | None:
        """Return the outcome of a round for a row; None: it failed."""
        accepted, drafted = int(fields[ACCEPTED]), int(fields[DRAFTED])
        if accepted < 0:
            row.fail(ValueError(host.NOTHING_LEFT) if accepted == NOTHING_LEFT else FloatingPointError(host.NAN))
            return None
        full = Draft(int(fields[TOKENS + accepted]), layers)
        if not drafted:
            return RoundResult((full,), made=made)
        scores = fields[SCORES : SCORES + drafted]
        drafts = [Draft(int(fields[TOKENS + i]), self.depth, None if is_tree else scores[i]) for i in range(accepted)]
        if is_tree:  # in place of scores there are the drafts at each depth
            levels = [int(count) for count in scores if count]
            return RoundResult([*drafts, full], len(levels), accepted, made=made, levels=levels)
        return RoundResult([*drafts, full], drafted, accepted, scores=scores, made=made)

    def choose_first(self) -> None:
        """Choose the tokens after those that have run with their texts."""
        self._states = self.slots.last
        self.sample(0)
        self.accept(0)
        if self.drafter is not None:
            self.drafter.settle()

    # ---- the parts of a round: what a graph captures ------------------------------------------------------------------------

    def draft(self, step: int) -> bool:
        assert self.drafter is not None
        if not step:
            self.drafter.begin()
        self.drafter.draft(step, self._most)
        return True

    def deep_pass(self, drafted: int) -> None:
        slots, own, drafter = self.slots, slice(0, drafted + 1), self.drafter
        states, tokens = slots.states_of(own), slots.of(own)
        if drafter is not None and not drafted:
            drafter.begin()
        if drafter is not None and self.depth:
            drafter.shallow(slice(drafted, drafted + 1), self._most, waits=not drafted)
        else:
            self.runner.embed_on_slots(slots, tokens, states)
        self._states, span = states, range(self.depth, self.runner.num_layers)
        if drafter is None:
            for _ in self.runner.layers_on_slots(slots, span, states, tokens, self._most, ()):
                pass
        elif not drafted:
            drafter.deep_without_drafts(span, states, tokens, self._most)
        else:
            self._states = states.clone()  # the exit head will want the states at the checkpoint again
            drafter.through(span, self._states, tokens, self._most, drafter.noted(own))
            drafter.score(drafted)
            drafter.remember(drafted)

    def sample(self, drafted: int) -> None:
        found, best = self.slots.found[: drafted + 1].flatten(), self.slots.best[: drafted + 1].flatten()
        self.choice.choose(self._states, self.choice.of(slice(0, drafted + 1)), found, best)

    def accept(self, drafted: int) -> None:
        slots = self.slots
        self.runner.exits.accept(
            slots.found, slots.best, slots.tokens, slots.starts, slots.scores, slots.active, slots.result, slots.limits,
            drafted, self.threshold, self.plan.exact,
        )  # fmt: skip
        self.choice.count()
        if self.drafter is not None and drafted:
            self.drafter.settle()
