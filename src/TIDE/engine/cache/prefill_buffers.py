"""Prompts: fixed buffers for passes that run texts of rows that join.

They have slots of their own, whose tables are written for each pass: the rows of a pass stand there in the order in which they
come. So a graph for a number of tokens is captured once, and not for every number of rows that are decoded beside it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from TIDE.engine.cache.kv_blocks import NOBODY
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.kernels.transfer import sent, write

CHUNK = 2048  # tokens of a pass
CAPTURED = 256  # tokens of a pass that is captured; a longer one keeps the device busy anyway
STEP = 16  # the tokens of a pass are a multiple of it
ROWS = 64  # of a pass
FEW, MANY = 16, 64  # tokens of a row that read K/V together, in a pass that is captured or not


class Part(NamedTuple):
    """Tokens of one row in a pass."""

    ids: Sequence[int]
    first: int  # position of the first of them
    blocks: Sequence[int]  # of the row, from its first token on


class Prompts:
    """Tokens of rows on their way in.

    Args:
        slots: that nobody else has; their last row is nobody's.

    Attributes:
        ends: numbers of the last tokens of the rows of a pass.
        last: (ROWS, hidden) their states, once it has run.
    """

    def __init__(self, slots: Slots) -> None:
        device = slots.like.device
        self.slots = slots
        self._short = torch.zeros(2, CHUNK, dtype=torch.int32, device=device)
        self._long = torch.zeros(3, CHUNK, dtype=torch.long, device=device)
        self._groups = torch.zeros(CAPTURED, FEW, dtype=torch.int32, device=device)
        self.ends = torch.zeros(ROWS, dtype=torch.long, device=device)
        self.last = slots.like.new_zeros(ROWS, len(slots.like))

    @staticmethod
    def padded(tokens: int) -> int:
        """Return the number of tokens in a pass that holds `tokens`."""
        return -(-tokens // STEP) * STEP

    def write(self, parts: Sequence[Part]) -> Tokens:
        """Take tokens of some rows; return them with padding, which is nobody's."""
        counts = [len(part.ids) for part in parts]
        count, starts, size = self.padded(sum(counts)), [0, *itertools.accumulate(counts)], self.slots.store.size
        table = np.zeros((5, count), np.int64)  # row, position, id and both places of each token, as `Tokens` has them
        table[0] = ROWS
        for number, (part, start, stop) in enumerate(zip(parts, starts, starts[1:], strict=False)):
            positions = np.arange(part.first, part.first + len(part.ids) + 1)
            places = np.array(part.blocks)[positions // size] * size + positions % size
            table[:2, start:stop] = np.full(stop - start, number), positions[:-1]
            table[2:, start:stop] = np.asarray(part.ids), places[:-1], places[1:]
        write(self._short[:, :count], torch.from_numpy(table[:2]))
        write(self._long[:, :count], torch.from_numpy(table[2:]))
        self._write_tables([part.blocks for part in parts])
        ends = [stop - 1 for stop in starts[1:]]
        write(self.ends, torch.tensor(ends + [0] * (ROWS - len(ends))))
        (rows, positions), (ids, places, after) = self._short[:, :count], self._long[:, :count]
        return Tokens(ids, rows, positions, places, after, self._grouped(counts, count))

    def _grouped(self, counts: list[int], count: int) -> torch.Tensor:
        """Return the groups of a pass: of one that is captured in a fixed buffer, with room for any rows."""
        if count > CAPTURED:
            return grouped(counts, self._groups.device)
        found = _few_together(counts, count)
        room = self._groups[: len(found)]
        write(room, found)
        return room

    def _write_tables(self, blocks: Sequence[Sequence[int]]) -> None:
        width = max(map(len, blocks))
        table = torch.tensor([[*own, *[NOBODY] * (width - len(own))] for own in blocks], dtype=torch.int32)
        write(self.slots.tables[: len(blocks), :width], table)


def grouped(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the groups of a pass that is not captured.

    Args:
        counts: tokens of its rows, which follow each other.
    """
    count = Prompts.padded(sum(counts))
    return sent(_few_together(counts, count) if count <= CAPTURED else _grouped(counts, MANY), device)


def _few_together(counts: Sequence[int], count: int) -> torch.Tensor:
    """Return the groups of a pass of `count` tokens, padding included, that may be captured: there is room for any rows, and
    kernels are compiled for this number of groups."""
    found, groups = _grouped(counts, FEW), torch.full((min(count, count // FEW + ROWS), FEW), -1, dtype=torch.int32)
    groups[: len(found)] = found
    return groups


def _grouped(counts: Sequence[int], together: int) -> torch.Tensor:
    """Return the numbers of tokens of one row that follow each other, at most `together` in a group; -1: none.

    Args:
        counts: tokens of the rows, which follow each other.
    """
    start, groups = 0, [np.zeros((0, together), np.int32)]
    for count in counts:
        own = np.full(-(-count // together) * together, -1, np.int32)
        own[:count] = np.arange(start, start + count)
        groups.append(own.reshape(-1, together))
        start += count
    return torch.from_numpy(np.concatenate(groups))
