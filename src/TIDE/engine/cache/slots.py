"""Slots: static buffers for decoding rows with CUDA graphs. Rows come and go, slots stay.

    text            (rows, columns) prompts
    keys, values    of every layer, (rows, heads, columns, dim)
    tables          (rows, 1) where kernels find a row's K/V: in the block of its number
    tokens          (17, rows) of a round: the newest final token of each row, then its drafts
    starts          (16, rows) the positions they stand at
    settings        how tokens are chosen, row by row; for greedy rows nothing is read of it
    result          (rows, fields) what the host reads: see `kernels/result.py`
    memory          of a memory head: states of the tokens before, its own K/V

The tokens of a round are flattened step by step, so those of one step, and of the first steps, are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from TIDE.adapters.probe import Store
from TIDE.adapters.rotary_table import CosSin
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.kernels.layer import MOST_TOKENS, Pass, dense_tables, only_kv
from TIDE.kernels.result import FIELDS
from TIDE.kernels.sampling import Settings
from TIDE.routing.exits import Exit
from TIDE.routing.heads import MemoryHead
from TIDE.routing.router import Router

COLUMNS = 1024  # slots have so many, or twice as many, and so on


class KVShape(NamedTuple):
    """The K/V of a token in a layer."""

    heads: int
    key_dim: int
    value_dim: int


class Memory:
    """Static buffers of a memory head for one row."""

    def __init__(self, head: MemoryHead, columns: int) -> None:
        weight, sizes = head.fuse.weight, head.sizes
        self.head = head
        self.layer = head.as_layer()
        self.only_kv = only_kv(self.layer.attention)
        self.before = weight.new_zeros(columns + 1, sizes.hidden_dim)  # row p: the memory of position p - 1
        self.parts = weight.new_zeros(MOST_TOKENS, sizes.memories * sizes.hidden_dim)  # of finished tokens, to be remembered
        self.entries = weight.new_zeros(MOST_TOKENS, (sizes.inputs + 1) * sizes.hidden_dim)  # of those that wait for it
        self.fed = torch.zeros(1, dtype=torch.int32, device=weight.device)  # positions whose K/V are there
        self.keys, self.values = weight.new_zeros(2, 1, sizes.kv_heads, columns, sizes.head_dim)
        positions = torch.arange(columns, device=weight.device)[None]
        self.angles = CosSin(*(part[0, 0].contiguous() for part in head.angles(positions, weight.dtype)))


def score_params(router: Router) -> torch.Tensor:
    """Return what makes a score of a router's sum: bias, temperature, offset."""
    bias = router.temperature.new_zeros(1) if router.up.bias is None else router.up.bias
    return torch.cat([bias, router.temperature[None], router.offset[None]])


class Slots:
    """Fixed addresses for rows of up to `columns` tokens.

    Args:
        like: (hidden,) a state; dtype and device are those of all states.
        kv_shapes: of each layer.
        angles: rotary tables by kind; None: layers compute angles themselves.
        exit_: the exit that rounds will ask.
        context: tokens that the model can take. Rounds may run past it; positions beyond it are clamped.
    """

    def __init__(
        self,
        like: torch.Tensor,
        kv_shapes: list[KVShape],
        angles: dict[str, CosSin] | None,
        rows: int,
        columns: int,
        exit_: Exit | None,
        context: int | None = None,
    ) -> None:
        long: dict[str, Any] = dict(dtype=torch.long, device=like.device)
        short: dict[str, Any] = dict(dtype=torch.int32, device=like.device)
        single: dict[str, Any] = dict(dtype=torch.float32, device=like.device)
        self.rows = rows
        self.columns = columns
        self.exit = exit_
        self.angles = angles
        self.keys = [like.new_zeros(rows, shape.heads, columns, shape.key_dim) for shape in kv_shapes]
        self.values = [like.new_zeros(rows, shape.heads, columns, shape.value_dim) for shape in kv_shapes]
        head = None if exit_ is None else exit_.head
        self.memory = Memory(head, columns) if isinstance(head, MemoryHead) else None
        self.score_params = None if exit_ is None else score_params(exit_.router)
        self.tokens = torch.zeros(MOST_TOKENS + 1, rows, **long)
        self.starts = torch.zeros(MOST_TOKENS, rows, **short)
        self.row_ids = torch.arange(rows, **short).repeat(MOST_TOKENS, 1)
        self.tables = dense_tables(rows, like.device)
        self.steps = torch.arange(MOST_TOKENS, **short)[:, None].repeat(1, rows)
        self.active = torch.ones(rows, **short)  # 0: the row has ended, and its slot stands still
        self.found = torch.zeros(MOST_TOKENS, rows, **long)
        self.best = torch.zeros(MOST_TOKENS, rows, **single)
        self.scores = torch.zeros(MOST_TOKENS, rows, **single)
        self.signals = torch.zeros(MOST_TOKENS * rows, 4, **single)
        self.guesses = like.new_zeros(MOST_TOKENS * rows, len(like))  # of the exit head, one for each draft
        self.result = torch.zeros(rows, FIELDS, **single)
        self.states = like.new_zeros(MOST_TOKENS * rows, len(like))
        self.newest = like.new_zeros(1, len(like))  # the state of a prompt's last token
        self.text = torch.zeros(rows, columns, **long)
        self.places = torch.arange(columns, device=like.device)
        self.positions = self.places.clamp(max=(context or columns) - 1)  # of the tokens at each column
        self._like = like
        self._logits: torch.Tensor | None = None
        self._settings: Settings | None = None
        self.pinned = torch.zeros(2, rows, FIELDS, dtype=torch.float32, pin_memory=like.is_cuda)

    def prepare_choice(self, vocabulary: int) -> None:
        """Make room for logits and settings, once."""
        if self._logits is None:
            self._logits = self._like.new_zeros(MOST_TOKENS, vocabulary)
            self._settings = Settings(self.rows, vocabulary, self._like.device)

    @property
    def settings(self) -> Settings:
        assert self._settings is not None, "prepare_choice comes first"
        return self._settings

    def logits_of(self, count: int, vocabulary: int | None = None) -> torch.Tensor:
        """Return room for the (count, vocabulary) logits of tokens."""
        assert self._logits is not None, "prepare_choice comes first"
        width = vocabulary or self._logits.shape[1]
        return self._logits.flatten()[: count * width].view(count, width)

    def serves(self, rows: int, exit_: Exit | None) -> bool:
        """Return True if these slots are for so many rows and this exit."""
        return self.rows == rows and self.exit is exit_

    def cache(self, stores: Sequence[Store], row: int, columns: int, static: bool = False) -> SegmentCache:
        """Return a cache for one pass of one row that writes its K/V into the first columns of its slot."""
        cache = SegmentCache(1, [range(len(stores))], stores, columns, static)
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.adopt(index, keys[row : row + 1, :, :columns], values[row : row + 1, :, :columns])
        return cache

    def pass_of(self, states: torch.Tensor, own: slice, angles: CosSin) -> Pass:
        """Return the tokens of some steps of a round on their way through a layer."""
        positions = self.starts[own].flatten()
        return Pass(states, *angles, self.row_ids[own].flatten(), positions, positions, positions, self.tables)

    def stand_at(self, row: int, position: int) -> None:
        """Put the newest token of a row at a position; all before it have run."""
        torch.add(self.places[:MOST_TOKENS], position, out=self.starts[:, row])
        self.active[row] = 1


class SlotPool:
    """Slots that wait for their next request."""

    def __init__(self) -> None:
        self._free: list[Slots] = []

    def acquire(self, rows: int, columns: int, exit_: Exit | None) -> Slots | None:
        """Return slots that served before and have room for so many rows and columns, if there are any."""
        fitting = (slots for slots in self._free if slots.serves(rows, exit_) and slots.columns >= columns)
        found = next(fitting, None)
        if found is not None:
            self._free.remove(found)
        return found

    def release(self, slots: Slots) -> None:
        self._free.append(slots)

    def drop(self, rows: int, exit_: Exit | None) -> list[Slots]:
        """Give up slots that are too small for what is asked of them now; return them."""
        dropped = [slots for slots in self._free if slots.serves(rows, exit_)]
        self._free = [slots for slots in self._free if slots not in dropped]
        return dropped
