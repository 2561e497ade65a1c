"""The numba runner: compiled layers on a CPU, in fp32."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.layer_parts import norm_parts
from TIDE.adapters.weights import state_of
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.compiled import CompiledRunner, columns_of, rows_of
from TIDE.engine.runners.int8_head import Int8LMHead
from TIDE.engine.runners.passes import PassTokens
from TIDE.engine.runners.patience import saying_what_takes_so_long
from TIDE.kernels.dispatch import arrays, compiled_exits, compiled_screen
from TIDE.kernels.layer import MOST_TOKENS, Layer, Pass, dense_tables
from TIDE.kernels.weights import Weight, dense

HEAD_SHARE = 0.4  # of a model's weights
MOST_SCREENED = 2  # tokens: more are as quickly multiplied in fp32, which reads the LM head once for all of them


class NumbaRunner(CompiledRunner):
    """Runs layers by numba. K/V of skipped layers are written by the model's modules."""

    name = "numba"

    def __init__(self, adapter: ModelAdapter, layers: list[Layer], ops: Any) -> None:
        super().__init__(adapter, layers, ops)
        from TIDE.kernels.cpu.threads import ThreadCount, torch_threads  # imports numba, an option

        self.pace, self.torch_threads = ThreadCount(), torch_threads
        self._prepared = [ops.prepared(arrays(layer)) for layer in layers]
        self._screen: tuple[int | None, Any] = None, None  # fingerprint of the LM head, and its screen
        self._is_followed = False
        self._int8: tuple[tuple[Any, ...], Int8LMHead, Any] | None = None

    @property
    def words(self) -> str:
        return "compiled layers on cpu (numba)"

    def threads(self) -> AbstractContextManager[None]:
        return self.torch_threads.limited(self.pace.count)

    def _through(
        self, span: range, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache, taps: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        self.pace.allow(self.torch_threads.most)
        passes = {kind: self._pass(kind, x, tokens, cache) for kind in self.rotary.kinds}
        tapped: dict[int, torch.Tensor] = {}
        for index in span:
            if index in taps:
                tapped[index] = x.clone()
            keys, values = self._kv(index, x, cache)
            with self.pace.timed(len(x)):
                self.ops.decoder_layer(self._prepared[index], passes[self.layers[index].rope], keys.numpy(), values.numpy())
        return tapped

    def _pass(self, kind: str, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache) -> Pass:
        (cos, sin), angles = self.rotary.of_pass(kind, tokens.positions())
        lists = rows_of(tokens), columns_of(tokens, cache), tokens.positions(), angles
        rows, columns, positions, which = map(np.array, lists)
        tables = dense_tables(cache.rows, x.device).numpy()
        return Pass(x.numpy(), cos.numpy(), sin.numpy(), rows, columns, positions, which, tables)

    def _linear(self, states: torch.Tensor, weight: Weight) -> torch.Tensor:
        if len(states) > MOST_TOKENS or not weight.dtype == states.dtype == torch.float32:
            return torch.nn.functional.linear(states, dense(weight))
        return torch.from_numpy(self.ops.linear(states.numpy(), arrays(weight)))

    def _wanted_logits(self, states: torch.Tensor, best_only: bool) -> torch.Tensor:
        if not best_only or len(states) > MOST_SCREENED or not self._has_large_head:
            return self.logits(states)
        assert self.lm_head is not None and self.norm is not None
        compiled, weight = compiled_screen(), arrays(self.lm_head)
        if not self._is_followed:
            self._screen = self._screened(compiled, weight)
            self._is_followed = True
        with self.grad_off():
            normed = self.norm(states).contiguous().numpy()
        return torch.from_numpy(compiled.best_logits(normed, weight, self._screen[1]))

    def follow(self) -> None:
        self._is_followed = False

    def _screened(self, compiled: Any, weight: Weight) -> tuple[int | None, Any]:
        """Return the screen of the LM head as it is now. Weights may be changed in place, so every bit is looked at."""
        with saying_what_takes_so_long("the LM head in 8 bits"):
            now = compiled.fingerprint(weight)
            return self._screen if self._screen[0] == now else (now, compiled.screen_of(weight))

    @property
    def _has_large_head(self) -> bool:
        """True if so much of the model is its LM head that a second copy of it, in 8 bits, pays."""
        weight = self.lm_head
        if weight is None or not self.has_plain_logits or weight.dtype != torch.float32 or not compiled_screen().suits(weight):
            return False
        return weight.rows * weight.columns > HEAD_SHARE * self._size

    @functools.cached_property
    def _size(self) -> int:
        return sum(weight.numel() for weight in self.adapter.model.parameters())

    def int8_head(self, vocabulary: torch.Tensor | None) -> Int8LMHead | None:
        weight = self.lm_head
        if weight is None or self.norm is None or not self.has_plain_logits:
            return None
        exits = compiled_exits(self.device, weight.dtype)
        if exits is None:
            return None
        now = (state_of(weight), id(vocabulary))
        if self._int8 is None or self._int8[0] != now:
            head = Int8LMHead(norm_parts(self.norm, torch.zeros(0)), weight, vocabulary, exits)
            self._int8 = now, head, (weight, vocabulary)  # held, so that nothing else is put where they are
        return self._int8[1]
