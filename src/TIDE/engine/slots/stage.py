"""Rounds on a device, launched as a whole and without the host in between.

A round is one graph. The host reads one small result buffer per round while the next round is already running; a round's
inputs never leave the device. With exits off a round is a step of the full model. Where a row has processors of its own, the
host chooses between two graphs: drafts and deep pass before it, acceptance behind it.

Rows come and go between rounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from TIDE.engine.cache.slots import AT_ONCE, most_slots
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device import DeviceRunner, device_errors
from TIDE.engine.slots.drafter import SlotDrafter, exit_of
from TIDE.engine.slots.launcher import BEYOND, RoundLauncher
from TIDE.engine.slots.prompts import PromptRunner
from TIDE.engine.slots.residents import AHEAD, Residents
from TIDE.engine.slots.round import SlotRound
from TIDE.engine.slots.sampler import SlotSampler
from TIDE.kernels.reference.trees import TreeShape
from TIDE.routing.policy import ExitPolicy


class SlotStage:
    """Rows on slots, all by one plan.

    Args:
        sampler: chooses for rows with processors of their own.
    """

    is_planned = True

    def __init__(self, runner: DeviceRunner, plan: Plan, policy: ExitPolicy | None, sampler: Sampler) -> None:
        self.runner = runner
        self.plan = plan
        self.choice = SlotSampler(runner, sampler)
        exit_ = self.drafter = None
        if policy is not None and len(plan.spans) > 1:
            exit_ = exit_of(plan, policy)
            self.drafter = SlotDrafter(runner, exit_, plan.checkpoint or 0, policy.vocabulary, self.choice)
        self.launcher = RoundLauncher(runner, plan, SlotRound(runner, plan, self.drafter, self.choice))
        has_trees = plan.draft_tree > 0 and self.launcher.without_tree is None
        ahead, trees = (AHEAD + plan.draft_tree, plan.trees) if has_trees else (AHEAD, {})
        most = runner.most_rows if plan.exact else min(runner.most_rows, most_slots(plan.most_drafts))
        self.residents = Residents(runner, exit_, plan.cache_gib, ahead, plan.prompt_pass is None, trees, most)
        self.prompts = PromptRunner(runner, self.residents, self.launcher, plan.prompt_pass)

    @property
    def most_ahead(self) -> int:
        """Rounds that may be launched before those before them are read. In mode "fast" how many tokens may exit depends on how
        many did. Twice as many may write before the host knows of it, and attention must be planned for that."""
        if not self.launcher.round.is_full or self.choice.on_host:
            return 0
        if not self.runner.has_compiled_layers or self.shape is not None:
            return 1
        return min(AT_ONCE, BEYOND // (2 * (1 + self.launcher.lengths(self.width)[-1])))

    @property
    def rows(self) -> list[Row]:
        """Rows in the stage, those included whose texts have not run yet."""
        return self.residents.rows

    @property
    def is_short(self) -> bool:
        return self.residents.is_short

    @property
    def width(self) -> int:
        return self.residents.slots.rows

    @property
    def shape(self) -> TreeShape | None:
        return self.launcher.tree(self.width)

    def admit(self, rows: Sequence[Row]) -> int:
        """Let the first of these rows take part as soon as their texts have run, as many as there is room for."""
        if not rows:
            self.residents.is_short = False
            return 0
        with device_errors(), self.runner.grad_off(), self.runner.device_guard():
            count = self.residents.fitting(rows)
            if count:
                self._feed()
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
                self._feed()
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
            self._feed()
            self.residents.keep(row)

    def forget(self) -> None:
        """Give the slots up after an error: what is in them, and in graphs of them, may be half done."""
        self.residents.forget()

    def _feed(self) -> None:
        """Feed a memory head, so that rows that move to other slots have nothing waiting."""
        if self.drafter is not None and self.residents.rows:
            self.drafter.catch_up()

    def _compose(self) -> None:
        """Serve the rows that are there now."""
        self.launcher.forget_limits()
        if self.residents.rows:
            self.choice.serve(self.residents.slots, self.residents.allocator.places)

    def launch(self) -> Launched:
        """Hand work to the device: texts of rows that joined, then a round that starts from what the one before left."""
        residents, launcher = self.residents, self.launcher
        with self.runner.grad_off(), self.runner.device_guard():
            is_prefill = bool(residents.entering)
            is_typical, have_run = self.prompts.run()
            running = residents.running
            if not running:
                return Launched(list, is_prefill=True, is_typical=False)
            slots = residents.slots
            if have_run.issuperset(running) and not self.choice.on_host:
                plan = launcher.plan_first(slots)
                is_typical &= launcher.launch_first(slots)
            else:
                plan = launcher.plan_round(slots, running, residents.allocator.places)
                is_typical &= launcher.launch(slots, plan)
                for row in running:  # counted when they run: a round launched ahead of the text's end is work too
                    row.stats.layers_run += plan.tokens * self.runner.num_layers
            return launcher.read_later(slots, running, plan, is_prefill, is_typical)

    def reserve(self) -> list[Row]:
        """Take the blocks that the next rounds may need; return the rows, newest first, that had to leave for it."""
        with device_errors(), self.runner.grad_off(), self.runner.device_guard():
            moved = self.residents.allocator.widen()
            put_back = self.residents.reserve()
            if moved or put_back:
                self._compose()
            if self.residents.rows:
                self.launcher.plan_columns(max(row.size for row in self.rows))
        return put_back
