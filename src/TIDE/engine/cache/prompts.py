"""Prompts: fixed buffers for passes that run texts of rows that join.

They have slots of their own, whose tables are written for each pass: the rows of a pass stand there in the order in which they
come. So a graph of so many tokens is captured once, and not for every number of rows that are decoded beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from TIDE.engine.cache.blocks import NOBODY
from TIDE.engine.cache.slots import Slots, Tokens

CHUNK = 2048  # tokens of a pass
CAPTURED = 256  # tokens of a pass that is captured; a longer one keeps the device busy anyway
STEP = 16  # a pass has so many tokens, or twice as many, and so on
ROWS = 64  # of a pass
FEW, MANY = 16, 64  # tokens of a row that read K/V together, in a pass that is captured or not

Given = tuple[int, int, int, int, int]  # id, row, position and both places of a token, as `Tokens` has them


class Prompts:
    """Tokens of rows on their way in.

    Args:
        slots: that nobody else has; their last row is nobody's.
    """

    def __init__(self, slots: Slots) -> None:
        device = slots.like.device
        self.slots = slots
        self._short = torch.zeros(2, CHUNK, dtype=torch.int32, device=device)
        self._long = torch.zeros(3, CHUNK, dtype=torch.long, device=device)
        self._groups = torch.zeros(CAPTURED, FEW, dtype=torch.int32, device=device)

    @staticmethod
    def padded(tokens: int) -> int:
        """Return the tokens of a pass for so many."""
        return -(-tokens // STEP) * STEP

    def write(self, given: Sequence[Given], blocks: Sequence[Sequence[int]]) -> Tokens:
        """Take tokens, and the blocks of their rows; return them with padding, which is nobody's."""
        count = self.padded(len(given))
        table = torch.tensor([*given, *[(0, ROWS, 0, 0, 0)] * (count - len(given))]).T.contiguous()
        self._short[:, :count].copy_(table[1:3], non_blocking=True)
        self._long[:, :count].copy_(table[[0, 3, 4]], non_blocking=True)
        self._write_tables(blocks)
        (rows, positions), (ids, places, after) = self._short[:, :count], self._long[:, :count]
        return Tokens(ids, rows, positions, places, after, self._grouped([own[1] for own in given], count))

    def _grouped(self, rows: list[int], count: int) -> torch.Tensor:
        """Return the groups of a pass: of one that is captured in a fixed buffer, with room for any rows."""
        if count > CAPTURED:
            return _grouped(rows, MANY).to(self._groups.device, non_blocking=True)
        found, room = _grouped(rows, FEW), self._groups[: min(count, count // FEW + ROWS)]
        room.fill_(-1)
        room[: len(found)].copy_(found, non_blocking=True)
        return room

    def _write_tables(self, blocks: Sequence[Sequence[int]]) -> None:
        width = max(map(len, blocks))
        table = torch.tensor([[*own, *[NOBODY] * (width - len(own))] for own in blocks], dtype=torch.int32)
        self.slots.tables[: len(blocks), :width].copy_(table, non_blocking=True)


def gathered(tokens: Tokens, numbers: list[int], rows: list[int]) -> tuple[torch.Tensor, Tokens]:
    """Return some tokens of a pass that is not captured, and their numbers on the device.

    Args:
        rows: of all tokens of the pass.
    """
    at = torch.tensor(numbers, dtype=torch.long).to(tokens.ids.device, non_blocking=True)
    groups = _grouped([rows[number] for number in numbers], MANY if len(numbers) > CAPTURED else FEW)
    ids, own, positions, places, after = (table[at] for table in tokens[:5])
    return at, Tokens(ids, own, positions, places, after, groups.to(at.device, non_blocking=True))


def _grouped(rows: list[int], together: int) -> torch.Tensor:
    """Return the numbers of tokens of one row that follow each other, so many at most in a group; -1: none."""
    groups: list[list[int]] = []
    for number, row in enumerate(rows):
        if not number or row != rows[number - 1] or len(groups[-1]) == together:
            groups.append([])
        groups[-1].append(number)
    return torch.tensor([own + [-1] * (together - len(own)) for own in groups], dtype=torch.int32)
