"""Prefill on slots where tokens of prompts may settle: the rest of their layers is one product for K/V.

    layers 0 … c     all tokens of the pass, of any rows
    at c             the host reads who settles
    K/V, c … L       of the settled ones, made of their predicted states
    c … L            the others, gathered: a ragged pass of fewer tokens

Who settles is known on the host only when a pass runs, so such passes are not captured. K/V of these rows are never shared:
see `Seats`.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from TIDE.engine.cache.prompts import Prompts, gathered
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.round.device_drafter import DeviceDrafter
from TIDE.engine.round.prefill import Prefill
from TIDE.engine.runners.device import DeviceRunner
from TIDE.routing.settling import Settling


class Shown(NamedTuple):
    """States that a memory head will see of the tokens of a pass; none without such a head."""

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


class Aside:
    """Work beside that of the current stream, after everything launched there when this is made; in turn without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _stream_of(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def working(self) -> AbstractContextManager[None]:
        """What is launched here is part of the work."""
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Let what the current stream is given next wait for the work so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SettledPrefill(Prefill):
    """Takes texts into blocks, some of their tokens up to a checkpoint only."""

    def __init__(
        self,
        runner: DeviceRunner,
        prompts: Prompts,
        depth: int,
        drafter: DeviceDrafter | None,
        rows: Slots,
        settling: Settling,
    ) -> None:
        super().__init__(runner, prompts, depth, drafter, rows)
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
        if settled.any():
            self._deep(deep, settled, states, tokens, columns, shown)
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

    def _ask(self, states: torch.Tensor) -> np.ndarray:
        """Return who settles of the tokens of the pass: never the last one of a prompt, nor one that was written."""
        settled = np.zeros(sum(len(part) for _, part in self.parts), bool)
        if not len(settled):
            return settled
        positions = np.concatenate([np.arange(part.start, part.stop) for _, part in self.parts])
        settled |= self.settling.settles(states[: len(settled)], positions.tolist()).cpu().numpy()
        first = 0
        for own, part in self.parts:
            row, numbers = own.row, slice(first, first + len(part))
            settled[numbers] &= positions[numbers] < row.prompt - 1
            count = int(settled[numbers].sum())
            row.stats.settled_tokens += count
            row.stats.layers_run -= count * (self.runner.num_layers - self.settling.depth)
            first += len(part)
        return settled

    def _deep(
        self,
        span: range,
        settled: np.ndarray,
        states: torch.Tensor,
        tokens: Tokens,
        columns: int,
        shown: Shown,
    ) -> None:
        """Take those that stay through the deep layers, one by one; K/V of the others are written beside the layer before, on
        a stream of their own. They need nothing of the deep layers, and take the multiprocessors that its products leave."""
        rows = np.repeat(np.arange(len(self.parts)), [len(part) for _, part in self.parts])
        gone, left = gathered(tokens, np.flatnonzero(settled), rows)
        stay, staying = gathered(tokens, np.flatnonzero(~settled), rows)
        own, moving, part = states[gone], states[stay], shown.of(stay)
        aside = Aside(states.device)
        for layer in span:
            with aside.working():
                self.runner.write_kv_on_slots(self.slots, layer, self.settling.predict(layer, own), left)
            aside.join()
            if len(stay):
                self._take(range(layer, layer + 1), moving, staying, columns, part)
        self._show_settled(span, own, gone, shown)
        for depth in self._noted_before(span):
            place = slice(depth * states.shape[1], (depth + 1) * states.shape[1])
            if part.noted is not None and shown.noted is not None:
                part.noted[:, place] = shown.noted[stay, place]
        if part.entry is not None and shown.entry is not None and self.depth < span.start:
            part.entry.copy_(shown.entry[stay])
        shown.put(stay, part)

    def _noted_before(self, span: range) -> list[int]:
        """Return the places of depths that a memory head remembers of all tokens, settled or not."""
        depths = [] if self.drafter is None else self.drafter.depths
        return [place for place, depth in enumerate(depths) if depth <= span.start]

    def _show_settled(self, span: range, states: torch.Tensor, numbers: torch.Tensor, shown: Shown) -> None:
        """Let a memory head see predicted states of settled tokens."""
        if self.drafter is None or shown.noted is None or shown.entry is None:
            return
        predict, width = self.settling.predict, states.shape[1]
        if self.depth >= span.start:
            shown.entry.index_copy_(0, numbers, predict(self.depth, states))
        for place, depth in enumerate(self.drafter.depths):
            if depth > span.start:
                room = states.new_empty(len(states), width)
                self.drafter.note(place, predict(depth, states), room)
                shown.noted[:, place * width : (place + 1) * width].index_copy_(0, numbers, room)
