"""A circuit: what a request of one row works on at fixed addresses, so that graphs can be replayed on it.

    text            what stood before the first round
    keys, values    of every layer, (1, heads, columns, dim)
    tokens          of a round: the newest final one, then drafts
    starts          where they stand: the position of the first, and those after it
    memory          what a memory head keeps: states of the tokens before, its own K/V

A circuit outlives its request and serves the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from TIDE.adapters.probe import Store
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.graphs import Graphs
from TIDE.kernels.layer import MOST_TOKENS, Pass
from TIDE.routing.exits import Exit
from TIDE.routing.heads import MemoryHead
from TIDE.routing.router import Router

COLUMNS = 1024  # a circuit has so many, or twice as many, and so on


class Turns(NamedTuple):
    """Cosines and sines of rotary embeddings, by column."""

    cos: torch.Tensor
    sin: torch.Tensor


class Memory:
    """What a memory head keeps of one row."""

    def __init__(self, head: MemoryHead, columns: int) -> None:
        weight, sizes = head.fuse.weight, head.sizes
        self.head, self.layer = head, head.as_layer()
        self.only_kv = self.layer._replace(q=self.layer.q[:0])
        self.before = weight.new_zeros(columns + 1, sizes.hidden_dim)  # row p: the memory of position p - 1
        self.parts = weight.new_zeros(MOST_TOKENS, sizes.memories * sizes.hidden_dim)  # of finished tokens, to be remembered
        self.entries = weight.new_zeros(MOST_TOKENS, (sizes.inputs + 1) * sizes.hidden_dim)  # of those that wait for it
        self.fed = torch.zeros(1, dtype=torch.int32, device=weight.device)  # positions whose K/V stand
        self.keys, self.values = weight.new_zeros(2, 1, sizes.kv_heads, columns, sizes.head_dim)
        positions = torch.arange(columns, device=weight.device)[None]
        self.turns = Turns(*(part[0, 0].contiguous() for part in head.angles(positions, weight.dtype)))


def gauge(router: Router) -> torch.Tensor:
    """What makes a score of a router's sum: bias, temperature, offset."""
    bias = router.temperature.new_zeros(1) if router.up.bias is None else router.up.bias
    return torch.cat([bias, router.temperature[None], router.offset[None]])


class KVShape(NamedTuple):
    """What a layer keeps of a token."""

    heads: int
    key_dim: int
    value_dim: int


class Slots:
    """Fixed addresses for a row of up to `columns` tokens.

    Args:
        like: (hidden,) a state; dtype and device are those of all states.
        rooms: of each layer.
        turns: None: layers see to them.
        exit_: the exit that rounds will ask.
        context: tokens that the model can take. Rounds run ahead, and what runs behind it is given the last position.
    """

    def __init__(
        self,
        like: torch.Tensor,
        kv_shapes: list[KVShape],
        turns: Turns | None,
        columns: int,
        exit_: Exit | None,
        context: int | None = None,
    ) -> None:
        whole: dict[str, Any] = dict(dtype=torch.long, device=like.device)
        self.columns = columns
        self.exit = exit_
        self.turns = turns
        self.keys = [like.new_zeros(1, room.heads, columns, room.key_dim) for room in kv_shapes]
        self.values = [like.new_zeros(1, room.heads, columns, room.value_dim) for room in kv_shapes]
        head = None if exit_ is None else exit_.head
        self.memory = Memory(head, columns) if isinstance(head, MemoryHead) else None
        self.gauge = None if exit_ is None else gauge(exit_.router)
        self.tokens = torch.zeros(MOST_TOKENS + 1, **whole)
        self.starts = torch.zeros(MOST_TOKENS, dtype=torch.int32, device=like.device)
        self.row = torch.zeros(1, dtype=torch.int32, device=like.device)
        self.found, self.best = torch.zeros(MOST_TOKENS, **whole), like.new_zeros(MOST_TOKENS, dtype=torch.float32)
        self.scores = like.new_zeros(MOST_TOKENS, dtype=torch.float32)
        self.signals = like.new_zeros(1, 4, dtype=torch.float32)
        self.out = torch.zeros(MOST_TOKENS + 2, **whole)
        self.states = like.new_zeros(MOST_TOKENS, len(like))
        self.text = torch.zeros(columns, **whole)
        self.places = torch.arange(columns, device=like.device)
        self.positions = self.places.clamp(max=(context or columns) - 1)  # of the tokens there
        self.pinned = torch.zeros(2, len(self.out), dtype=torch.long, pin_memory=like.is_cuda)
        self.graphs, self.prefills = Graphs(like.device), Graphs(like.device)

    def cache(self, stores: Sequence[Store], columns: int, static: bool = False) -> SegmentCache:
        """A cache for one pass that writes its K/V into the first columns."""
        cache = SegmentCache(1, [range(len(stores))], stores, columns, static)
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.adopt(index, keys[:, :, :columns], values[:, :, :columns])
        return cache

    def going(self, states: torch.Tensor, own: slice, turns: Turns) -> Pass:
        """Tokens of a round on their way through a layer."""
        place = self.starts[own.start : own.start + 1]
        return Pass(states, *turns, self.row, self.row, place, len(states))

    def stand_at(self, position: int) -> None:
        """The newest token stands at a position; all before it have run."""
        torch.add(self.places[:MOST_TOKENS], position, out=self.starts)


class SlotPool:
    """Those of a model: each serves one request at a time, then the next.

    Args:
        make: a new one, for so many columns and an exit.
    """

    def __init__(self, make: Callable[[int, Exit | None], Slots]) -> None:
        self._make = make
        self._free: list[Slots] = []

    def acquire(self, columns: int, exit_: Exit | None) -> Slots:
        """One with room for so many columns; one that served before, if there is any."""
        for slots in self._free:
            if slots.columns >= columns and slots.exit is exit_:
                self._free.remove(slots)
                return slots
        self._free = [kept for kept in self._free if kept.exit is not exit_]  # too small for what is asked now
        return self._make(max(COLUMNS, 1 << (columns - 1).bit_length()), exit_)

    def release(self, slots: Slots) -> None:
        self._free.append(slots)

    @property
    def capture_seconds(self) -> float:
        return sum(graphs.seconds for slots in self._free for graphs in (slots.graphs, slots.prefills))

    @property
    def without_graphs(self) -> str | None:
        """Why work is not captured, where it is not."""
        reasons = [graphs.without for slots in self._free for graphs in (slots.graphs, slots.prefills)]
        return next((reason for reason in reasons if reason is not None), None)
