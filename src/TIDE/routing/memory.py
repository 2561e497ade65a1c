"""The state of a memory head for rows that are decoded together: inputs, K/V, and up to which position both are final.

    position            0    1    2    3    4    5
    this token         h0   h1   h2   h3   h4   h5
    previous token      0   f0   f1   f2   y3   y4        f known for 3 positions; y are the head's own guesses
    K/V                 ■    ■    ■    ■    □    □        □ will be fed again once f3 and f4 are known

`known` counts the positions whose deep states have been observed, `fed` those whose K/V are final. A guess feeds the
positions from `fed` to the newest: those with true memories in one pass, drafted ones one by one, as in training. Observed
states are queued and copied only when a guess is needed, so rows that never draft pay nothing. Room for rows and positions is
made as it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional as F

from TIDE.kernels.layer import MOST_TOKENS
from TIDE.routing.compiled_head import CompiledHead, HeadBuffers
from TIDE.routing.heads import DraftHead, for_queries

ROOM = 256  # positions


class _Shown(NamedTuple):
    depth: int
    position: int
    states: torch.Tensor  # (n, hidden)


class CopiedMemory(NamedTuple):
    """The state of a row: see `HeadMemory`."""

    parts: list[torch.Tensor]  # of `HeadBuffers`
    fresh: list[range]
    known: int
    fed: int


class HeadMemory:
    """The state of one memory head for up to `rows` rows."""

    def __init__(self, head: DraftHead, depth: int, num_layers: int, rows: int, compiled: CompiledHead | None = None) -> None:
        self.head = head if compiled is None else compiled.head
        self.compiled = compiled
        self.inputs, self.depths = head.seen(depth, num_layers)
        self.known = [0] * rows
        self.fed = [0] * rows
        self._shown: list[list[_Shown]] = [[] for _ in range(rows)]  # observed states, not yet copied
        self._fresh: list[list[range]] = [[] for _ in range(rows)]  # positions of deep states, not yet turned into memories
        sizes, weight = head.sizes, head.qkv.weight
        widths = (sizes.inputs * sizes.hidden_dim, sizes.memories * sizes.hidden_dim, sizes.hidden_dim)
        heads = [weight.new_zeros(1, sizes.kv_heads, 0, sizes.head_dim) for _ in range(2)]
        self._keep(HeadBuffers(*[weight.new_zeros(1, 0, width) for width in widths], *heads))

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        """Queue states of a row's tokens from `position` on. After deep states, positions fed with guesses are fed again."""
        self._shown[row].append(_Shown(depth, position, states))
        if depth == self.depths[-1]:
            stop, fresh = position + len(states), self._fresh[row]
            start = fresh.pop().start if fresh and fresh[-1].stop == position else position
            fresh.append(range(start, stop))
            self.fed[row] = min(self.fed[row], position + 1)
            self.known[row] = stop

    def forget(self, row: int, length: int) -> None:
        self.known[row] = min(self.known[row], length)
        self._fresh[row] = [range(span.start, min(span.stop, length)) for span in self._fresh[row] if span.start < length]
        self._shown[row] = [one for one in self._shown[row] if one.position < length]
        self.fed[row] = min(self.fed[row], length)
        if not length and row < len(self._kept.keys):
            for part in self._kept:  # a masked position still enters products, and NaN times zero is NaN
                part[row] = 0

    def copied(self, row: int) -> CopiedMemory:
        """Return a copy of the state of a row, up to the last token that has run all layers."""
        self._put_in_place(row)
        known = self.known[row]
        self._make_room(row, known)
        return CopiedMemory(
            [part[row, ..., :known, :].clone() for part in self._kept], self._fresh[row].copy(), known, self.fed[row]
        )

    def paste(self, row: int, copied: CopiedMemory, length: int) -> None:
        """Let a row begin with the first `length` positions of a copy."""
        parts, fresh, self.known[row], self.fed[row] = copied
        self._fresh[row] = fresh.copy()
        self._make_room(row, length)
        for part, own in zip(parts, self._kept, strict=True):
            own[row, ..., :length, :] = part[..., :length, :]
        self.forget(row, length)

    def guess(self, rows: list[int], positions: list[int]) -> torch.Tensor:
        """Return (n, hidden) guesses for the tokens at these positions, each the newest of its row."""
        self._recall(rows)
        found: dict[int, torch.Tensor] = {}
        fed = {row: min(self.fed[row], at) for row, at in zip(rows, positions, strict=True)}
        newest = dict(zip(rows, positions, strict=True))
        while rows := [row for row in rows if row not in found]:
            spans = [range(fed[row], min(newest[row], max(self.known[row], fed[row])) + 1) for row in rows]
            for row, span, own in zip(rows, spans, self._feed(rows, spans), strict=True):
                fed[row] = self.fed[row] = span.stop
                if span.stop > newest[row]:
                    found[row] = own
        return _stacked([found[row] for row in newest])

    def finished(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return memories, keys and values of a row, up to the last token that has run all layers."""
        self._recall([row])
        if self.fed[row] < self.known[row]:
            self._feed([row], [range(self.fed[row], self.known[row])])
            self.fed[row] = self.known[row]
        return self._kept.before[row], self._kept.keys[row], self._kept.values[row]

    def _put_in_place(self, row: int) -> None:
        """Copy the queued states of a row; consecutive ones, which arrive token by token, are copied together."""
        shown: dict[int, list[_Shown]] = {}
        for one in self._shown[row]:
            shown.setdefault(one.depth, []).append(one)
        self._shown[row].clear()
        for depth, parts in shown.items():
            for start, states in _pieces(parts):
                self._make_room(row, start + len(states))
                own = states if self.compiled is None else states.numpy()
                for depths, kept in ((self.inputs, self._quick.shallow), (self.depths, self._quick.deep)):
                    if depth in depths:
                        place, width = depths.index(depth) * own.shape[1], own.shape[1]
                        kept[row, start : start + len(own), place : place + width] = own

    def _recall(self, rows: list[int]) -> None:
        """Turn deep states into memories, now that a guess needs them."""
        for row in rows:
            self._put_in_place(row)
            for span in self._fresh[row]:
                own = slice(span.start, span.stop)
                if self.compiled is not None and len(span) <= MOST_TOKENS:
                    self._quick.before[row, own] = self.compiled.remember(self._quick.deep[row, own])
                else:
                    self._kept.before[row, own] = self.head.remember(self._kept.deep[row, own])
            self._fresh[row].clear()

    def _feed(self, rows: list[int], spans: list[range]) -> torch.Tensor:
        """Feed spans of positions to the head; return the (n, hidden) guesses at their ends. The other positions only store
        K/V: the positions after them have true memories.

        Compiled code rounds states, so which rows it takes is a matter of their own spans.
        """
        if self.compiled is None:
            return self._feed_long(rows, spans)
        found: dict[int, torch.Tensor] = {}
        long = [(row, span) for row, span in zip(rows, spans, strict=True) if len(span) > MOST_TOKENS]
        if long:
            own_rows, own_spans = map(list, zip(*long, strict=True))
            found = dict(zip(own_rows, self._feed_long(own_rows, own_spans), strict=True))
        for row, span in zip(rows, spans, strict=True):
            if row not in found:
                guess = self.compiled.feed(row, span, self._quick)
                found[row] = torch.from_numpy(guess)
                if span[-1] >= self.known[row]:
                    self._quick.before[row, span[-1]] = guess
        return _stacked([found[row] for row in rows])

    def _feed_long(self, rows: list[int], spans: list[range]) -> torch.Tensor:
        """Feed spans to the head in torch."""
        guesses = self._through(rows, spans)
        for row, span, carried in zip(rows, spans, self.head.carry(guesses), strict=True):
            if span[-1] >= self.known[row]:
                self._kept.before[row, span[-1]] = carried
        return guesses

    def _through(self, rows: list[int], spans: list[range]) -> torch.Tensor:
        """Run spans in one pass, shorter ones padded with their last position."""
        shallow, _, memories, keys, values = self._kept
        device, width = shallow.device, max(map(len, spans))
        where = torch.tensor(rows, device=device)[:, None]
        at = torch.tensor([[min(span.start + i, span[-1]) for i in range(width)] for span in spans], device=device)
        before = memories[where, (at - 1).clamp(min=0)] * (at > 0)[..., None]
        x = self.head.enter(shallow[where, at], before)
        k, v = self.head.keys_and_values(x, at)
        keys[where, :, at] = k.transpose(1, 2)
        values[where, :, at] = v.transpose(1, 2)
        x, at = x[:, -1:], at[:, -1:]  # padding repeats the last position
        return self.head.leave(x, self._attend(self.head.project(x, at)[0], where[:, 0], at))[:, 0]

    def _attend(self, q: torch.Tensor, rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return (n, heads, q, d) causal attention: every position sees those up to itself."""
        width = int(at.max()) + 1
        keys, values = (for_queries(x[rows, :, :width], self.head.sizes) for x in (self._kept.keys, self._kept.values))
        columns, last = torch.arange(width, device=at.device), at[:, None, :, None]
        seen = (columns <= last) & ((columns >= self.head.begins_at) | (columns == last))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)

    def _make_room(self, row: int, length: int) -> None:
        rows, room = self._kept.shallow.shape[:2]  # positions are the second-to-last dimension of every part, rows the first
        more = max(length + ROOM, 2 * room) - room if length > room else 0
        others = min(max(row + 1, 2 * rows), len(self.known)) - rows if row >= rows else 0
        if more or others:
            self._keep(
                HeadBuffers(*[F.pad(part, (0, 0, 0, more, *[0, 0] * (part.ndim - 3), 0, others)) for part in self._kept])
            )

    def _keep(self, kept: HeadBuffers) -> None:
        self._kept = kept
        self._quick = kept if self.compiled is None else HeadBuffers(*[part.numpy() for part in kept])


def _stacked(rows: list[torch.Tensor]) -> torch.Tensor:
    """Stack rows to (n, hidden); a single row is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def _pieces(parts: list[_Shown]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield states of one depth with their first position, consecutive ones joined, in order of arrival."""
    while parts:
        count = 1
        while count < len(parts) and parts[count].position == parts[count - 1].position + len(parts[count - 1].states):
            count += 1
        yield parts[0].position, parts[0].states if count == 1 else torch.cat([one.states for one in parts[:count]])
        parts = parts[count:]
