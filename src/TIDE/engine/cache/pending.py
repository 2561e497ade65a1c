"""Pending tokens: what has entered a segment's queue and has not run there yet.

    row:            t0 t1 t2 t3 t4 t5 t6
    segment 0       ■  ■  ■  ■  ■  ■  ■       length 7
    segment 1       ■  ■  ■  ■  ·  ·  ·       length 4, pending t4 t5 t6
    segment 2       ■  ■  ■  ·  ·  ·  ·       length 3, pending t3 (t4 t5 t6 not there yet)

The cache knows the lengths; here are the states of the pending tokens at the entry of each segment. Segment 0
needs none: it starts from token ids. A state is kept until the token has run all layers, because a rollback may
make it pending again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class _Queue(NamedTuple):
    first: int  # position of the first state
    states: torch.Tensor  # (n, hidden)


class Pending:
    """States at the entry of each segment, by (segment, row)."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], _Queue] = {}

    def add(self, segment: int, row: int, position: int, states: torch.Tensor) -> None:
        """States of the tokens from `position` on; they follow, or replace, what is there."""
        assert states.ndim == 2
        queue = self._queues.get((segment, row))
        if queue is not None and position > queue.first:
            assert position <= queue.first + len(queue.states), "a gap in the queue"
            states = torch.cat([queue.states[: position - queue.first], states])
            position = queue.first
        self._queues[segment, row] = _Queue(position, states)

    def states(self, segment: int, row: int, start: int, stop: int) -> torch.Tensor:
        """(stop - start, hidden) states of the positions [start, stop)."""
        first, states = self._queues[segment, row]
        assert first <= start < stop <= first + len(states), (first, start, stop, len(states))
        return states[start - first : stop - first]

    def drop_before(self, row: int, position: int) -> None:
        """The tokens before `position` have run all layers."""
        for (segment, owner), (first, states) in list(self._queues.items()):
            if owner == row and position > first:
                if position < first + len(states):
                    self._queues[segment, owner] = _Queue(position, states[position - first :])
                else:
                    del self._queues[segment, owner]

    def cut(self, row: int, length: int) -> None:
        """The row was rolled back to `length` tokens."""
        for (segment, owner), (first, states) in list(self._queues.items()):
            if owner == row and length < first + len(states):
                if length > first:
                    self._queues[segment, owner] = _Queue(first, states[: length - first])
                else:
                    del self._queues[segment, owner]
