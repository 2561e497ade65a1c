"""A circuit: what a request of one row works on at fixed addresses, so that graphs can be replayed on it.

    keys, values    of every layer, (1, heads, columns, dim); a SegmentCache uses them for the prompt
    tokens          of a round: the newest final one, then drafts
    starts          where they stand: the position of the first, and those after it
    memory          what a memory head keeps: states of the tokens before, its own K/V

A circuit outlives its request and serves the next one.
"""

from __future__ import annotations

import torch

from TIDE.engine.cache import SegmentCache
from TIDE.engine.graphs import Graphs
from TIDE.kernels.layer import MOST_TOKENS, Layer
from TIDE.routing.exits import Exit
from TIDE.routing.heads import MemoryHead
from TIDE.routing.router import Router

COLUMNS = 512  # a circuit has so many, or a multiple


class Turns:
    """Cosines and sines of rotary embeddings: a table by position, and those of the round."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.table = cos, sin
        self.cos, self.sin = (part.new_zeros(MOST_TOKENS, part.shape[1]) for part in self.table)

    def look_up(self, starts: torch.Tensor) -> None:
        for table, now in zip(self.table, (self.cos, self.sin), strict=True):
            torch.index_select(table, 0, starts, out=now[: len(starts)])


class Memory:
    """What a memory head keeps of one row."""

    def __init__(self, head: MemoryHead, columns: int) -> None:
        weight, sizes = head.fuse.weight, head.sizes
        self.head, self.layer = head, head.as_layer()
        self.before = weight.new_zeros(columns + 1, sizes.hidden_dim)  # row p: the memory of position p - 1
        self.parts = weight.new_zeros(MOST_TOKENS, sizes.memories * sizes.hidden_dim)  # of finished tokens, to be remembered
        self.keys, self.values = weight.new_zeros(2, 1, sizes.kv_heads, columns, sizes.head_dim)
        positions = torch.arange(columns, device=weight.device)[None]
        self.turns = Turns(*(part[0, 0].contiguous() for part in head.angles(positions, weight.dtype)))


def gauge(router: Router) -> torch.Tensor:
    """What makes a score of a router's sum: bias, temperature, offset."""
    bias = router.temperature.new_zeros(1) if router.up.bias is None else router.up.bias
    return torch.cat([bias, router.temperature[None], router.offset[None]])


class Circuit:
    """Fixed addresses for a row of up to `columns` tokens."""

    def __init__(self, layers: list[Layer], turns: Turns, columns: int, exit_: Exit | None) -> None:
        weight = layers[0].q
        whole = dict(dtype=torch.long, device=weight.device)
        self.columns = columns
        self.exit = exit_
        self.turns = turns
        self.keys, self.values = [], []
        for layer in layers:
            shape = 1, len(layer.k) // layer.head_dim, columns, layer.head_dim
            self.keys.append(weight.new_zeros(shape))
            self.values.append(weight.new_zeros(shape))
        head = None if exit_ is None else exit_.head
        self.memory = Memory(head, columns) if isinstance(head, MemoryHead) else None
        self.gauge = None if exit_ is None else gauge(exit_.router)
        self.tokens = torch.zeros(MOST_TOKENS + 1, **whole)
        self.starts = torch.zeros(MOST_TOKENS, dtype=torch.int32, device=weight.device)
        self.row = torch.zeros(1, dtype=torch.int32, device=weight.device)
        self.found, self.best = torch.zeros(MOST_TOKENS, **whole), weight.new_zeros(MOST_TOKENS, dtype=torch.float32)
        self.scores, self.signals = (
            weight.new_zeros(MOST_TOKENS, dtype=torch.float32),
            weight.new_zeros(1, 4, dtype=torch.float32),
        )
        self.out = torch.zeros(MOST_TOKENS + 2, **whole)
        self.states = weight.new_zeros(MOST_TOKENS, weight.shape[1])
        self.graphs = Graphs(weight.device)

    def lend(self, cache: SegmentCache) -> None:
        """Let a cache write its K/V here."""
        for own in cache.segments:
            own.capacity = self.columns
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            cache.adopt(index, keys, values)

    def begin(self, token: int, position: int) -> None:
        """The newest token stands at a position; all before it have run."""
        self.tokens[0] = token
        self.starts.copy_(torch.arange(position, position + MOST_TOKENS, dtype=torch.int32))
