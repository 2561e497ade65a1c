"""Prefill on slots where tokens of prompts may settle: of the rest of their layers only K/V are computed.

    layers before c     all tokens of the pass, of any rows
    layer c             K/V and attention of all, while the host reads who settles; the rest is for those that stay
    layers behind c     those that stay; the products of q, k and v also write K/V of the settled ones, from predicted states

Who settles is known on the host only when a pass runs, so such passes are not captured. K/V of these rows are never shared:
see `Residents`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from TIDE.engine.cache.prefill_buffers import Prompts, grouped
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.drafter import DeviceDrafter
from TIDE.engine.slots.prefill import Prefill
from TIDE.kernels.layer import Begun
from TIDE.kernels.transfer import read_later, sent
from TIDE.routing.settling import Settling


class Shown(NamedTuple):
    """States that a memory head will see of the tokens of a pass; none without such a head."""

    noted: torch.Tensor | None = None  # (n, seen) of their states, normed, at the depths that it remembers
    entry: torch.Tensor | None = None  # (n, hidden) their states where it drafts from

    def of(self, numbers: torch.Tensor) -> Shown:
        """Return room for the same of some tokens."""
        return Shown(*(None if own is None else own.new_empty(len(numbers), own.shape[1]) for own in self))


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
        shown = Shown() if slots.memory is None else Shown(states.new_zeros(count, slots.memory.seen), torch.zeros_like(states))
        allowed = self._allowed(states.device)
        self._take(range(deep.start), states, tokens, columns, shown)
        if len(allowed):
            self._deep(deep, allowed, states, tokens, columns, shown)
        else:
            self._take(deep, states, tokens, columns, shown)
        torch.index_select(states, 0, self.prompts.ends, out=self.prompts.last)
        if self.drafter is not None and shown.noted is not None and shown.entry is not None:
            self.drafter.remember_prompt(tokens, shown.entry, shown.noted)

    def _take(self, span: range, states: torch.Tensor, tokens: Tokens, columns: int, shown: Shown) -> None:
        """Take states of tokens that ask, in place, through layers, if there are any."""
        edges = sorted({span.start, span.stop, *({self.depth} & set(span))})
        for start, stop in pairwise(edges):
            if start == self.depth and shown.entry is not None:
                shown.entry.copy_(states[: tokens.asking])
            if self.drafter is not None:
                self.drafter.through(range(start, stop), states, tokens, columns, shown.noted)
            else:
                for _ in self.runner.layers_on_slots(self.slots, range(start, stop), states, tokens, columns, ()):
                    pass

    def _allowed(self, device: torch.device) -> torch.Tensor:
        """Return who may settle of the tokens of the pass: never the last one of a prompt, nor one that was written."""
        found = [np.arange(part.start, part.stop) < own.row.prompt - 1 for own, part in self.parts]
        return sent(torch.from_numpy(np.concatenate([[], *found]).astype(bool)), device)

    def _count(self, settled: np.ndarray) -> list[int]:
        """Note who settled; return how many tokens of each row stay."""
        starts = np.cumsum([0, *(len(part) for _, part in self.parts[:-1])])
        gone = np.add.reduceat(settled, starts, dtype=int).tolist()
        for (own, part), count in zip(self.parts, gone, strict=True):
            before = own.row.stats.settled_tokens if part.start else 0  # a text may run again
            own.row.stats.settled_tokens = before + count
            own.row.stats.layers_run -= count * (self.runner.num_layers - self.settling.depth)
        return [len(part) - count for (_, part), count in zip(self.parts, gone, strict=True)]

    def _deep(
        self, span: range, allowed: torch.Tensor, states: torch.Tensor, tokens: Tokens, columns: int, shown: Shown
    ) -> None:
        """Take tokens through the deep layers, in place; settled ones are left where they are."""
        asked = len(allowed)
        settled = self.settling.settles(states[:asked], tokens.positions[:asked]) & allowed
        known = read_later(settled)
        begun = self.runner.begin_layer_on_slots(self.slots, span.start, states, tokens, columns)
        order = settled.to(torch.uint8).argsort(stable=True)  # those that stay come first
        ordered, all_, begun_in_order = states[order], tokens.taken(order), begun.of(order)
        counts = self._count(found := known())  # the device still has all of this to do
        if not found.any():
            self._end_layer(span.start, states, begun, shown)
            self._take(span[1:], states, tokens, columns, shown)
            return
        stays = sum(counts)
        stay, gone, own = order[:stays], order[stays:], ordered[stays:].clone()
        part = shown.of(stay)
        if stays:
            self._end_layer(span.start, ordered[:stays], begun_in_order.of(slice(stays)), part)
        all_ = all_._replace(groups=grouped(counts, order.device), asking=stays)
        for depth in self.settling.predictions(span[1:], own, out=ordered[stays:]):
            self._take(range(depth, depth + 1), ordered, all_, columns, part)
        states.index_copy_(0, stay, ordered[:stays])
        self._show_settled(span, own, gone, shown)
        self._show_staying(span, part, stay, shown)

    def _end_layer(self, index: int, states: torch.Tensor, begun: Begun, shown: Shown) -> None:
        if index == self.depth and shown.entry is not None:
            shown.entry.copy_(states)
        self.runner.end_layer_on_slots(index, states, begun)
        if self.drafter is not None and shown.noted is not None and index + 1 in self.drafter.depths:
            self.drafter.note_at(index + 1, states, shown.noted)

    def _show_staying(self, span: range, part: Shown, numbers: torch.Tensor, shown: Shown) -> None:
        """Let a memory head see states of tokens that stay: those of the deep layers, and what was seen of all before."""
        if self.drafter is None or part.noted is None or part.entry is None or shown.noted is None or shown.entry is None:
            return
        width = part.entry.shape[1]
        for place in (place for place, depth in enumerate(self.drafter.depths) if depth <= span.start):
            seen = slice(place * width, (place + 1) * width)
            part.noted[:, seen] = shown.noted[numbers, seen]
        if self.depth < span.start:
            part.entry.copy_(shown.entry[numbers])
        shown.noted.index_copy_(0, numbers, part.noted)
        shown.entry.index_copy_(0, numbers, part.entry)

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
