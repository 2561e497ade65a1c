"""Tokens of prompts that settle, in passes on the host: the shallow layers for all of them, the deep ones for those that stay.

    depth 0 … c     all tokens of the row
    at c            which of them settle?                the last one of the prompt never does, nor one that was written
    K/V, c … L      of the settled ones, made of their predicted states
    c … L           the others, gathered; they see all columns

A pass has one row, because rows differ in who settles. Segments may end between c and L; who has settled is known until the
last one has run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.gathering import window_of
from TIDE.engine.runners.passes import PassResult, PassTokens
from TIDE.routing.settling import Settling

logger = logging.getLogger(__name__)


@dataclass
class Settled:
    """Tokens of a row that have settled and not passed the last segment."""

    positions: list[int]
    states: torch.Tensor  # (n, hidden) where they did


class Settler:
    """Runs prompts whose tokens may settle.

    Args:
        settling: decides it, and predicts states.
    """

    def __init__(self, runner: Runner, settling: Settling) -> None:
        self.runner = runner
        self.settling = settling
        self.depth = settling.depth
        self.window = window_of(runner.adapter)
        self._settled: dict[Row, Settled] = {}
        self._refused: set[Row] = set()

    def why_not(self, row: Row) -> str | None:
        """Return why no token of a row settles; None: some may."""
        if row.embeds is not None:
            return "its prompt came as embeddings"
        if self.window is not None and row.prompt > self.window:
            return f"layers of the model see {self.window} tokens, and gathered passes of its modules are for shorter prompts"
        return None

    def takes(self, row: Row, start: int, count: int) -> bool:
        """Return True if one of the row's tokens from `start` on may settle, or has."""
        if start >= row.prompt - 1 or count < 1:
            return False
        reason = self.why_not(row)
        if reason is not None and row not in self._refused:
            self._refused.add(row)
            logger.warning("a prompt of %d tokens runs all layers in spite of prefill_exits: %s.", row.prompt, reason)
        return reason is None

    def run(
        self,
        span: range,
        row: Row,
        tokens: PassTokens,
        cache: SegmentCache,
        hidden: torch.Tensor | None,
        taps: tuple[int, ...],
    ) -> PassResult:
        """Take the next tokens of a row through a span."""
        if span.stop <= self.depth:
            return self.runner.run(span, tokens, cache, hidden, taps)
        shallow, deep = range(span.start, max(self.depth, span.start)), range(max(self.depth, span.start), span.stop)
        computed, tapped = 0, dict[int, torch.Tensor]()
        if len(shallow):
            below = tuple(depth for depth in taps if depth < self.depth)
            passed = self.runner.run(shallow, tokens._replace(kept=None), cache, hidden, below)
            hidden, tapped, (computed,) = passed.states, passed.taps, passed.computed
        assert hidden is not None
        if deep.start == self.depth:
            self._ask(row, tokens, hidden)
        if self.depth in taps:
            tapped[self.depth] = hidden
        above = tuple(depth for depth in taps if depth > deep.start)
        settled = self._among(row, tokens)
        passed = self._deep(deep, tokens, cache, hidden, above, settled)
        if span.stop == self.runner.num_layers:
            self.forget(row, 0)
        return passed._replace(taps=tapped | passed.taps, computed=[computed + passed.computed[0]])

    def forget(self, row: Row, length: int) -> None:
        """Forget tokens of a row from a position on."""
        own = self._settled.pop(row, None)
        if own is not None and (count := sum(position < length for position in own.positions)):
            self._settled[row] = Settled(own.positions[:count], own.states[:count])

    def _ask(self, row: Row, tokens: PassTokens, states: torch.Tensor) -> None:
        """Find out who settles of tokens that have reached the checkpoint."""
        count = min(len(states), row.prompt - 1 - tokens.starts[0])
        positions = tokens.positions()[:count]
        flags = self.settling.settles(states[:count], torch.tensor(positions, device=states.device)).tolist()
        numbers = [number for number, settles in enumerate(flags) if settles]
        row.stats.settled_tokens += len(numbers)
        self._settled[row] = Settled([positions[number] for number in numbers], states[numbers])

    def _among(self, row: Row, tokens: PassTokens) -> Settled:
        """Return the tokens of a pass that have settled."""
        own, (start,), (count,) = self._settled[row], tokens.starts, tokens.counts
        places = [place for place, position in enumerate(own.positions) if start <= position < start + count]
        return Settled([own.positions[place] for place in places], own.states[places])

    def _deep(
        self,
        span: range,
        tokens: PassTokens,
        cache: SegmentCache,
        hidden: torch.Tensor,
        taps: tuple[int, ...],
        settled: Settled,
    ) -> PassResult:
        """Run the deep layers for those that stay, and write the K/V of the others there."""
        if not settled.positions:
            return self.runner.run(span, tokens, cache, hidden, taps)
        gone = [position - tokens.starts[0] for position in settled.positions]
        out = set(gone)
        staying = [number for number in range(len(hidden)) if number not in out]
        with cache.picking(gone):
            self.runner.write_skipped_kv(span, tokens.pick(gone), settled.states, cache, self.settling.predict)
        found: dict[int, torch.Tensor] = {}
        if staying:
            with cache.picking(staying):
                passed = self.runner.run(span, tokens.pick(staying), cache, hidden[staying], taps)
            found = passed.taps | {span.stop: passed.states}
        whole = {depth: hidden.clone() for depth in (*taps, span.stop)}
        for depth, states in whole.items():
            states[gone] = self.settling.predict(depth, settled.states)
            if staying:
                states[staying] = found[depth]
        states = whole.pop(span.stop)
        logits = None if tokens.kept is None else self.runner.logits(states[tokens.kept_places()])
        return PassResult(states, logits, whole, [len(span) * len(staying)])
