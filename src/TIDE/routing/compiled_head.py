"""A memory head in compiled code: its block with 8-bit weights, for a few tokens of one row at a time."""

from __future__ import annotations

import copy
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from TIDE.kernels.dispatch import arrays, compiled_exits
from TIDE.kernels.layer import FusionWeights
from TIDE.kernels.weights import GROUP, Dense, dense, quantize_int8
from TIDE.routing.heads import EPS, MemoryHead


class HeadBuffers(NamedTuple):
    """States and K/V of a memory head for all rows and positions: tensors, or the same memory as numpy arrays for compiled
    code, whose slices cost a tenth of a tensor's."""

    shallow: Any  # (rows, room, inputs * hidden)
    deep: Any  # (rows, room, memories * hidden)
    before: Any  # (rows, room, hidden)
    keys: Any  # (rows, kv_heads, room, head_dim)
    values: Any


class CompiledHead:
    """The weights of a memory head in the form of compiled code, made once.

    Attributes:
        head: the same in torch, for many tokens at once. Its weights are rounded too: which tokens are many depends on what a
            row begins with, and a guess must not.
    """

    def __init__(self, head: MemoryHead, ops: ModuleType) -> None:
        self.ops = ops
        self.head = head = _rounded(head)
        self.layer = ops.cpu_ops.prepared(arrays(_in_8_bits(head.as_layer())))
        centers = head.shallow_center, head.shallow_spread, head.deep_center, head.deep_spread
        recall = torch.zeros(0, GROUP) if head.recall is None else head.recall.weight
        weights = quantize_int8(head.fuse.weight), quantize_int8(recall)
        self.fusion: FusionWeights = arrays(FusionWeights(*centers, *weights, EPS))
        none = np.zeros((0, 0), np.float32)
        self._angles: tuple[np.ndarray, ...] = none, none  # cosines and sines, exchanged at once: threads share them
        self._compile()

    def remember(self, deep: np.ndarray) -> np.ndarray:
        """Run `MemoryHead.remember` on (n, memories * hidden) states."""
        return deep if self.head.recall is None else self.ops.remember(self.fusion, deep)

    def feed(self, row: int, span: range, kept: HeadBuffers) -> np.ndarray:
        """Return the (hidden,) guess for the last position of a row's span, and store K/V of all of it: see `memory.py`."""
        cos, sin = self._angles_of(span.stop)
        seen = kept.shallow, kept.before, kept.keys, kept.values
        return self.ops.memory_block(self.fusion, self.layer, cos, sin, row, span.start, span.stop, *seen)

    def _compile(self) -> None:
        """Compile the code ahead of the first request."""
        sizes = self.head.sizes
        widths = [part * sizes.hidden_dim for part in (sizes.inputs, sizes.memories, 1)]
        states = [np.zeros((1, 1, width), np.float32) for width in widths]
        heads = [np.zeros((1, sizes.kv_heads, 1, sizes.head_dim), np.float32) for _ in range(2)]
        self.feed(0, range(1), HeadBuffers(*states, *heads))
        self.remember(states[1][0])

    def _angles_of(self, length: int) -> tuple[np.ndarray, ...]:
        """Return cosines and sines of the first positions, `length` at least."""
        angles = self._angles
        if length > len(angles[0]):
            positions = torch.arange(max(length, 2 * len(angles[0])))[None]
            self._angles = angles = tuple(part[0, 0].numpy() for part in self.head.angles(positions, torch.float32))
        return angles


def _in_8_bits(part: Any) -> Any:
    """Return a part of a layer with its weights in 8 bits."""
    if isinstance(part, Dense):
        return quantize_int8(part.values)
    return type(part)(*map(_in_8_bits, part)) if isinstance(part, tuple) else part


def _rounded(head: MemoryHead) -> MemoryHead:
    """Return a copy of a head whose weights are those that 8 bits keep of them."""
    found = copy.deepcopy(head)
    for part in (found.recall, found.fuse, found.qkv, found.o, found.gate_up, found.down):
        if part is not None:
            part.weight = torch.nn.Parameter(dense(quantize_int8(part.weight)), requires_grad=False)
    return found


def compiled_head(head: torch.nn.Module) -> CompiledHead | None:
    """Return the head in compiled code; None if there is none for its kind, device and dtype."""
    if not isinstance(head, MemoryHead):
        return None
    ops = compiled_exits(head.fuse.weight.device, head.fuse.weight.dtype)
    return None if ops is None else CompiledHead(head, ops)
