"""The Triton runner: compiled layers on a GPU, pass by pass or in whole rounds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.layer_parts import norm_parts
from TIDE.engine.cache.kv_blocks import BLOCK, KVBlocks, KVShape, draft_head
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.runners.compiled import CompiledRunner, columns_of, rows_of
from TIDE.engine.runners.device import DeviceRunner, a_state
from TIDE.engine.runners.passes import PassTokens
from TIDE.kernels.interfaces import ExitOps, LayerOps, SamplingOps
from TIDE.kernels.layer import MOST_TOKENS, Layer, Norm, Pass, dense_tables
from TIDE.kernels.transfer import sent
from TIDE.kernels.weights import Weight, dense
from TIDE.routing.exits import Exit


class TritonRunner(CompiledRunner, DeviceRunner):
    """Runs layers by Triton kernels.

    Args:
        exits: operations of exits.
        sampling: the choice of tokens by rows' settings.
    """

    name = "triton"
    has_compiled_layers = True
    most_rows = 64

    def __init__(
        self, adapter: ModelAdapter, layers: list[Layer], ops: LayerOps, exits: ExitOps, sampling: SamplingOps
    ) -> None:
        super().__init__(adapter, layers, ops)
        self.prepare_rounds(ops, exits, sampling)
        self._versions: list[int | None] = []
        self._versions_of_kv = self._versions

    @property
    def words(self) -> str:
        layers = f"compiled layers on {self.device.type} (Triton)"
        without = self.failed or self.graphs.without
        return f"{layers}, without graphs: {without}" if without else f"{layers}, in CUDA graphs"

    def follow(self) -> None:
        """Notice weights that have changed in place; any thread may call it."""
        super().follow()
        if self.snapshot is not None:
            self._versions = self.snapshot.versions()

    def forget_old_kv(self) -> None:
        if self._versions != self._versions_of_kv:
            for _, store in self.pool.stores:
                store.forget_prefixes()
        self._versions_of_kv = self._versions

    def why_not(self, row: Any) -> str | None:
        if not self.rotary.is_constant:
            return "the model's rotary embedding changes with the length of the text"
        return super().why_not(row)

    def make_store(self, exit_: Exit | None) -> KVBlocks:
        parts = [layer.attention for layer in self.layers]
        shapes = [KVShape(own.kv_heads, own.head_dim, own.head_dim) for own in parts]
        return KVBlocks(a_state(self.adapter), shapes, 2, BLOCK, draft_head(exit_))

    def make_slots(self, rows: int, columns: int, exit_: Exit | None) -> Slots:
        store = self.pool.store(exit_)
        angles = {kind: self.rotary.tables(kind, columns) for kind in self.rotary.kinds}
        return Slots(store, angles, rows, columns, exit_)

    def layers_on_slots(
        self, slots: Slots, span: range, states: torch.Tensor, tokens: Tokens, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        assert slots.angles is not None
        passes = {kind: slots.pass_of(states, tokens, angles) for kind, angles in slots.angles.items()}
        for index in span:
            layer = self.layers[index]
            self.ops.decoder_layer(layer, passes[layer.rope], slots.store.keys[index], slots.store.values[index], most)
            if index + 1 in taps:
                yield index + 1, states[: tokens.asking]

    def plain_logits(self, like: torch.Tensor) -> tuple[Norm, Weight] | None:
        if self.lm_head is None or not self.has_plain_logits:
            return None
        return norm_parts(self.norm, like), self.lm_head

    def _through(
        self, span: range, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache, taps: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        passes = {kind: self._pass(kind, x, tokens, cache) for kind in self.rotary.kinds}
        most = max(cache.view.starts) + tokens.width
        tapped: dict[int, torch.Tensor] = {}
        with self.device_guard():
            for index in span:
                if index in taps:
                    tapped[index] = x.clone()
                layer = self.layers[index]
                self.ops.decoder_layer(layer, passes[layer.rope], *self._kv(index, x, cache), most)
        return tapped

    def _pass(self, kind: str, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache) -> Pass:
        (cos, sin), angles = self.rotary.of_pass(kind, tokens.positions())
        places = torch.tensor([rows_of(tokens), columns_of(tokens, cache), tokens.positions(), angles], dtype=torch.int32)
        rows, columns, positions, which = sent(places, x.device)
        return Pass(x, cos, sin, rows, columns, positions, which, dense_tables(cache.rows, x.device))

    def _linear(self, states: torch.Tensor, weight: Weight) -> torch.Tensor:
        if len(states) > MOST_TOKENS or not self.is_checked:
            return torch.nn.functional.linear(states, dense(weight))
        with self.device_guard():
            found: torch.Tensor = self.ops.linear(states.contiguous(), weight)
            return found
