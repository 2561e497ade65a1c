"""Prefill on slots where tokens of prompts may settle: the rest of their layers is one product for K/V.

    layers 0 … c     all tokens of the pass, of any rows
    at c             the host reads who settles
    K/V, c … L       of the settled ones, made of their predicted states
    c … L            the others, gathered: a ragged pass of fewer tokens

Who settles is known on the host only when a pass runs, so such passes are not captured. K/V of these rows are never shared:
see `Seats`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from TIDE.engine.cache.prompts import Prompts, gathered
from TIDE.engine.cache.slots import Tokens
from TIDE.engine.round.device_drafter import DeviceDrafter
from TIDE.engine.round.prefill import Prefill
from TIDE.engine.runners.device import DeviceRunner
from TIDE.routing.heads import EPS
from TIDE.routing.settling import Settling


class Shown(NamedTuple):
    """What a memory head will see of the tokens of a pass; nothing without such a head."""

    noted: torch.Tensor | None = None  # (n, seen) of their states, normed, at the depths that it remembers
    entry: torch.Tensor | None = None  # (n, hidden) their states where it drafts from

    def of(self, numbers: torch.Tensor) -> Shown:
        """Return room for the same of some tokens."""
        return Shown(*(None if own is None else own.new_empty(len(numbers), own.shape[1]) for own in self))

    def put(self, numbers: torch.Tensor, part: Shown) -> None:
        """Take over what was seen of some tokens."""
        for own, theirs in zip(self, part, strict=True):
            if own is not None and theirs is not None:
                own.index_copy_(0, numbers, theirs)


class SettledPrefill(Prefill):
    """Takes texts into blocks, some of their tokens up to a checkpoint only."""

    def __init__(
        self, runner: DeviceRunner, prompts: Prompts, depth: int, drafter: DeviceDrafter | None, settling: Settling
    ) -> None:
        super().__init__(runner, prompts, depth, drafter)
        self.settling = settling

    def _launch(self, tokens: Tokens, columns: int) -> bool:
        self._through(tokens, columns)
        return True

    def _through(self, tokens: Tokens, columns: int) -> None:
        slots, count, deep = self.slots, len(tokens.ids), range(self.settling.depth, self.runner.num_layers)
        states = slots.like.new_empty(count, len(slots.like))
        self.runner.embed_on_slots(slots, tokens, states)
        shown = Shown() if slots.memory is None else Shown(states.new_empty(count, slots.memory.seen), torch.empty_like(states))
        self._take(range(deep.start), states, tokens, columns, shown)
        settled = self._ask(states)
        if settled:
            self._fill(deep, settled, states, tokens, shown)
            out = set(settled)
            staying = [number for number in range(sum(len(part) for _, part in self.parts)) if number not in out]
            numbers, picked = gathered(tokens, staying)
            part = shown.of(numbers)
            self._take(deep, states[numbers], picked, columns, part)
            shown.put(numbers, part)
        else:
            self._take(deep, states, tokens, columns, shown)
        if self.drafter is not None and shown.noted is not None and shown.entry is not None:
            self.drafter.remember_prompt(tokens, shown.entry, shown.noted)

    def _take(self, span: range, states: torch.Tensor, tokens: Tokens, columns: int, shown: Shown) -> None:
        """Take states, in place, through layers."""
        edges = sorted({span.start, span.stop, *({self.depth} & set(span))})
        for start, stop in pairwise(edges):
            if start == self.depth and shown.entry is not None:
                shown.entry.copy_(states)
            if self.drafter is not None:
                self.drafter.through(range(start, stop), states, tokens, columns, shown.noted)
            else:
                for _ in self.runner.layers_on_slots(self.slots, range(start, stop), states, tokens, columns, ()):
                    pass

    def _ask(self, states: torch.Tensor) -> list[int]:
        """Return the numbers of the tokens that settle: never the last one of a prompt, nor one that was written."""
        positions = [position for _, part in self.parts for position in part]
        if not positions:
            return []
        flags = self.settling.settles(states[: len(positions)], positions).tolist()
        settled, number = list[int](), 0
        for own, part in self.parts:
            row, before = own.row, len(settled)
            for position in part:
                if flags[number] and position < row.prompt - 1:
                    settled.append(number)
                number += 1
            row.stats.settled_tokens += len(settled) - before
            row.stats.layers_run -= (len(settled) - before) * (self.runner.num_layers - self.settling.depth)
        return settled

    def _fill(self, span: range, settled: list[int], states: torch.Tensor, tokens: Tokens, shown: Shown) -> None:
        """Write K/V of settled tokens, and what a memory head sees of them: predicted states."""
        predict, drafter = self.settling.predict, self.drafter
        numbers, picked = gathered(tokens, settled)
        own, part, width = states[numbers], shown.of(numbers), states.shape[1]
        self.runner.write_kv_on_slots(self.slots, span, own, picked, predict)
        if part.entry is None or part.noted is None or drafter is None:
            return
        shallow = [(place, depth) for place, depth in enumerate(drafter.depths) if depth <= span.start]
        if shown.noted is not None and shallow:
            part.noted.copy_(shown.noted[numbers])
        if shown.entry is not None and self.depth < span.start:
            part.entry.copy_(shown.entry[numbers])
        else:
            part.entry.copy_(predict(self.depth, own))
        for place, depth in enumerate(drafter.depths):
            if depth > span.start:
                room = part.noted[:, place * width : (place + 1) * width]
                self.runner.exits.normalize_into(predict(depth, own), None, room, EPS)
        shown.put(numbers, part)
