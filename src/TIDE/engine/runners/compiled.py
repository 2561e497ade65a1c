"""Compiled layers: passes of up to `MOST_TOKENS` tokens run without the model's `forward`, longer ones through its modules.

    ids → embedding → layers, in compiled code on the engine's cache → norm → LM head

Rows stand at columns of their own, so a pass is ragged: nothing is aligned and nothing is padded.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.rotary_table import RotaryTable
from TIDE.adapters.snapshot import ModelSnapshot
from TIDE.adapters.weights import is_stock
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.engine.runners.passes import PassResult, PassTokens
from TIDE.kernels.layer import MOST_TOKENS, Layer
from TIDE.kernels.weights import Weight


class CompiledRunner(ModuleRunner):
    """The part that numba and Triton share.

    Attributes:
        embedding: the model's own, if nothing else happens to ids before the first layer.
        norm, lm_head: the model's last norm and the weight of its LM head, if they alone make logits, up to `scale` and `cap`.
        scale: multiplies logits.
        cap: logits become cap · tanh(x / cap); 0: they stay.
    """

    gathers_rows = False

    def __init__(self, adapter: ModelAdapter, layers: list[Layer], ops: Any) -> None:
        super().__init__(adapter)
        self.layers = layers
        self.ops = ops
        self.rotary = RotaryTable(adapter.model)
        self.snapshot = ModelSnapshot(adapter.model)
        self.embedding: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.lm_head: Weight | None = None
        self.scale, self.cap = _logit_transform(adapter.model.config.get_text_config(decoder=True))

    def is_ragged(self, tokens: PassTokens) -> bool:
        fits = tokens.embeds is None and len(tokens.ids) <= MOST_TOKENS
        return self.is_checked and fits

    def run(
        self,
        span: range,
        tokens: PassTokens,
        cache: SegmentCache,
        hidden: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> PassResult:
        if not self.is_ragged(tokens):
            return self._run_modules(span, tokens, cache, hidden, taps)
        x = self._entering(tokens) if hidden is None else hidden.clone()
        tapped = self._through(span, x, tokens, cache, taps)
        logits = None if tokens.kept is None else self._wanted_logits(x[tokens.kept_places()], tokens.best_only)
        return PassResult(x, logits, tapped, [len(span) * count for count in tokens.counts])

    def _run_modules(
        self, span: range, tokens: PassTokens, cache: SegmentCache, hidden: torch.Tensor | None, taps: tuple[int, ...]
    ) -> PassResult:
        """Run a long pass; its logits are made here if that is a norm and a product."""
        if self.norm is None or tokens.kept is None:
            return super().run(span, tokens, cache, hidden, taps)
        passed = super().run(span, tokens._replace(kept=None), cache, hidden, taps)
        return passed._replace(logits=self._wanted_logits(passed.states[tokens.kept_places()], tokens.best_only))

    def _wanted_logits(self, states: torch.Tensor, best_only: bool) -> torch.Tensor:
        """Return (n, vocabulary) logits; with `best_only` those that cannot be the highest need not be exact."""
        return self.logits(states)

    @abstractmethod
    def _through(
        self, span: range, x: torch.Tensor, tokens: PassTokens, cache: SegmentCache, taps: tuple[int, ...]
    ) -> dict[int, torch.Tensor]:
        """Take (n, hidden) states, in place, through layers; return those at the depths of `taps`."""

    def embed(self, ids: list[int]) -> torch.Tensor | None:
        if self.embedding is None:
            return None
        given = torch.tensor(ids, device=self.device)
        if type(self.embedding) is nn.Embedding:
            return torch.embedding(self.embedding.weight, given)
        found: torch.Tensor = self.embedding(given)
        return found

    def _entering(self, tokens: PassTokens) -> torch.Tensor:
        """Return the (n, hidden) states of tokens at depth 0."""
        found = self.embed(tokens.ids)
        if found is not None:
            return found
        ids, positions = (torch.tensor([values], device=self.device) for values in (tokens.ids, tokens.positions()))
        return self.adapter.run(0, 0, PassInputs(ids, positions, None, None)).states[0].clone()

    def logits(self, states: torch.Tensor, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
        if self.norm is None or self.lm_head is None or states.requires_grad:
            return super().logits(states, vocabulary)
        weight = self.lm_head if vocabulary is None else self.adapter.lm_head.plain_rows(vocabulary)
        with self.grad_off():
            found = self._linear(self.norm(states), weight)
            if self.scale != 1.0:
                found = found * self.scale
            return self.cap * torch.tanh(found / self.cap) if self.cap else found

    @abstractmethod
    def _linear(self, states: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return (n, m) products of (n, hidden) states with an (m, hidden) weight."""

    @torch.no_grad()
    def take_short_cuts(self) -> None:
        """Leave out the model's `forward` if embedding, or norm and product, alone give the same."""
        adapter = self.adapter
        ids = torch.arange(3, 7, device=self.device)[:, None] % adapter.vocab_size
        states = adapter.run(0, 0, PassInputs(ids, torch.zeros_like(ids), None, None)).states
        expected = adapter.head(states[:, 0])
        self.assume_short_cuts()
        if self.embedding is None or not torch.equal(self.embedding(ids), states):
            self.embedding = None
        if self.norm is None:
            return
        close = 1e-4 if expected.dtype == torch.float32 else 3e-2
        if not torch.allclose(self.logits(states[:, 0]), expected, rtol=close, atol=close * float(expected.abs().max())):
            self.norm = self.lm_head = None

    def assume_short_cuts(self) -> None:
        """Take those that there may be, unchecked."""
        adapter = self.adapter
        self.embedding = adapter.model.get_input_embeddings()
        norm = getattr(adapter.model.get_decoder(), "norm", None)
        if norm is not None and is_stock(norm) and adapter.lm_head.plain is not None:
            self.norm, self.lm_head = norm, adapter.lm_head.plain

    def leave_short_cuts(self) -> None:
        self.embedding = self.norm = self.lm_head = None

    @property
    def has_plain_logits(self) -> bool:
        """True if logits are a norm and a product, and this was checked."""
        return self.norm is not None and self.scale == 1.0 and not self.cap

    def _kv(self, index: int, x: torch.Tensor, cache: SegmentCache) -> tuple[torch.Tensor, torch.Tensor]:
        attention = self.layers[index].attention
        return cache.kv_buffers(index, attention.kv_heads, attention.head_dim, x)


def _logit_transform(config: Any) -> tuple[float, float]:
    """Return what a model multiplies its logits with, and its cap of them; 0: none."""
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)


def columns_of(tokens: PassTokens, cache: SegmentCache) -> list[int]:
    """Return the column of the cache of every token."""
    return [start + i for start, count in zip(cache.view.starts, tokens.counts, strict=True) for i in range(count)]


def rows_of(tokens: PassTokens) -> list[int]:
    """Return the row of the cache of every token."""
    return [row for row, count in zip(tokens.rows, tokens.counts, strict=True) for _ in range(count)]
