"""Rounds: greedy decoding of one row on a GPU, a whole round at a time and without the host between.

    opening     the text so far: see opening.py
    draft       k times: the newest token runs to the checkpoint, the memory head guesses, the guess's best token is next
    deep pass   the newest final token and the k drafts through the rest, in one pass; the full model's token after each
    accept      drafts that the full model says too stand; its token after them is the newest final one now

Rounds without drafts follow each other where drafts do not pay; what they leave for the memory head is fed to it sixteen tokens
at a time, or when it is asked again.

A round is one graph. The host looks at one small buffer for each, while the next round already runs: what a round starts
from is on the device. With exits off a round is a step of the full model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.batch import QUICK, Batch
from TIDE.engine.cache.slots import Memory, Slots
from TIDE.engine.plan import Plan
from TIDE.engine.request import Request
from TIDE.engine.round.prefill import Prefill, padded
from TIDE.engine.round.sampler import NAN
from TIDE.engine.schedule.draft_length import DraftLength
from TIDE.kernels.layer import MOST_TOKENS, Pass, input_norm
from TIDE.routing.exits import Exit
from TIDE.routing.heads import EPS, IdentityHead, MemoryHead, input_depths, memory_depths
from TIDE.stats import ExitStats

logger = logging.getLogger(__name__)
ROOM = 4 * MOST_TOKENS  # columns beyond the text: a round may run ahead
FEWEST = 1024  # columns a graph is made for; then four times as many, and so on


class InFlight(NamedTuple):
    """A round on its way."""

    drafts: int | None  # None: an opening
    is_usual: bool  # nothing had to be compiled or captured for it
    out: torch.Tensor  # pinned
    over: torch.cuda.Event | None  # None: it is over


def suits(adapter: ModelAdapter, plan: Plan, policy: Any, request: Request) -> bool:
    """Whether a request can be decoded in rounds."""
    fused = adapter.fused
    if fused is None or not fused.has_rounds or len(request.ids) > 1 or request.processors or request.config.do_sample:
        return False
    if request.embeds is not None or request.keeps_scores:
        return False
    exits = len(plan.spans) == 1 or (plan.catches_up and exit_of(plan, policy) is not None)
    short = plan.exact or plan.max_pending < MOST_TOKENS  # a round has no place for more
    return exits and short and all(type(one) in QUICK for one in request.criteria)


def exit_of(plan: Plan, policy: Any) -> Exit | None:
    """The only exit, if it is one that rounds can ask: with a memory or no head of its own."""
    exits = getattr(policy, "exits", {})
    found = exits[plan.spans[-1].start] if len(plan.spans) == 2 and exits else None
    if found is None or (isinstance(found.head, IdentityHead) and not plan.spans[-1].start):
        return None
    return found if isinstance(found.head, MemoryHead | IdentityHead) else None


class Rounds:
    """One request, from its text so far to its last token."""

    slots: Slots

    def __init__(
        self, adapter: ModelAdapter, plan: Plan, policy: Any, batch: Batch, columns: int, length: DraftLength, stats: ExitStats
    ) -> None:
        self.adapter = adapter
        self.fused = adapter.fused
        self.plan = plan
        self.exit = exit_of(plan, policy)
        self.vocabulary = getattr(policy, "vocabulary", None)
        self.waiting = 0  # tokens that the memory head was not fed
        self.depth = plan.spans[-1].start if self.exit is not None else 0
        self.threshold = 0.0 if plan.weighs else plan.threshold(self.depth)
        self.rule = plan.exact, plan.weighs, self.threshold
        self.exits = 0
        self.batch = batch
        self.columns = columns  # the text's, at most
        self.length = length
        self.stats = stats
        self.launched = 0
        self.began = 0.0

    def run(self) -> Iterator[None]:
        """Decode until the row is finished. Where the device refuses, it is left as it is; later requests go by steps too."""
        self.began = time.perf_counter()
        self.length.begin()
        try:
            yield from self._in_circuit()
        except FloatingPointError:
            raise
        except Exception as problem:  # compilers refuse cards and sizes, and models shapes, in many ways
            self.fused.without_rounds = f"{type(problem).__name__}: {problem}"
            logger.warning("%s is not decoded in rounds: %s", type(self.adapter.model).__name__, self.fused.without_rounds)

    def _in_circuit(self) -> Iterator[None]:
        self.slots = self.fused.slot_pool.acquire(self.columns + ROOM, self.exit)
        try:
            yield from self._decode()
        finally:
            self.fused.slot_pool.release(self.slots)

    def _decode(self) -> Iterator[None]:
        with self.adapter.grad_off(), self.fused.device_guard():
            now = self._open() or self._launch()
        while not self.batch.finished[0]:
            with self.adapter.grad_off(), self.fused.device_guard():
                # in mode "fast" how many tokens may exit depends on how many did
                ahead = self._launch() if self.plan.exact else None
                self._note(now, self._take(now), ahead)
                if not self.batch.finished[0]:
                    now = ahead or self._launch()
            yield

    def _note(self, round_: InFlight, stood: int, ahead: InFlight | None) -> None:
        now = time.perf_counter()
        took, self.began = now - self.began, now
        if round_.drafts is None:
            self.stats.seconds.prompt += took
            return
        is_usual = round_.is_usual and (ahead is None or ahead.is_usual)
        self.length.saw(round_.drafts, stood, took if is_usual else None)
        self.stats.seconds.deep += took

    def _open(self) -> InFlight | None:
        """Hand the prompt to the device; None: the token after it is known already."""
        prompt, size = self.batch.prompt[0], self.batch.size[0]
        is_usual = Prefill(self.adapter, self.slots, self.depth).run(self.batch.tokens(0, 0, prompt))
        self.stats.layers_run += padded(prompt) * self.adapter.num_layers
        if size == prompt:
            return self._on_its_way(None, is_usual)
        self.slots.tokens[:1].copy_(self.batch.tokens(0, prompt, size))
        return None

    def _most_drafts(self) -> int:
        """How many exits in a row are allowed now."""
        if self.exit is None:
            return 0
        new, most = self.batch.size[0] - self.batch.prompt[0], min(self.plan.max_pending, MOST_TOKENS - 1)
        return next((n for n in range(most) if not self.plan.within_share(self.exits + n, new + n)), most)

    def _launch(self) -> InFlight:
        """Hand a round to the device. It starts from what the one before it leaves there."""
        drafts = self._most_drafts()
        if self.plan.exact:  # in mode "fast" the text must not depend on what takes how long
            drafts = self.length.choose(drafts)
        most = FEWEST
        while most < self.batch.size[0] + ROOM:
            most *= 4
        is_usual = self._let_wait() if drafts == 0 else self._catch_up()
        is_usual &= self.slots.graphs.run((drafts, most, *self.rule), lambda: self._round(drafts, most))
        self.stats.layers_run += (drafts + 1) * self.adapter.num_layers
        return self._on_its_way(drafts, is_usual)

    def _let_wait(self) -> bool:
        """One more token will wait for the memory head; whether there was room for it at once."""
        is_usual = self._catch_up() if self.waiting == MOST_TOKENS else True
        self.waiting += 1
        return is_usual

    def _catch_up(self) -> bool:
        """Feed the memory head what waits; whether that was as quick as ever."""
        memory, waiting, self.waiting = self.slots.memory, self.waiting, 0
        return memory is None or not waiting or self.slots.graphs.run("feed", lambda: self._feed(memory))

    def _on_its_way(self, drafts: int | None, is_usual: bool) -> InFlight:
        out, over = self.slots.pinned[self.launched % 2], None
        out.copy_(self.slots.out, non_blocking=True)
        if self.slots.out.is_cuda:
            over = torch.cuda.Event()
            over.record()
        self.launched += 1
        return InFlight(drafts, is_usual, out, over)

    def _take(self, round_: InFlight) -> int:
        """What a round came to."""
        if round_.over is not None:
            round_.over.synchronize()
        stood, *tokens, drafted = round_.out.tolist()
        if stood < 0:
            raise FloatingPointError(NAN)
        self.exits += stood
        emitted = self._emit(tokens[: stood + 1])
        drafted = min(drafted, emitted)  # those behind the end of a text are nobody's
        self.stats.drafted_by_step.update(range(1, drafted + 1))
        self.stats.catch_ups += drafted > 0
        self.stats.rollbacks += stood < drafted
        self.stats.rejected += max(0, drafted - stood)
        return stood

    def _emit(self, tokens: list[int]) -> int:
        """Put final tokens into the text, up to its end; the last is the full model's. How many there were."""
        for step, token in enumerate(tokens, 1):
            depth = self.depth if step < len(tokens) else self.stats.num_layers
            self.batch.append(0, token)
            self.batch.finish(0, depth)
            self.stats.count_token(depth, step)
            if self.batch.stops([0]):
                self.batch.finished[0] = True
                return step
        return len(tokens)

    # ---- what runs on the device ----------------------------------------------------------------------------------------

    def _round(self, drafts: int, most: int) -> None:
        slots, ops, last = self.slots, self.fused.exits, self.adapter.num_layers
        for step in range(drafts):
            self._draft(step, most)
        at = None if drafts else slots.starts[:1]
        if self.depth:
            self._shallow(drafts, most, at)
        else:
            self.fused.embed(slots, slice(0, drafts + 1), slots.states[: drafts + 1])
        states = slots.states[: drafts + 1].clone()  # the memory head will want those at the checkpoint again
        self._through(range(self.depth, last), states, slice(0, drafts + 1), most, at)
        self.fused.choose(states, slots.found[: drafts + 1], slots.best[: drafts + 1])
        if slots.memory is not None:
            self._remember(slots.memory, drafts)
        result = slots.starts, slots.scores, slots.out
        ops.accept(slots.found, slots.best, slots.tokens, *result, drafts, self.threshold, self.plan.exact)
        if slots.memory is not None and drafts:
            slots.memory.fed.copy_(slots.starts[:1])

    def _through(self, span: range, states: torch.Tensor, own: slice, most: int, at: torch.Tensor | None = None) -> None:
        """Take states (in place) through layers, and note what is to be remembered of them, at a place where it is to wait."""
        memory, width = self.slots.memory, states.shape[1]
        depths = [] if memory is None else memory_depths(self.adapter.num_layers, memory.head.sizes.memories)
        for depth, found in self.fused.through(self.slots, span, states, own, most, tuple(depths)):
            if memory is not None:
                place = depths.index(depth) * width
                rows = memory.parts[:, place : place + width]
                self.fused.exits.centred(found, None, rows[own] if at is None else rows, EPS, at=at)

    def _shallow(self, step: int, most: int, at: torch.Tensor | None = None) -> None:
        """The token of a draft step to the checkpoint."""
        states = self.slots.states[step : step + 1]
        self.fused.embed(self.slots, slice(step, step + 1), states)
        self._through(range(self.depth), states, slice(step, step + 1), most, at)

    def _draft(self, step: int, most: int) -> None:
        """The token after the newest one, by the exit."""
        slots, own = self.slots, slice(step, step + 1)
        if self.depth:
            self._shallow(step, most)
        guess = slots.states[own] if slots.memory is None else self._guess(slots.memory, own, most)
        signals = None if self.plan.weighs else slots.signals
        self.fused.choose(guess, slots.tokens[step + 1 : step + 2], slots.best[:1], signals, self.vocabulary)
        if signals is not None:
            self._score(guess, slots.scores[own])

    def _guess(self, memory: Memory, own: slice, most: int) -> torch.Tensor:
        """What the memory head makes of a token."""
        head, x = memory.head, self._entered(memory, own)
        going = self.slots.going(x, own, memory.turns)
        self.fused.ops.decoder_layer(memory.layer, going, memory.keys, memory.values, most)
        return self.fused.exits.outward(x, head.deep_center, head.deep_spread, self.slots.starts[own], memory.before)

    def _score(self, guess: torch.Tensor, score: torch.Tensor) -> None:
        assert self.exit is not None
        router = self.exit.router
        weights = router.down.weight, router.down.bias, router.up.weight
        self.fused.exits.router_score(guess, self.slots.signals, *weights, self.slots.gauge, EPS, score)

    def _entered(self, memory: Memory, own: slice) -> torch.Tensor:
        """Tokens of a round as the head's block takes them."""
        joined = torch.empty_like(memory.entries[own])
        self._enter(memory, own, joined)
        return self._fused_with_memories(memory, joined, self.slots.starts[own])

    def _enter(self, memory: Memory, own: slice, out: torch.Tensor, at: torch.Tensor | None = None) -> None:
        """What a head sees of tokens themselves."""
        slots, head = self.slots, memory.head
        for place, depth in enumerate(input_depths(self.depth, head.sizes.inputs)):
            part = slice(place * head.sizes.hidden_dim, (place + 1) * head.sizes.hidden_dim)
            table, rows = (slots.states[own], None) if depth else self.fused.embedded(slots, own)
            self.fused.exits.centred(table, rows, out[:, part], EPS, head.shallow_center[part], head.shallow_spread[part], at)

    def _fused_with_memories(self, memory: Memory, joined: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        head = memory.head
        own = joined[:, -head.sizes.hidden_dim :]
        self.fused.exits.centred(memory.before, positions, own, EPS, head.deep_center, head.deep_spread)
        return self.fused.ops.linear(joined, head.fuse.weight)

    def _remember(self, memory: Memory, drafts: int) -> None:
        """Finished tokens, in place of guesses; then K/V of the tokens after them. A token without drafts waits."""
        if drafts == 0:
            self._enter(memory, slice(0, 1), memory.entries, self.slots.starts[:1])
            return
        self._make_memories(memory, memory.parts[: drafts + 1], self.slots.starts)
        own = slice(1, drafts + 1)  # the first one's stand already: it was asked for a draft
        self._keep(memory, self._entered(memory, own), self.slots.starts[1:])

    def _feed(self, memory: Memory) -> None:
        """Memories and K/V of tokens that wait. Always sixteen: what comes of those behind the newest is overwritten later."""
        positions = memory.fed + self.slots.places[:MOST_TOKENS]
        rows = positions % MOST_TOKENS
        self._make_memories(memory, memory.parts[rows], memory.fed)
        self._keep(memory, self._fused_with_memories(memory, memory.entries[rows], positions), memory.fed)
        memory.fed.copy_(self.slots.starts[:1])

    def _make_memories(self, memory: Memory, parts: torch.Tensor, start: torch.Tensor) -> None:
        if memory.head.recall is None:
            memory.before.index_copy_(0, start[:1].long() + 1 + self.slots.places[: len(parts)], parts)
        else:
            self.fused.exits.linear_into(parts, memory.head.recall.weight, memory.before, start[:1])

    def _keep(self, memory: Memory, x: torch.Tensor, start: torch.Tensor) -> None:
        """K/V of tokens from a position on."""
        h = self.fused.ops.norm(x, input_norm(memory.layer))
        going = Pass(x, *memory.turns, self.slots.row, self.slots.row, start[:1], len(x))
        self.fused.ops.project(memory.only_kv, going, h, memory.keys, memory.values)
