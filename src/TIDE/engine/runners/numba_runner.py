"""The numba runner: compiled layers on a CPU, in fp32."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.layer_parts import norm_parts
from TIDE.adapters.weights import version
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.compiled import CompiledRunner, rows_of
from TIDE.engine.runners.int8_head import Int8LMHead
from TIDE.engine.runners.passes import PassTokens
from TIDE.kernels.dispatch import arrays, compiled_exits
from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass


class NumbaRunner(CompiledRunner):
    """Runs layers by numba. K/V of skipped layers are written by the model's modules."""

    name = "numba"

    def __init__(self, adapter: ModelAdapter, layers: list[Layer], ops: Any) -> None:
        super().__init__(adapter, layers, ops)
        self._arrays = [arrays(layer) for layer in layers]
        self._int8: tuple[tuple[Any, ...], Int8LMHead, Any] | None = None

    @property
    def words(self) -> str:
        return "compiled layers on cpu (numba)"

    def _through(
        self, span: range, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache, taps: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        self.ops.use_threads(torch.get_num_threads())
        passes = {kind: self._pass(kind, x, tokens, cache) for kind in self.rotary.kinds}
        tapped: dict[int, torch.Tensor] = {}
        for index in span:
            if index in taps:
                tapped[index] = x.clone()
            keys, values = self._kv(index, x, cache)
            self.ops.decoder_layer(self._arrays[index], passes[self.layers[index].rope], keys.numpy(), values.numpy())
        return tapped

    def _pass(self, kind: str, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache) -> Pass:
        (cos, sin), angles = self._angles(kind, tokens.positions())
        places = [np.array(values) for values in (rows_of(tokens), self._columns(tokens, cache), tokens.positions(), angles)]
        return Pass(x.numpy(), cos.numpy(), sin.numpy(), *places)

    def _linear(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        plain = weight.dtype == states.dtype == torch.float32 and weight.is_contiguous()
        if len(states) > MOST_TOKENS or not plain:
            return torch.nn.functional.linear(states, weight)
        return torch.from_numpy(self.ops.linear(states.numpy(), weight.detach().numpy()))

    def int8_head(self, vocabulary: torch.Tensor | None) -> Int8LMHead | None:
        weight = self.lm_head
        if weight is None or self.norm is None or not self.has_plain_logits:
            return None
        exits = compiled_exits(weight.device, weight.dtype)
        if exits is None:
            return None
        now = (id(weight), weight.data_ptr(), version(weight), id(vocabulary))
        if self._int8 is None or self._int8[0] != now:
            head = Int8LMHead(norm_parts(self.norm, weight), weight, vocabulary, exits)
            self._int8 = now, head, (weight, vocabulary)  # held, so that nothing else is put where they are
        return self._int8[1]
