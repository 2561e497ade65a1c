"""K/V in blocks that rows take as they grow and give back as they end.

    keys, values    of every layer, (blocks, heads, size, dim)
    before          (places, hidden) of a head that remembers: the memory of the position before each one
    tables          of slots: the blocks of each row, in the order of its text

Block 0 belongs to nobody: what is written for rows that have ended, or for padding, goes there. Families that run through their
own modules have one row, and one block with room for all of it.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from TIDE.engine.cache.prefix_tree import PrefixTree
from TIDE.routing.exits import Exit
from TIDE.routing.heads import DraftHead

BLOCK = 64  # positions of a block, as many as attention loads at a time
NOBODY = 0


class KVShape(NamedTuple):
    """The K/V of a token in a layer."""

    heads: int
    key_dim: int
    value_dim: int


class KVBlocks:
    """The K/V of all rows.

    Args:
        like: (hidden,) a state; dtype and device are those of K/V.
        shapes: of each layer.
        size: positions of a block.
        head: the exit head that keeps something of every token too, if there is one.
    """

    def __init__(self, like: torch.Tensor, shapes: list[KVShape], blocks: int, size: int, head: DraftHead | None) -> None:
        self.like = like
        self.shapes = shapes
        self.size = size
        self.head = head
        self.blocks = 0
        self.keys: list[torch.Tensor] = [self._nothing(shape.heads, shape.key_dim) for shape in self._all_shapes]
        self.values: list[torch.Tensor] = [self._nothing(shape.heads, shape.value_dim) for shape in self._all_shapes]
        self.before = like.new_zeros(0, len(like))
        self.addresses = torch.zeros(len(shapes), 2, dtype=torch.long, device=like.device)  # of the layers' keys and values
        self.prefixes = PrefixTree(size)
        self._free: list[int] = []
        self.grow(blocks)

    @property
    def _all_shapes(self) -> list[KVShape]:
        """Shapes of the model's layers, and of the exit head's block behind them."""
        if self.head is None:
            return self.shapes
        sizes = self.head.sizes
        return [*self.shapes, KVShape(sizes.kv_heads, sizes.head_dim, sizes.head_dim)]

    def _nothing(self, heads: int, dim: int) -> torch.Tensor:
        return self.like.new_zeros(0, heads, self.size, dim)

    @property
    def is_dense(self) -> bool:
        """True if a block has room for a whole row."""
        return self.blocks == 1

    @property
    def free(self) -> int:
        """Blocks that nobody has, those included that are kept for texts that begin alike."""
        return len(self._free) + self.prefixes.idle

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers."""
        numbers = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in self._all_shapes)
        return (numbers + (0 if self.head is None else len(self.like))) * self.size * self.like.element_size()

    def needed(self, tokens: int) -> int:
        """Return the number of blocks of a row of `tokens` tokens."""
        return -(-tokens // self.size)

    def take(self, count: int) -> list[int]:
        """Return blocks that were free: unused ones first."""
        assert count <= self.free, f"{count} blocks are asked for, and {self.free} are free"
        while len(self._free) < count:
            self._free.insert(0, self.prefixes.evict())
        return [self._free.pop() for _ in range(count)]

    def begin(self, block: int) -> None:
        """Let a text begin in a block: a head remembers nothing before its first token, whoever had the block before."""
        if self.head is not None:
            self.before[block * self.size].zero_()

    def give_back(self, blocks: list[int]) -> None:
        self._free += reversed(blocks)

    def forget_prefixes(self) -> None:
        """Share nothing that was made so far: the model has changed, or something went wrong. What rows have they keep."""
        self.give_back(self.prefixes.drop())

    def copy(self, other: KVBlocks) -> None:
        """Take over the only block of others, which may be shorter."""
        assert self.is_dense and other.is_dense
        size = min(self.size, other.size)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for own, old in zip(mine, theirs, strict=True):
                own[:, :, :size] = old[:, :, :size]
        self.before[: size + 1] = other.before[: size + 1]

    def grow(self, blocks: int) -> None:
        """Have `blocks` blocks; those that there are keep what is in them. Tensors have other addresses then."""
        for tensors in (self.keys, self.values):
            for index, old in enumerate(tensors):
                tensors[index] = _longer(old, blocks)
        if self.head is not None:
            self.before = _longer(self.before, blocks * self.size + 1)
        layers = range(len(self.shapes))
        found = torch.tensor([[self.keys[index].data_ptr(), self.values[index].data_ptr()] for index in layers])
        self.addresses.copy_(found.view(-1, 2))
        first = self.blocks if self.blocks or blocks == 1 else NOBODY + 1
        self._free = [*reversed(range(first, blocks)), *self._free]
        self.blocks = blocks


def _longer(tensor: torch.Tensor, length: int) -> torch.Tensor:
    found = tensor.new_zeros(length, *tensor.shape[1:])
    found[: len(tensor)] = tensor
    return found


def draft_head(exit_: Exit | None) -> DraftHead | None:
    """Return the head of an exit, if it is one that remembers."""
    return exit_.head if exit_ is not None and isinstance(exit_.head, DraftHead) else None
