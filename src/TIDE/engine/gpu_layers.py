"""The decoder layers of a Llama-like model on a GPU, run by Triton kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from TIDE.adapters.features import AROUND_ONE
from TIDE.adapters.window import Window
from TIDE.engine.circuit import COLUMNS, Circuit, Turns
from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass
from TIDE.routing.exits import Exit


class Norm(NamedTuple):
    """The model's last norm."""

    weight: torch.Tensor
    eps: float
    offset: float


class GPULayers:
    """What `FusedLayers` is on a CPU.

    Attributes:
        is_checked: whether the layers were seen to give what the model's own give; until then they are not used.
        embedding, norm: as for a CPU.
    """

    has_rough_head = False

    def __init__(self, window: Window, layers: list[Layer], ops: Any, exits: Any) -> None:
        self.ops, self.exits = ops, exits
        self.layers = layers
        self.is_checked = False
        self.addresses: list[int] = []
        self.embedding: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.rotary = getattr(window.model.get_decoder(), "rotary_emb", None)
        self.is_constant = window.rope.switches_at is None
        self._free: list[Circuit] = []

    @property
    def has_rounds(self) -> bool:
        """Whether whole rounds can run on the device."""
        parts = self.embedding is not None and self.norm is not None
        return (parts or not self.is_checked) and self.rotary is not None and self.is_constant

    @property
    def capture_seconds(self) -> float:
        return sum(circuit.graphs.seconds for circuit in self._free)

    @property
    def last_norm(self) -> Norm:
        norm: Any = self.norm
        eps = float(getattr(norm, "variance_epsilon", None) or norm.eps)
        return Norm(norm.weight, eps, float(type(norm).__name__ in AROUND_ONE))

    def here(self) -> AbstractContextManager[Any]:
        """Kernels are launched where the model is, which need not be the current device."""
        device = self.layers[0].q.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def embed(self, tokens: torch.Tensor, out: torch.Tensor) -> None:
        """States of tokens at depth 0."""
        table, rows = self.embedded(tokens)
        if rows is None:
            out.copy_(table)
        else:
            torch.index_select(table, 0, rows, out=out)

    def embedded(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A table and the rows of it that are the tokens' states at depth 0; no rows: all of them."""
        assert self.embedding is not None
        if type(self.embedding) is nn.Embedding:
            return self.embedding.weight, tokens
        return self.embedding(tokens), None  # some are scaled

    def take_circuit(self, columns: int, exit_: Exit | None) -> Circuit:
        """A circuit with room for so many columns, for these exits: one that served before, if there is one."""
        for circuit in self._free:
            if circuit.columns >= columns and circuit.exit is exit_:
                self._free.remove(circuit)
                return circuit
        columns = -(-columns // COLUMNS) * COLUMNS
        self._free = [kept for kept in self._free if kept.exit is not exit_]  # too small for what is asked now
        return Circuit(self.layers, self._turns(columns), columns, exit_)

    def give_back(self, circuit: Circuit) -> None:
        self._free.append(circuit)

    def _turns(self, columns: int) -> Turns:
        weight = self.layers[0].q
        positions = torch.arange(columns, device=weight.device)[None]
        assert self.rotary is not None
        cos, sin = self.rotary(weight.new_zeros(1, 1, 1), positions)
        return Turns(cos[0].contiguous(), sin[0].contiguous())

    def takes(self, states: torch.Tensor, cache: Any) -> bool:
        return self.is_checked and cache is not None and states.shape[0] * states.shape[1] <= MOST_TOKENS

    def run(
        self, span: range, states: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], cache: Any, taps: tuple[int, ...]
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """(n, q, hidden) states before a span -> those after it, and at the depths of `taps`."""
        rows, tokens, hidden = states.shape
        x, tapped = states.reshape(rows * tokens, hidden).clone(), {}
        cos, sin = (part.expand(rows, -1, -1).reshape(rows * tokens, -1).contiguous() for part in angles)
        view, own = cache.view, cache.segments[cache.view.segment]
        places = torch.tensor([*view.rows, *(own.origin[row] for row in view.rows), view.start], dtype=torch.int32)
        places = places.to(x.device, non_blocking=True)
        going = Pass(x, cos, sin, places[:rows], places[rows : 2 * rows], places[-1:], tokens)
        for index in span:
            if index in taps:
                tapped[index] = x.view_as(states).clone()
            layer = self.layers[index]
            keys, values = cache.room(index, len(layer.k) // layer.head_dim, layer.head_dim, x)
            with self.here():
                self.ops.decoder_layer(layer, going, keys, values, view.stop)
        return x.view_as(states), tapped

    def multiplies(self, states: torch.Tensor, weight: torch.Tensor) -> bool:
        return self.is_checked and states.shape[0] * states.shape[1] <= MOST_TOKENS

    def linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(n, q, hidden), (m, hidden) -> (n, q, m)"""
        with self.here():
            return self.ops.linear(states.flatten(0, 1), weight).view(*states.shape[:2], -1)
