"""Drafts of captured rounds: one checkpoint, its head and its router.

A head that remembers (`memory`, `eagle3`: see `slots/heads.py`) keeps its own K/V and captures the states of finished tokens.
When drafting does not pay, rounds run with no drafts; tokens that the head has missed are fed to it as soon as it is needed
again, or when sixteen wait.
"""

from __future__ import annotations

import copy

import torch

from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.request.plan import Plan
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.heads import SlotEagleHead, slot_head
from TIDE.engine.slots.sampler import SlotSampler
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.exits import Exit
from TIDE.routing.heads import EPS, IdentityHead
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router import Router


def why_not_planned(plan: Plan, policy: ExitPolicy | None) -> str | None:
    """Return why the exits of a plan cannot draft in rounds that are launched as a whole; None: they can."""
    if len(plan.spans) == 1:
        return None
    if policy is None or plan.checkpoint is None or plan.checkpoint not in policy.exits:
        return "its exits are an ExitPolicy of its own" if len(plan.spans) == 2 else "mode fast asks several exits in turn"
    if not plan.catches_up:
        return f"kv_cache_strategy={plan.kv_cache_strategy!r} writes K/V after every exit"
    if not plan.exact and plan.max_pending >= MOST_TOKENS:
        return f"max_pending={plan.max_pending} is more than a round has room for"
    if isinstance(exit_of(plan, policy).head, IdentityHead) and not plan.checkpoint:
        return "its exit predicts from the embedding alone"
    return None


def exit_of(plan: Plan, policy: ExitPolicy) -> Exit:
    """Return the exit that captured rounds draft from."""
    assert plan.checkpoint is not None
    return policy.exits[plan.checkpoint]


class SlotDrafter:
    """Makes drafts on slots.

    Args:
        vocabulary: the token ids that exits choose from; None: all.

    Attributes:
        head: if it is one that remembers.
        depths: whose states it captures.
        waiting: tokens that it was not fed, of the row that has most of them.
    """

    def __init__(
        self, runner: DeviceRunner, exit_: Exit, depth: int, vocabulary: torch.Tensor | None, choice: SlotSampler
    ) -> None:
        self.runner = runner
        self.choice = choice
        self.exit = exit_
        self.depth = depth
        self.vocabulary = vocabulary
        self.waiting = 0
        self.head = slot_head(runner, exit_.head, depth)
        self.depths = () if self.head is None else tuple(self.head.depths)
        self.lm_head = self.head.lm_head if isinstance(self.head, SlotEagleHead) else runner.lm_head_on_slots
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        """Those of the round, if not others."""
        return self.choice.slots if self._slots is None else self._slots

    def on(self, slots: Slots) -> SlotDrafter:
        """Return the same on other slots."""
        other = copy.copy(self)
        other._slots = slots
        return other

    # ---- before a round ----------------------------------------------------------------------------------------------------

    def prepare(self, drafts: int) -> bool:
        """Feed the head the tokens it missed if a round needs it; return True if there was nothing to feed."""
        has_fed = self.catch_up() if drafts or self.waiting == MOST_TOKENS else False
        self.waiting = 0 if drafts else self.waiting + 1
        return not has_fed

    def catch_up(self) -> bool:
        """Feed the head the tokens it missed; return True if there were any."""
        head, slots, waiting = self.head, self.slots, self.waiting
        self.waiting = 0
        if head is None or not waiting:
            return False
        self.runner.graphs.launch(slots, "feed", lambda: head.feed(slots))
        return True

    # ---- inside a round ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Compute the head's slot mapping for this round."""
        if self.head is not None:
            grid = self.slots.grid
            self.head.map_slots(self.slots, grid.starts[0], grid.places, grid.ring)

    def draft(self, step: int, most: int) -> None:
        """Choose the token after the newest one of every row."""
        slots, own = self.slots, slice(step, step + 1)
        at = slice(step * slots.rows, (step + 1) * slots.rows)
        states, guesses, tokens = slots.states[at], slots.drafts.guesses[at], slots.of(own)
        if self.depth:
            self.shallow(own, most)
        elif self.head is None:
            self.runner.embed_on_slots(slots, tokens, states)
        if self.head is None:
            guesses.copy_(self.exit.head(states))
        else:
            self.head.draft(slots, tokens, states, most, guesses)
        chosen = slots.chain.tokens[step + 1], slots.chain.best[0], slots.drafts.signals[at]
        self.choice.choose(guesses, self.choice.of(own), *chosen, self.vocabulary, lm_head=self.lm_head)

    def score(self, drafts: int) -> None:
        """Score the drafts of a round, all at once."""
        own, router = self.slots.drafts, self.exit.router
        guesses, signals = (buffer[: drafts * self.slots.rows] for buffer in (own.guesses, own.signals))
        scores = self.slots.chain.scores[:drafts].flatten()
        if not isinstance(router, Router):
            scores.copy_(signals[:, 0])  # the probability of its best token
            return
        assert own.score_params is not None, "these slots are of an exit with a router"
        weights = router.down.weight, router.down.bias, router.up.weight
        self.runner.exits.router_score(guesses, signals, *weights, own.score_params, EPS, scores)

    def shallow(self, own: slice, most: int, waits: bool = False) -> None:
        """Take the tokens of a step to the checkpoint.

        Args:
            waits: they are those of a round without drafts.
        """
        states, tokens = self.slots.states_of(own), self.slots.of(own)
        self.runner.embed_on_slots(self.slots, tokens, states)
        self.through(range(self.depth), states, tokens, most, *self.captured(own, waits))

    def deep_without_drafts(self, span: range, states: torch.Tensor, tokens: Tokens, most: int) -> None:
        """Take states at the checkpoint, in place, through the deep layers, and keep what the head will be fed later."""
        memory, ring = self.slots.memory, self.slots.grid.ring[0]
        if self.head is not None and memory is not None:
            self.head.write_inputs(self.slots, tokens, states, memory.entries, ring)
        self.through(span, states, tokens, most, *self.captured(slice(0, 1), waits=True))

    def captured(self, own: slice, waits: bool = False) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the buffer for captured states of some steps' tokens, and the rows of it; None: all in their order.

        Args:
            waits: the tokens are not fed to the head yet.
        """
        memory, rows = self.slots.memory, self.slots.rows
        if memory is None:
            return None, None
        return (memory.parts, self.slots.grid.ring[0]) if waits else (memory.captured[own.start * rows : own.stop * rows], None)

    def through(
        self,
        span: range,
        states: torch.Tensor,
        tokens: Tokens,
        most: int,
        out: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Take states, in place, through layers, and capture those that the head remembers.

        Args:
            out, places: where to: a table, and the rows of it; None: all in their order.
        """
        head = None if out is None else self.head
        if head is not None and out is not None and not span.start and 0 in self.depths:
            head.capture_at(0, states, out, places)
        for depth, reached in self.runner.layers_on_slots(self.slots, span, states, tokens, most, self.depths):
            if head is not None and out is not None:
                head.capture_at(depth, reached, out, places)

    def remember(self, drafts: int) -> None:
        """Remember the newest final token and drafts, which have run all layers, and write K/V of the tokens after them."""
        head, slots, own = self.head, self.slots, slice(0, drafts + 1)
        captured, _ = self.captured(own)
        if head is None or captured is None:
            return
        head.remember(captured, slots.store.before, slots.of(own).after)
        later = slots.of(slice(1, drafts + 1))  # K/V of the first are there: it was asked for a draft
        head.keep(slots, later, head.fused(slots, later, slots.states_of(own)[slots.rows :]))

    def remember_prompt(self, tokens: Tokens, states: torch.Tensor, captured: torch.Tensor) -> None:
        """Let the head see tokens of prompts, which have run, by their (n, hidden) states at the checkpoint."""
        assert self.head is not None
        self.head.remember(captured, self.slots.store.before, tokens.after)
        self.head.keep(self.slots, tokens, self.head.fused(self.slots, tokens, states))

    def mark_fed(self) -> None:
        """Note that the head was fed everything before the newest tokens."""
        if self.slots.memory is not None:
            self.slots.memory.fed.copy_(self.slots.grid.starts[0])
