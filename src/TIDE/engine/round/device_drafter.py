"""Drafts of captured rounds: one checkpoint, whose head is `identity`, `lens` or `memory`, and its router.

A memory head keeps its own K/V and the states of finished tokens in the slots. When drafting does not pay, rounds run with no
drafts. Tokens the memory head has missed are buffered and fed to it sixteen at a time, or as soon as it is needed again.
"""

from __future__ import annotations

from typing import Any

import torch

from TIDE.engine.cache.slots import Memory, Slots
from TIDE.engine.plan import Plan
from TIDE.engine.round.device_choice import DeviceChoice
from TIDE.engine.runners.device import DeviceRunner
from TIDE.kernels.layer import MOST_TOKENS, Pass
from TIDE.routing.exits import Exit
from TIDE.routing.heads import EPS, IdentityHead, input_depths, memory_depths
from TIDE.routing.policy import ExitPolicy


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
        self,
        runner: DeviceRunner,
        slots: Slots,
        exit_: Exit,
        depth: int,
        vocabulary: torch.Tensor | None,
        choice: DeviceChoice,
    ) -> None:
        self.runner = runner
        self.slots = slots
        self.choice = choice
        self.exit = exit_
        self.depth = depth
        self.vocabulary = vocabulary
        self.waiting = 0  # tokens that the memory head was not fed
        self.depths = memory_depths(runner.num_layers, exit_.sizes.memories) if self.memory is not None else []

    @property
    def memory(self) -> Memory | None:
        return self.slots.memory

    # ---- before a round ----------------------------------------------------------------------------------------------------

    def prepare(self, drafts: int) -> bool:
        """Feed the memory head the tokens it missed if a round needs it; return True if that was as fast as ever."""
        is_typical = self._catch_up() if drafts or self.waiting == MOST_TOKENS else True
        self.waiting = 0 if drafts else self.waiting + 1
        return is_typical

    def _catch_up(self) -> bool:
        memory, waiting = self.memory, self.waiting
        self.waiting = 0
        return memory is None or not waiting or self.runner.launch(self.slots, "feed", lambda: self._feed(memory))

    # ---- inside a round ----------------------------------------------------------------------------------------------------

    def draft(self, step: int, most: int) -> None:
        """Choose the token after the newest one of every row, and score it."""
        slots, own = self.slots, slice(step, step + 1)
        rows = slots.rows
        if self.depth:
            self.shallow(step, most)
        states = slots.states[step * rows : (step + 1) * rows]
        guess = slots.guesses[step * rows : (step + 1) * rows]
        if self.memory is None:
            guess.copy_(self.exit.head(states))
        else:
            self._guess(self.memory, own, most, guess)
        signals = slots.signals[step * rows : (step + 1) * rows]
        self.choice.choose(guess, self.choice.of(own), slots.tokens[step + 1], slots.best[0], signals, self.vocabulary)

    def score(self, drafts: int) -> None:
        """Score the drafts of a round, all at once."""
        slots, router = self.slots, self.exit.router
        count = drafts * slots.rows
        weights = router.down.weight, router.down.bias, router.up.weight
        scores = slots.scores[:drafts].flatten()
        self.runner.exits.router_score(slots.guesses[:count], slots.signals[:count], *weights, slots.score_params, EPS, scores)

    def shallow(self, step: int, most: int, at: torch.Tensor | None = None) -> None:
        """Take the tokens of a step to the checkpoint."""
        rows, own = self.slots.rows, slice(step, step + 1)
        states = self.slots.states[step * rows : (step + 1) * rows]
        self.runner.embed_on_slots(self.slots, own, states)
        self.through(range(self.depth), states, own, most, at)

    def through(self, span: range, states: torch.Tensor, own: slice, most: int, at: torch.Tensor | None = None) -> None:
        """Take states, in place, through layers, and note what a memory head will remember of them.

        Args:
            at: where in its buffers that is noted, for tokens the head is fed later.
        """
        memory, width = self.memory, states.shape[1]
        for depth, found in self.runner.layers_on_slots(self.slots, span, states, own, most, tuple(self.depths)):
            if memory is not None:
                place = self.depths.index(depth) * width
                rows = memory.parts[:, place : place + width]
                self.runner.exits.normalize_into(found, None, rows[own] if at is None else rows, EPS, at=at)

    def observe(self, drafts: int) -> None:
        """Remember finished tokens in place of guesses, and write K/V of the tokens after them."""
        memory = self.memory
        if drafts:
            self.score(drafts)
        if memory is None:
            return
        if drafts == 0:
            self._enter(memory, slice(0, 1), memory.entries, self.slots.starts[0])
            return
        self._make_memories(memory, memory.parts[: drafts + 1], self.slots.starts[0])
        own = slice(1, drafts + 1)  # K/V of the first are there: it was asked for a draft
        self._keep(memory, self._entered(memory, own), self.slots.starts[own].flatten())

    def settle(self, drafts: int) -> None:
        """Note how far the memory head was fed, once the round has moved on."""
        if self.memory is not None and drafts:
            self.memory.fed.copy_(self.slots.starts[0])

    def _guess(self, memory: Memory, own: slice, most: int, out: torch.Tensor) -> None:
        """Let the memory head guess the deep state of a token."""
        head, x = memory.head, self._entered(memory, own)
        tokens = self.slots.pass_of(x, own, memory.angles)
        self.runner.ops.decoder_layer(memory.layer, tokens, memory.keys, memory.values, most)
        start = self.slots.starts[own].flatten()
        self.runner.exits.denormalize(x, head.deep_center, head.deep_spread, start, memory.before, out)

    def _entered(self, memory: Memory, own: slice) -> torch.Tensor:
        """Return tokens of a round as the head's block takes them."""
        joined = torch.empty_like(memory.entries[own])
        self._enter(memory, own, joined)
        return self._fuse(memory, joined, self.slots.starts[own].flatten())

    def _enter(self, memory: Memory, own: slice, out: torch.Tensor, at: torch.Tensor | None = None) -> None:
        """Write what the head sees of the tokens themselves."""
        slots, head = self.slots, memory.head
        for place, depth in enumerate(input_depths(self.depth, head.sizes.inputs)):
            part = slice(place * head.sizes.hidden_dim, (place + 1) * head.sizes.hidden_dim)
            table, rows = (slots.states[own], None) if depth else self.runner.embedded(slots, own)
            center, spread = head.shallow_center[part], head.shallow_spread[part]
            self.runner.exits.normalize_into(table, rows, out[:, part], EPS, center, spread, at)

    def _fuse(self, memory: Memory, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        head = memory.head
        own = joined[:, -head.sizes.hidden_dim :]
        self.runner.exits.normalize_into(memory.before, positions, own, EPS, head.deep_center, head.deep_spread)
        found: torch.Tensor = self.runner.ops.linear(joined, head.fuse.weight)
        return found

    def _feed(self, memory: Memory) -> None:
        """Make memories and K/V of tokens that wait: always sixteen, and those behind the newest are overwritten later."""
        positions = memory.fed + self.slots.places[:MOST_TOKENS]
        rows = positions % MOST_TOKENS
        self._make_memories(memory, memory.parts[rows], memory.fed)
        self._keep(memory, self._fuse(memory, memory.entries[rows], positions), positions)
        memory.fed.copy_(self.slots.starts[0])

    def _make_memories(self, memory: Memory, parts: torch.Tensor, start: torch.Tensor) -> None:
        if memory.head.recall is None:
            memory.before.index_copy_(0, start[:1].long() + 1 + self.slots.places[: len(parts)], parts)
        else:
            self.runner.exits.linear_into(parts, memory.head.recall.weight, memory.before, start[:1])

    def _keep(self, memory: Memory, x: torch.Tensor, positions: torch.Tensor) -> None:
        """Write the head's K/V of tokens at these positions."""
        h = self.runner.ops.norm(x, memory.layer.attention_norm)
        rows = self.slots.row_ids[: len(x)].flatten()
        tokens = Pass(x, *memory.angles, rows, positions, positions, positions, self.slots.tables)
        self.runner.ops.project(memory.only_kv, tokens, h, memory.keys, memory.values)
