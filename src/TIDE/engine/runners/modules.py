"""The module runner: a model's own layers, through its own `forward`. Every family, every device; the reference."""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import PassInputs
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.passes import PassResult, PassTokens, flat, padded


class ModuleRunner(Runner):
    """Runs passes as (rows, width) tokens, padded on the right, on aligned histories."""

    name = "modules"

    @property
    def words(self) -> str:
        return "the model's own layers" + (f" ({self.reason})" if self.reason else "")

    def run(
        self,
        span: range,
        tokens: PassTokens,
        cache: SegmentCache,
        hidden: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> PassResult:
        counts = tokens.counts
        inputs = self._inputs(tokens, cache)
        states = None if hidden is None else padded(hidden, counts)
        passed = self.adapter.run(span.start, span.stop, inputs, hidden=states, keep=_keep(tokens), taps=taps)
        logits = None if passed.logits is None or tokens.kept is None else flat(passed.logits, tokens.kept)
        tapped = {depth: flat(own, counts) for depth, own in passed.taps.items()}
        return PassResult(flat(passed.states, counts), logits, tapped, [len(span) * tokens.width] * len(counts))

    def write_skipped_kv(
        self,
        span: range,
        tokens: PassTokens,
        states: torch.Tensor,
        cache: SegmentCache,
    ) -> None:
        hidden = padded(states, tokens.counts)
        self.adapter.run(span.start, span.stop, self._inputs(tokens, cache), hidden=hidden, kv_of=lambda layer: hidden)

    def _inputs(self, tokens: PassTokens, cache: SegmentCache) -> PassInputs:
        """Return ids, positions and mask; padding has the position of its row's last token."""
        width, device = tokens.width, self.device
        pairs = list(zip(tokens.starts, tokens.counts, strict=True))
        positions = torch.tensor([[start + min(i, count - 1) for i in range(width)] for start, count in pairs], device=device)
        ids = padded(torch.tensor(tokens.ids, device=device), tokens.counts)
        mask = cache.mask()
        embeds = None if tokens.embeds is None else padded(tokens.embeds, tokens.counts)
        return PassInputs(ids, positions, None if mask is None else mask.to(device), cache, embeds)


def _keep(tokens: PassTokens) -> torch.Tensor | None:
    """Return (rows, kept) indices of the last tokens of each row, the very last repeated if rows differ."""
    if tokens.kept is None:
        return None
    most = max(tokens.kept)
    pairs = list(zip(tokens.counts, tokens.kept, strict=True))
    return torch.tensor([[min(count - kept + i, count - 1) for i in range(most)] for count, kept in pairs])
