"""What rounds ask of a model's layers, whoever runs them: see gpu_layers.py and own_layers.py."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.engine.cache.slots import SlotPool, Slots
from TIDE.kernels import reference
from TIDE.routing.exits import Exit


class RoundLayers:
    """The parts that do not depend on who runs the layers.

    Attributes:
        ops, exits: compiled layers and exits.
        is_checked: whether what rounds do was seen to give what the model gives; until then there are none.
        without_rounds: why there are none, where they failed.
        embedding, norm: the model's own, where nothing else happens to ids before the first layer and to states between the
            last one and the LM head; None where something does.
    """

    writes_skipped_kv = False

    def __init__(self, adapter: ModelAdapter, ops: Any, exits: Any) -> None:
        self.adapter: ModelAdapter = weakref.proxy(adapter)
        self.ops, self.exits = ops, exits
        self.is_checked = False
        self.without_rounds: str | None = None
        self.embedding: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.slot_pool = SlotPool(self._slots)

    def int8_head(self, weight: torch.Tensor, vocabulary: torch.Tensor | None) -> None:
        """Rounds have kernels for exits; single steps read the LM head as it is."""
        return None

    def _slots(self, columns: int, exit_: Exit | None) -> Slots:
        raise NotImplementedError

    def device_guard(self) -> AbstractContextManager[Any]:
        """Kernels are launched where the model is, which need not be the current device."""
        device = self.adapter.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def embed(self, slots: Slots, own: slice, out: torch.Tensor) -> None:
        """States of tokens of a round at depth 0."""
        table, rows = self.embedded(slots, own)
        if rows is None:
            out.copy_(table)
        else:
            torch.index_select(table, 0, rows, out=out)

    def embedded(self, slots: Slots, own: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A table and the rows of it that are these states; no rows: all of them."""
        tokens = slots.tokens[own]
        if type(self.embedding) is nn.Embedding:
            return self.embedding.weight, tokens
        if self.embedding is not None:
            return self.embedding(tokens), None  # some are scaled
        feed = PassInputs(tokens[None], slots.positions[None, slots.starts[own]], None, None)
        return self.adapter.run(0, 0, feed).states[0], None

    def choose(
        self,
        states: torch.Tensor,
        token: torch.Tensor,
        best: torch.Tensor,
        signals: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """The tokens after (n, hidden) states at full depth, their logits, and what a router wants to know of the others."""
        reference.best_of(self.adapter.head(states, vocabulary), best, token, signals, vocabulary)
