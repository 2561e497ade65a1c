"""Texts of rows that join, run before their first round: many rows in one pass, and while others decode one pass at a time."""

from __future__ import annotations

from collections.abc import Callable

from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device import DeviceRunner, device_errors
from TIDE.engine.runners.prompt_pass import PromptPass
from TIDE.engine.slots.launcher import RoundLauncher
from TIDE.engine.slots.module_prefill import ModulePrefill
from TIDE.engine.slots.prefill import Prefill
from TIDE.engine.slots.residents import Residents


class PromptRunner:
    """Runs texts of rows that join.

    Args:
        prompt_pass: how they run; None: through all layers.
    """

    def __init__(
        self, runner: DeviceRunner, residents: Residents, launcher: RoundLauncher, prompt_pass: PromptPass | None
    ) -> None:
        self.runner = runner
        self.residents = residents
        self.launcher = launcher
        self.prompt_pass = prompt_pass

    @property
    def may_choose_first(self) -> bool:
        """True if rows may begin without a round. In mode "fast" the drafts of that round may be part of the text."""
        return self.launcher.round.is_full and self.runner.has_compiled_layers

    def passes(self) -> Prefill | ModulePrefill:
        """Return what takes texts through the model."""
        slots, round_ = self.residents.slots, self.launcher.round
        if not self.runner.has_compiled_layers:
            return ModulePrefill(self.runner, slots, round_.depth)
        prompts = self.runner.pool.prompts(self.residents.exit, slots.columns)
        make: Callable[..., Prefill] = Prefill if self.prompt_pass is None else self.prompt_pass.prefill
        return make(self.runner, prompts, round_.depth, round_.drafter, slots)

    def run(self) -> tuple[bool, set[Row]]:
        """Run one pass if others wait for their next round, otherwise all.

        Returns:
            is_typical: nothing was compiled or captured for it.
            have_run: rows whose newest tokens have run too.
        """
        residents = self.residents
        is_typical, entering = True, residents.entering
        while residents.entering:
            others_wait = bool(residents.running)
            with device_errors():
                self.launcher.plan_columns(max(row.size for row in residents.rows))
                if ready := residents.ready():
                    for own in ready:
                        own.takes_newest |= self.may_choose_first and not others_wait
                    is_typical &= self.passes().run(ready, self.launcher.columns, others_wait)
                residents.start_ready()
            if others_wait:
                break
        return is_typical, {own.row for own in entering if own.takes_newest and own.is_done}
