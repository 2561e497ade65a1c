"""A memory head in compiled code: the same block with its weights in 8 bits, for a few tokens of one row at a time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import torch

from TIDE.kernels.dispatch import arrays, compiled_exits
from TIDE.kernels.layer import Entry, Pass
from TIDE.routing.heads import EPS, MemoryHead

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
ROW = np.zeros(1, np.int64)


class CompiledHead:
    """What compiled code needs of a memory head, made once."""

    def __init__(self, head: MemoryHead, ops: ModuleType) -> None:
        self.ops = ops
        self.head = head
        layer, in_bytes = arrays(head.as_layer()), ops.cpu_ops.in_bytes
        self.layer = layer._replace(**{name: in_bytes(getattr(layer, name)) for name in MATRICES})
        recall = torch.zeros(0, 0) if head.recall is None else head.recall.weight
        centers = [head.shallow_center, head.shallow_spread, head.deep_center, head.deep_spread]
        fields: list[Any] = [x.detach().numpy() for x in centers]
        fields += [in_bytes(x.detach().numpy()) for x in (head.fuse.weight, recall)]
        self.entry = Entry(*[*fields, EPS])
        self._cos = self._sin = np.zeros((0, 0), np.float32)
        self._compile()

    def remember(self, deep: torch.Tensor) -> torch.Tensor:
        """`MemoryHead.remember` for (n, memories * hidden) states."""
        return deep if self.head.recall is None else torch.from_numpy(self.ops.remember(self.entry, deep.numpy()))

    def feed(
        self, start: int, shallow: torch.Tensor, before: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """The guess (hidden,) for the last of n tokens of a row from `start` on; K/V of all go into (kv_heads, room, d)."""
        stop = start + len(shallow)
        self._turn_up_to(stop)
        states = torch.empty(len(shallow), self.head.sizes.hidden_dim)
        tokens = Pass(states.numpy(), self._cos[start:stop], self._sin[start:stop], ROW, ROW, start, len(shallow))
        kept = keys[None].numpy(), values[None].numpy()
        self.ops.memory_block(self.entry, self.layer, tokens, shallow.numpy(), before.numpy(), *kept)
        return states[-1]

    def _compile(self) -> None:
        """Once, before anybody waits for a token."""
        sizes = self.head.sizes
        states, kept = torch.zeros(1, sizes.hidden_dim), torch.zeros(2, sizes.kv_heads, 1, sizes.head_dim)
        self.feed(0, states.repeat(1, sizes.inputs), states, *kept)
        self.remember(states.repeat(1, sizes.memories))

    def _turn_up_to(self, length: int) -> None:
        if length > len(self._cos):
            positions = torch.arange(max(length, 2 * len(self._cos)))[None]
            self._cos, self._sin = (part[0, 0].numpy() for part in self.head.angles(positions, torch.float32))


def compiled_head(head: torch.nn.Module) -> CompiledHead | None:
    """The head in compiled code, where there is some for it and its place."""
    if not isinstance(head, MemoryHead):
        return None
    ops = compiled_exits(head.fuse.weight.device, head.fuse.weight.dtype)
    return None if ops is None else CompiledHead(head, ops)
