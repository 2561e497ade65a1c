"""Drafts of captured rounds: one checkpoint, whose head is `identity`, `lens` or `memory`, and its router.

A memory head keeps its own K/V and the states of finished tokens in the slots. When drafting does not pay, rounds run with no
drafts. Tokens the memory head has missed are buffered and fed to it sixteen at a time, or as soon as it is needed again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from TIDE.engine.cache.slots import Memory, Slots, Tokens
from TIDE.engine.plan import Plan
from TIDE.engine.round.device_choice import DeviceChoice
from TIDE.engine.runners.device import DeviceRunner
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.eagle3.head import EagleHead
from TIDE.routing.exits import Exit
from TIDE.routing.heads import EPS, IdentityHead, MemoryHead, input_depths, memory_depths
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router import Router


def why_not_planned(plan: Plan, policy: ExitPolicy | None) -> str | None:
    """Return why the exits of a plan cannot draft in rounds that are launched as a whole; None: they can."""
    if len(plan.spans) == 1:
        return None
    if plan.checkpoint is None or plan.checkpoint not in getattr(policy, "exits", {}):
        return "its exits are an ExitPolicy of its own" if len(plan.spans) == 2 else "mode fast asks several exits in turn"
    if not plan.catches_up:
        return f"kv_cache_strategy={plan.kv_cache_strategy!r} writes K/V after every exit"
    if not plan.exact and plan.max_pending >= MOST_TOKENS:
        return f"max_pending={plan.max_pending} is more than a round has room for"
    if isinstance(exit_of(plan, policy).head, EagleHead):
        return "an EAGLE-3 head drafts between passes"
    if isinstance(exit_of(plan, policy).head, IdentityHead) and not plan.checkpoint:
        return "its exit predicts from the embedding alone"
    return None


def exit_of(plan: Plan, policy: Any) -> Exit:
    """Return the exit that captured rounds draft from."""
    found: Exit = policy.exits[plan.checkpoint]
    return found


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
        self.waiting = 0  # tokens that the memory head was not fed, of the row that has most of them
        self.has_memory = isinstance(exit_.head, MemoryHead)
        self.depths = memory_depths(runner.num_layers, exit_.sizes.memories) if self.has_memory else []
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
        """Feed the memory head the tokens it missed if a round needs it; return True if there was nothing to feed."""
        has_fed = self.catch_up() if drafts or self.waiting == MOST_TOKENS else False
        self.waiting = 0 if drafts else self.waiting + 1
        return not has_fed

    def catch_up(self) -> bool:
        """Feed the memory head what it missed; return True if there was something."""
        memory, waiting = self.memory, self.waiting
        self.waiting = 0
        if memory is None or not waiting:
            return False
        self.runner.launch(self.slots, "feed", lambda: self._feed(memory))
        return True

    # ---- inside a round ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out where the memory head has what belongs to the tokens of the round."""
        if self.memory is not None:
            self._find_places(self.slots.starts[0], self.slots.places, self.slots.ring)

    def draft(self, step: int, most: int) -> None:
        """Choose the token after the newest one of every row, and score it."""
        slots, own = self.slots, slice(step, step + 1)
        at = slice(step * slots.rows, (step + 1) * slots.rows)
        if self.depth:
            self.shallow(own, most)
        elif self.memory is None:
            self.runner.embed_on_slots(slots, slots.of(own), slots.states[at])
        if self.memory is None:
            slots.guesses[at].copy_(self.exit.head(slots.states[at]))
        else:
            self.guess(slots.of(own), slots.states[at], most, slots.guesses[at])
        signals = slots.signals[at]
        self.choice.choose(
            slots.guesses[at], self.choice.of(own), slots.tokens[step + 1], slots.best[0], signals, self.vocabulary
        )

    def score(self, drafts: int) -> None:
        """Score the drafts of a round, all at once."""
        slots, router = self.slots, self.exit.router
        assert isinstance(router, Router)
        count = drafts * slots.rows
        weights = router.down.weight, router.down.bias, router.up.weight
        scores = slots.scores[:drafts].flatten()
        self.runner.exits.router_score(slots.guesses[:count], slots.signals[:count], *weights, slots.score_params, EPS, scores)

    def shallow(self, own: slice, most: int) -> None:
        """Take the tokens of a step to the checkpoint."""
        states, tokens = self.slots.states_of(own), self.slots.of(own)
        self.runner.embed_on_slots(self.slots, tokens, states)
        self.through(range(self.depth), states, tokens, most, self.noted(own))

    def noted(self, own: slice) -> torch.Tensor | None:
        """Return room for what a memory head will remember of the tokens of some steps; None: there is no such head."""
        rows = self.slots.rows
        return None if self.memory is None else self.memory.noted[own.start * rows : own.stop * rows]

    def through(self, span: range, states: torch.Tensor, tokens: Tokens, most: int, noted: torch.Tensor | None = None) -> None:
        """Take states, in place, through layers, and note what a memory head will remember of them."""
        width = states.shape[1]
        for depth, found in self.runner.layers_on_slots(self.slots, span, states, tokens, most, tuple(self.depths)):
            if noted is not None:
                place = self.depths.index(depth) * width
                self.runner.exits.normalize_into(found, None, noted[:, place : place + width], EPS)

    def observe(self, drafts: int) -> None:
        """Remember finished tokens in place of guesses, and write K/V of the tokens after them; without drafts, keep what that
        takes for later."""
        memory, slots, own = self.memory, self.slots, slice(0, drafts + 1)
        if drafts:
            self.score(drafts)
            self.remember(drafts)
        elif memory is not None:
            tokens, states, parts = slots.of(own), slots.states_of(own), memory.noted[: slots.rows]
            memory.parts.index_copy_(0, slots.ring[0], parts)
            self._enter(memory, tokens, states, memory.entries, slots.ring[0])

    def remember(self, drafts: int) -> None:
        """Remember the newest final token and drafts, which have run all layers, and write K/V of the tokens after them."""
        memory, slots, own = self.memory, self.slots, slice(0, drafts + 1)
        if memory is None:
            return
        tokens, states, parts = slots.of(own), slots.states_of(own), self.noted(own)
        assert parts is not None
        self._remember(memory, parts, tokens.after)
        later = slots.of(slice(1, drafts + 1))  # K/V of the first are there: it was asked for a draft
        self._keep(memory, self._entered(memory, later, states[slots.rows :]), later)

    def remember_prompt(self, tokens: Tokens, states: torch.Tensor, parts: torch.Tensor) -> None:
        """Let the memory head see tokens of prompts, which have run.

        Args:
            states: (n, hidden) of them at the checkpoint.
        """
        memory = self.memory
        assert memory is not None
        self._remember(memory, parts, tokens.after)
        self._keep(memory, self._entered(memory, tokens, states), tokens)

    def settle(self) -> None:
        """Note that the memory head was fed everything before the newest tokens."""
        if self.memory is not None:
            self.memory.fed.copy_(self.slots.starts[0])

    def _find_places(self, starts: torch.Tensor, places: torch.Tensor, ring: torch.Tensor) -> None:
        slots = self.slots
        self.runner.exits.find_places(slots.tables, slots.row_ids[0], starts, slots.store.size, places, ring)

    def guess(
        self, tokens: Tokens, states: torch.Tensor, most: int, out: torch.Tensor, before: torch.Tensor | None = None
    ) -> None:
        """Let the memory head guess the deep states of tokens.

        Args:
            states: (n, hidden) of them at the checkpoint.
            before: the table that has memories at their places; None: that of the blocks.
        """
        memory, store = self.memory, self.slots.store
        assert memory is not None
        head, x = memory.head, self._entered(memory, tokens, states, before)
        own = self.slots.pass_of(x, tokens, memory.angles)
        self.runner.ops.decoder_layer(memory.layer, own, store.keys[-1], store.values[-1], most)
        table = store.before if before is None else before
        self.runner.exits.denormalize(x, head.deep_center, head.deep_spread, tokens.after, table, out)

    def _entered(
        self, memory: Memory, tokens: Tokens, states: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return tokens as the head's block takes them."""
        joined = states.new_empty(len(states), memory.entries.shape[1])
        self._enter(memory, tokens, states, joined)
        return self._fuse(memory, joined, tokens.places, before)

    def _enter(
        self, memory: Memory, tokens: Tokens, states: torch.Tensor, out: torch.Tensor, places: torch.Tensor | None = None
    ) -> None:
        """Write what the head sees of the tokens themselves."""
        head = memory.head
        for place, depth in enumerate(input_depths(self.depth, head.sizes.inputs)):
            part = slice(place * head.sizes.hidden_dim, (place + 1) * head.sizes.hidden_dim)
            table, rows = (states, None) if depth else self.runner.embedded(self.slots, tokens)
            center, spread = head.shallow_center[part], head.shallow_spread[part]
            self.runner.exits.normalize_into(table, rows, out[:, part], EPS, center, spread, places)

    def _fuse(
        self, memory: Memory, joined: torch.Tensor, places: torch.Tensor, before: torch.Tensor | None = None
    ) -> torch.Tensor:
        head, before = memory.head, self.slots.store.before if before is None else before
        own = joined[:, -head.sizes.hidden_dim :]
        self.runner.exits.normalize_into(before, places, own, EPS, head.deep_center, head.deep_spread)
        found: torch.Tensor = self.runner.ops.linear(joined, head.fuse.weight)
        return found

    def _feed(self, memory: Memory) -> None:
        """Make memories and K/V of tokens that wait: always sixteen, and those behind the newest are overwritten later."""
        slots = self.slots
        places, ring = torch.zeros_like(slots.places), torch.zeros_like(slots.ring)
        self._find_places(memory.fed, places, ring)
        positions = (memory.fed + slots.steps).flatten()
        ids, rows = slots.tokens[:-1].flatten(), slots.row_ids.flatten()
        tokens = Tokens(ids, rows, positions, places[:-1].flatten(), places[1:].flatten())
        waiting = ring.flatten()
        self._remember(memory, memory.parts[waiting], tokens.after)
        self._keep(memory, self._fuse(memory, memory.entries[waiting], tokens.places), tokens)
        memory.fed.copy_(slots.starts[0])

    def _remember(self, memory: Memory, parts: torch.Tensor, places: torch.Tensor) -> None:
        before = self.slots.store.before
        if memory.head.recall is None:
            before.index_copy_(0, places, parts)
        else:
            self.runner.exits.linear_into(parts, memory.head.recall.weight, before, places)

    def _keep(self, memory: Memory, x: torch.Tensor, tokens: Tokens) -> None:
        """Write the head's K/V of tokens."""
        store = self.slots.store
        h = self.runner.ops.norm(x, memory.layer.attention_norm)
        own = self.slots.pass_of(x, tokens, memory.angles)
        self.runner.ops.project(memory.only_kv, own, h, store.keys[-1], store.values[-1])
