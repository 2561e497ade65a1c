"""Prompts on slots where some tokens stop: of the rest of their layers only K/V are computed.

    layers before c     all tokens of the pass, of any rows
    layer c             all of them again, while the host reads who stops; what it makes of those is dropped, but for K/V
    layers behind c     those that stay; the products of q, k and v also write K/V of the stopped ones, from predicted states

Who stops is known on the host only when a pass runs, so such passes are not captured. K/V of these rows are never shared:
see `Residents`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from TIDE.engine.cache.prefill_buffers import grouped
from TIDE.engine.cache.slots import Tokens
from TIDE.engine.rows.row import Row
from TIDE.engine.slots.prefill import Prefill
from TIDE.kernels.transfer import read_later, sent
from TIDE.prompt_exits.maps import PromptExit


class PromptExitPrefill(Prefill):
    """Takes texts into blocks, some of their tokens up to a checkpoint only.

    Attributes:
        noted: (n, seen) states of the tokens of the pass, normed, at the depths that a memory head remembers.
        entry: (n, hidden) their states where it drafts from. None without such a head.
    """

    noted: torch.Tensor | None = None
    entry: torch.Tensor | None = None

    def __init__(self, exit_: PromptExit, *parts: Any) -> None:
        super().__init__(*parts)
        self.exit = exit_

    def _launch(self, tokens: Tokens, columns: int) -> bool:
        self._through(tokens, columns)
        return True

    def _through(self, tokens: Tokens, columns: int) -> None:
        slots, depth, last = self.slots, self.exit.depth, self.runner.num_layers
        states = slots.like.new_empty(len(tokens.ids), len(slots.like))
        self.runner.embed_on_slots(slots, tokens, states)
        if slots.memory is not None:
            self.noted, self.entry = states.new_zeros(len(states), slots.memory.seen), torch.zeros_like(states)
        self._take(range(depth), states, tokens, columns)
        allowed = self._allowed(states.device)
        if len(allowed):
            self._deep(allowed, states, tokens, columns)
        else:
            self._take(range(depth, last), states, tokens, columns)
        torch.index_select(states, 0, self.prompts.ends, out=self.prompts.last)
        if self.drafter is not None and self.noted is not None and self.entry is not None:
            self.drafter.remember_prompt(tokens, self.entry, self.noted)

    def _take(
        self, span: range, states: torch.Tensor, tokens: Tokens, columns: int, places: torch.Tensor | None = None
    ) -> None:
        """Take states of tokens that ask, in place, through layers, and let a memory head see them.

        Args:
            places: of these tokens in the pass; None: it has no others.
        """
        for start, stop in pairwise(sorted({span.start, span.stop, *({self.depth} & {*span})})):
            if start == self.depth and self.entry is not None:
                self.entry[slice(None) if places is None else places] = states[: tokens.asking]
            if self.drafter is not None:
                self.drafter.through(range(start, stop), states, tokens, columns, self.noted, places)
            else:
                for _ in self.runner.layers_on_slots(self.slots, range(start, stop), states, tokens, columns, ()):
                    pass

    def _allowed(self, device: torch.device) -> torch.Tensor:
        """Return who may stop of the tokens of the pass: never the last one of a prompt, nor one that was written."""
        found = [np.arange(part.start, part.stop) < own.row.prompt - 1 for own, part in self.parts]
        return sent(torch.from_numpy(np.concatenate([[], *found]).astype(bool)), device)

    def _count(self, stops: np.ndarray) -> list[int]:
        """Note who stopped; return how many tokens of each row stay."""
        starts = np.cumsum([0, *(len(part) for _, part in self.parts[:-1])])
        gone = np.add.reduceat(stops, starts, dtype=int).tolist()
        for (own, part), count in zip(self.parts, gone, strict=True):
            count_stopped(own.row, part.start, count)
            own.row.stats.layers_run -= count * (self.runner.num_layers - self.exit.depth)
        return [len(part) - count for (_, part), count in zip(self.parts, gone, strict=True)]

    def _deep(self, allowed: torch.Tensor, states: torch.Tensor, tokens: Tokens, columns: int) -> None:
        """Take tokens through the deep layers, in place; what becomes of stopped ones is nobody's."""
        first, count = self.exit.depth, len(allowed)
        stops = self.exit.stops(states[:count], tokens.positions[:count]) & allowed
        known, before = read_later(stops), states.clone()
        self._take(range(first, first + 1), states, tokens, columns)
        order = stops.to(torch.uint8).argsort(stable=True)  # those that stay come first
        ordered, all_ = states[order], tokens.taken(order)
        counts, span = self._count(found := known()), range(first + 1, self.runner.num_layers)
        if not found.any():
            self._take(span, states, tokens, columns)
            return
        stays = sum(counts)
        stay, gone = order[:stays], order[stays:]
        stopped = before[gone]
        all_ = all_._replace(groups=grouped(counts, order.device), asking=stays)
        for depth in self.exit.predictions(span, stopped, out=ordered[stays:]):
            self._take(range(depth, depth + 1), ordered, all_, columns, stay)
        states.index_copy_(0, stay, ordered[:stays])
        self._show_predicted(stopped, gone)

    def _show_predicted(self, states: torch.Tensor, places: torch.Tensor) -> None:
        """Let a memory head see predicted states of stopped tokens."""
        if self.drafter is None or self.drafter.head is None or self.noted is None or self.entry is None:
            return
        if self.depth > self.exit.depth:
            self.entry.index_copy_(0, places, self.exit.predict(self.depth, states))
        for depth in self.drafter.depths:
            if depth > self.exit.depth:
                self.drafter.head.capture_at(depth, self.exit.predict(depth, states), self.noted, places)


def count_stopped(row: Row, start: int, count: int) -> None:
    """Count the tokens that stopped in a part of a row's prompt. A prompt may run again."""
    row.stats.settled_tokens = count + (row.stats.settled_tokens if start else 0)
