"""A round on slots, drafts in a row: what a CUDA graph captures. Trees of drafts: `tree_round.py`."""

from __future__ import annotations

from TIDE.engine.cache.slots import Slots
from TIDE.engine.request.plan import Plan
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.drafter import SlotDrafter
from TIDE.engine.slots.sampler import SlotSampler

MIN_COLUMNS = 1024  # of the smallest graphs; the next ones have four times as many, and so on


class SlotRound:
    """The parts of a round.

    Args:
        drafter: None: exits are off, and a round is a step of the full model.

    Attributes:
        depth: of the exit.
        threshold: of scores, where scores decide which drafts are kept.
        most: columns that attention is planned for.
    """

    def __init__(self, runner: DeviceRunner, plan: Plan, drafter: SlotDrafter | None, choice: SlotSampler) -> None:
        self.runner = runner
        self.drafter = drafter
        self.choice = choice
        self.exact = plan.exact
        self.depth = 0 if plan.checkpoint is None else plan.checkpoint
        self.threshold = 0.0 if plan.weighs or drafter is None else plan.threshold(self.depth)
        self.most = MIN_COLUMNS

    @property
    def slots(self) -> Slots:
        return self.choice.slots

    @property
    def is_full(self) -> bool:
        """True if every new token is chosen by the full model."""
        return self.exact or self.drafter is None

    def draft(self, step: int) -> bool:
        assert self.drafter is not None
        if not step:
            self.drafter.begin()
        self.drafter.draft(step, self.most)
        return True

    def deep_pass(self, drafted: int) -> None:
        slots, own, drafter = self.slots, slice(0, drafted + 1), self.drafter
        states, tokens = slots.states_of(own), slots.of(own)
        if drafter is not None and not drafted:
            drafter.begin()
        if drafter is not None and self.depth:
            drafter.shallow(slice(drafted, drafted + 1), self.most, waits=not drafted)
        else:
            self.runner.embed_on_slots(slots, tokens, states)
        self._states, span = states, range(self.depth, self.runner.num_layers)
        if drafter is None:
            for _ in self.runner.layers_on_slots(slots, span, states, tokens, self.most, ()):
                pass
        elif not drafted:
            drafter.deep_without_drafts(span, states, tokens, self.most)
        else:
            self._states = states.clone()  # the exit head will want the states at the checkpoint again
            drafter.through(span, self._states, tokens, self.most, *drafter.captured(own))
            drafter.score(drafted)
            drafter.remember(drafted)

    def sample(self, drafted: int) -> None:
        found, best = self.slots.chain.found[: drafted + 1].flatten(), self.slots.chain.best[: drafted + 1].flatten()
        self.choice.choose(self._states, self.choice.of(slice(0, drafted + 1)), found, best)

    def accept(self, drafted: int) -> None:
        slots, chain = self.slots, self.slots.chain
        self.runner.exits.accept(
            chain.found, chain.best, chain.tokens, slots.grid.starts, chain.scores, slots.control.active, slots.result.latest,
            slots.control.limits, drafted, self.threshold, self.exact,
        )  # fmt: skip
        self.choice.count()
        if self.drafter is not None and drafted:
            self.drafter.mark_fed()

    def choose_first(self) -> None:
        """Choose the tokens after those that have run with their texts."""
        self._states = self.slots.last
        self.sample(0)
        self.accept(0)
        if self.drafter is not None:
            self.drafter.mark_fed()
