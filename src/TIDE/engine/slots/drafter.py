"""Drafts of captured rounds: one checkpoint, its head and its router.

A head that remembers (`memory`, `eagle3`: see `slots/heads.py`) keeps its own K/V and the states of finished tokens in the
slots. When drafting does not pay, rounds run with no drafts. Tokens such a head has missed are buffered and fed to it sixteen
at a time, or as soon as it is needed again.
"""

from __future__ import annotations

import copy

import torch

from TIDE.engine.cache.slots import Memory, Slots, Tokens
from TIDE.engine.request.plan import Plan
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.heads import DeviceEagleHead, device_head
from TIDE.engine.slots.sampler import DeviceChoice
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


class DeviceDrafter:
    """Makes drafts on slots.

    Args:
        vocabulary: the token ids that exits choose from; None: all.
    """

    def __init__(
        self, runner: DeviceRunner, exit_: Exit, depth: int, vocabulary: torch.Tensor | None, choice: DeviceChoice
    ) -> None:
        self.runner = runner
        self.choice = choice
        self.exit = exit_
        self.depth = depth
        self.vocabulary = vocabulary
        self.waiting = 0  # tokens that the head was not fed, of the row that has most of them
        self.head = device_head(runner, exit_.head, depth)
        self.depths = [] if self.head is None else self.head.depths
        self.lm_head = self.head.lm_head if isinstance(self.head, DeviceEagleHead) else runner.lm_head_on_slots
        self._slots: Slots | None = None

    @property
    def slots(self) -> Slots:
        """Those of the round, if not others."""
        return self.choice.slots if self._slots is None else self._slots

    def on(self, slots: Slots) -> DeviceDrafter:
        """Return the same on other slots."""
        found = copy.copy(self)
        found._slots = slots
        return found

    @property
    def memory(self) -> Memory | None:
        return self.slots.memory

    # ---- before a round ----------------------------------------------------------------------------------------------------

    def prepare(self, drafts: int) -> bool:
        """Feed the head the tokens it missed if a round needs it; return True if there was nothing to feed."""
        has_fed = self.catch_up() if drafts or self.waiting == MOST_TOKENS else False
        self.waiting = 0 if drafts else self.waiting + 1
        return not has_fed

    def catch_up(self) -> bool:
        """Feed the head what it missed; return True if there was something."""
        memory, waiting = self.memory, self.waiting
        self.waiting = 0
        if memory is None or not waiting:
            return False
        self.runner.graphs.launch(self.slots, "feed", lambda: self._feed(memory))
        return True

    # ---- inside a round ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out where a head that remembers has what belongs to the tokens of the round."""
        if self.memory is not None:
            self._find_places(self.slots.grid.starts[0], self.slots.grid.places, self.slots.grid.ring)

    def draft(self, step: int, most: int) -> None:
        """Choose the token after the newest one of every row, and score it."""
        slots, own = self.slots, slice(step, step + 1)
        at = slice(step * slots.rows, (step + 1) * slots.rows)
        if self.depth:
            self.shallow(own, most)
        elif self.memory is None:
            self.runner.embed_on_slots(slots, slots.of(own), slots.states[at])
        if self.memory is None:
            slots.drafts.guesses[at].copy_(self.exit.head(slots.states[at]))
        else:
            self.guess(slots.of(own), slots.states[at], most, slots.drafts.guesses[at])
        chosen = slots.chain.tokens[step + 1], slots.chain.best[0], slots.drafts.signals[at]
        self.choice.choose(slots.drafts.guesses[at], self.choice.of(own), *chosen, self.vocabulary, lm_head=self.lm_head)

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
        self.through(range(self.depth), states, tokens, most, *(self._waiting() if waits else (self.noted(own),)))

    def deep_without_drafts(self, span: range, states: torch.Tensor, tokens: Tokens, most: int) -> None:
        """Take states at the checkpoint, in place, through the deep layers, and keep what the head will be fed later."""
        if self.memory is not None:
            self._enter(tokens, states, self.memory.entries, self.slots.grid.ring[0])
        self.through(span, states, tokens, most, *self._waiting())

    def _waiting(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return where notes of tokens wait for the head: a table, and the rows of it."""
        return (None, None) if self.memory is None else (self.memory.parts, self.slots.grid.ring[0])

    def noted(self, own: slice) -> torch.Tensor | None:
        """Return room for what a head will remember of the tokens of some steps; None: it does not."""
        rows = self.slots.rows
        return None if self.memory is None else self.memory.noted[own.start * rows : own.stop * rows]

    def through(
        self,
        span: range,
        states: torch.Tensor,
        tokens: Tokens,
        most: int,
        noted: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
    ) -> None:
        """Take states, in place, through layers, and note what a head will remember of them.

        Args:
            noted, places: where to: a table, and the rows of it; None: all in their order.
        """
        if noted is not None and not span.start and 0 in self.depths:
            self.note_at(0, states, noted, places)
        for depth, found in self.runner.layers_on_slots(self.slots, span, states, tokens, most, tuple(self.depths)):
            if noted is not None:
                self.note_at(depth, found, noted, places)

    def note(self, number: int, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Write what a head will remember of (n, hidden) states at one of its depths."""
        assert self.head is not None
        self.head.note(number, states, out, places)

    def note_at(self, depth: int, states: torch.Tensor, noted: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Do so in the columns that a table has for the depth."""
        number, width = self.depths.index(depth), states.shape[1]
        self.note(number, states, noted[:, number * width : (number + 1) * width], places)

    def remember(self, drafts: int) -> None:
        """Remember the newest final token and drafts, which have run all layers, and write K/V of the tokens after them."""
        memory, slots, own = self.memory, self.slots, slice(0, drafts + 1)
        if memory is None:
            return
        tokens, states, parts = slots.of(own), slots.states_of(own), self.noted(own)
        assert parts is not None
        self._remember(parts, tokens.after)
        later = slots.of(slice(1, drafts + 1))  # K/V of the first are there: it was asked for a draft
        self._keep(self._entered(memory, later, states[slots.rows :]), later)

    def remember_prompt(self, tokens: Tokens, states: torch.Tensor, parts: torch.Tensor) -> None:
        """Let a head that remembers see tokens of prompts, which have run.

        Args:
            states: (n, hidden) of them at the checkpoint.
        """
        memory = self.memory
        assert memory is not None
        self._remember(parts, tokens.after)
        self._keep(self._entered(memory, tokens, states), tokens)

    def mark_fed(self) -> None:
        """Note that the head was fed everything before the newest tokens."""
        if self.memory is not None:
            self.memory.fed.copy_(self.slots.grid.starts[0])

    def _find_places(self, starts: torch.Tensor, places: torch.Tensor, ring: torch.Tensor) -> None:
        slots = self.slots
        self.runner.exits.find_places(slots.tables, slots.grid.rows[0], starts, slots.store.size, places, ring)

    def guess(
        self, tokens: Tokens, states: torch.Tensor, most: int, out: torch.Tensor, before: torch.Tensor | None = None
    ) -> None:
        """Let a head that remembers guess from tokens.

        Args:
            states: (n, hidden) of them at the checkpoint.
            before: the table that has memories at their places; None: that of the blocks.
        """
        assert self.memory is not None and self.head is not None
        table = self.slots.store.before if before is None else before
        x = self._entered(self.memory, tokens, states, table)
        self.head.guess(self.slots, tokens, x, most, table, out)

    def carry(self, guesses: torch.Tensor) -> None:
        """Turn guesses, in place, into the memories that they stand for."""
        assert self.head is not None
        self.head.carry(guesses)

    def _entered(
        self, memory: Memory, tokens: Tokens, states: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return tokens as the head's block takes them."""
        joined = states.new_empty(len(states), memory.entries.shape[1])
        self._enter(tokens, states, joined)
        return self._join(joined, tokens.places, before)

    def _enter(self, tokens: Tokens, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None) -> None:
        """Write what the head sees of the tokens themselves."""
        assert self.head is not None
        width = states.shape[1]
        for number, depth in enumerate(self.head.inputs):
            table, rows = (states, None) if depth else self.runner.embedded(self.slots, tokens)
            self.head.enter(number, table, rows, out[:, number * width : (number + 1) * width], places)

    def _join(self, joined: torch.Tensor, places: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
        assert self.head is not None
        return self.head.join(joined, self.slots.store.before if before is None else before, places)

    def _feed(self, memory: Memory) -> None:
        """Make memories and K/V of tokens that wait: always sixteen, and those behind the newest are overwritten later."""
        slots = self.slots
        places, ring = torch.zeros_like(slots.grid.places), torch.zeros_like(slots.grid.ring)
        self._find_places(memory.fed, places, ring)
        positions = (memory.fed + slots.grid.steps).flatten()
        ids, rows = slots.chain.tokens[:-1].flatten(), slots.grid.rows.flatten()
        tokens = Tokens(ids, rows, positions, places[:-1].flatten(), places[1:].flatten())
        waiting = ring.flatten()
        self._remember(memory.parts[waiting], tokens.after)
        self._keep(self._join(memory.entries[waiting], tokens.places), tokens)
        memory.fed.copy_(slots.grid.starts[0])

    def _remember(self, parts: torch.Tensor, places: torch.Tensor) -> None:
        assert self.head is not None
        self.head.remember(parts, self.slots.store.before, places)

    def _keep(self, x: torch.Tensor, tokens: Tokens) -> None:
        assert self.head is not None
        self.head.keep(self.slots, tokens, x)
