"""The effect of stopped tokens on the text after them, on given texts.

    text     [ prompt: some tokens stop ][ what follows: runs all layers ]
    K/V      true + share · (predicted − true)          share: 1 stopped, 0 not; after the checkpoint, for prompt tokens

With shares between, the K/V are in between too, so that the KL divergence of what follows (full model ‖ with stopped tokens)
can be differentiated by each token's share. Around 0 it is quadratic in the shares, and then

    effect of a token = ½ · share · ∂KL / ∂share            adds up to the KL itself

which takes one backward pass for all tokens of a text, at random tokens stopped, instead of a forward pass for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import DynamicCache

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.span import KVWritten
from TIDE.calibration.collect import Collection

TOKENS_AT_ONCE = 2048
Predict = Callable[[int, torch.Tensor], torch.Tensor]


class MixedCache(DynamicCache):
    """K/V of a pass, in part exchanged: those of the first tokens go towards predicted ones by their shares."""

    def __init__(self) -> None:
        super().__init__()
        self.leave_after_write = False  # the pass writes predicted K/V
        self.shares: torch.Tensor | None = None  # (rows, prompt)
        self._predicted: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.leave_after_write:
            self._predicted[layer_idx] = key_states, value_states
            raise KVWritten
        if self.shares is None:
            return key_states, value_states
        share = self.shares[:, None, :, None]
        keys, values = self._predicted[layer_idx]
        return _mixed(key_states, keys, share), _mixed(value_states, values, share)


def _mixed(states: torch.Tensor, predicted: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    count = share.shape[2]
    own = states[:, :, :count]
    return torch.cat([own + share.to(own) * (predicted[:, :, :count] - own), states[:, :, count:]], 2)


class Followed(NamedTuple):
    """Sums over the tokens that follow a prompt, by row."""

    loss: torch.Tensor  # (rows,) of the text's own tokens
    divergence: torch.Tensor  # (rows,) from the full model
    tokens: torch.Tensor  # (rows,)


class StoppedTexts:
    """Texts of one batch: the first half of the shortest is the prompt of all, and the rest follows.

    Args:
        ids: (rows, tokens), padded on the right.
        depth: the checkpoint.
    """

    def __init__(self, adapter: ModelAdapter, ids: torch.Tensor, lengths: list[int], depth: int) -> None:
        self.adapter = adapter
        self.ids = ids
        self.depth = depth
        self.prompt = min(lengths) // 2
        self.positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
        ends = torch.tensor(lengths, device=ids.device)[:, None]
        self._kept = self.positions[:, self.prompt - 1 : -1]  # they predict what follows
        self._real = self._kept < ends - 1
        inputs = PassInputs(ids, self.positions, None, None)
        passed = adapter.run(0, adapter.num_layers, inputs, keep=self._kept, taps=(depth,))
        self.states = passed.taps[depth].clone()
        assert passed.logits is not None
        self._full = passed.logits.float().log_softmax(-1)

    @property
    def may_stop(self) -> torch.Tensor:
        """(rows, prompt - 1, hidden) states of the tokens that may stop: not the last one of the prompt."""
        return self.states[:, : self.prompt - 1]

    def predicted(self, predict: Predict) -> MixedCache:
        """Return a cache with predicted K/V in it."""
        cache, (rows, tokens, hidden) = MixedCache(), self.states.shape
        flat = self.states.flatten(0, 1)

        def kv_of(layer: int) -> torch.Tensor:
            return predict(layer, flat).view(rows, tokens, hidden)

        self._run(cache, kv_of=kv_of)
        return cache

    def followed(self, cache: MixedCache | None, shares: torch.Tensor | None, with_grad: bool = False) -> Followed:
        """Return what follows with some tokens stopped.

        Args:
            shares: (rows, prompt - 1).
        """
        if cache is None or shares is None:
            logs = self._full
        else:
            cache.shares = shares
            logs = self._run(cache, keep=self._kept, with_grad=with_grad).logits.float().log_softmax(-1)
        own = logs.gather(-1, self.ids[:, self.prompt :, None])[..., 0]
        divergence = F.kl_div(logs, self._full, log_target=True, reduction="none").sum(-1)
        real = self._real
        return Followed(-(own * real).sum(1), (divergence * real).sum(1), real.sum(1))

    def effects(self, predict: Predict, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Stop random halves of the prompts; return (n, hidden) states of the stopped tokens and (n,) their effects on the
        mean divergence of what follows."""
        rows, tokens, _ = self.may_stop.shape
        chosen = (torch.rand(rows, tokens, generator=generator) < 0.5).to(self.ids.device)
        chosen[:, 0] = False
        cache = self.predicted(predict)
        with torch.enable_grad(), torch.inference_mode(False), without_weight_gradients(self.adapter):
            shares = chosen.float().requires_grad_()
            found = self.followed(cache, shares, with_grad=True)
            mean = (found.divergence / found.tokens.clamp_min(1)).sum()
            (slope,) = torch.autograd.grad(mean, shares)
        return self.may_stop[chosen], 0.5 * slope[chosen]

    def _run(self, cache: MixedCache, **options: Any) -> Any:
        inputs = PassInputs(self.ids, self.positions, None, cache)
        return self.adapter.run(self.depth, self.adapter.num_layers, inputs, hidden=self.states, **options)


def batches(adapter: ModelAdapter, data: Collection, depth: int, most: int) -> Iterator[StoppedTexts]:
    """Yield the texts of a collection, up to `most` of them, spread evenly over it."""
    texts = [(shard, row) for shard in data.shards for row in range(len(shard.lengths))]
    step = max(1, len(texts) // most)
    some = [(shard, row) for shard, row in texts[::step] if shard.lengths[row] >= 8][:most]
    while some:
        shard, count = some[0][0], 1
        width = shard.ids.shape[1]
        while count < len(some) and some[count][0] is shard and (count + 1) * width <= TOKENS_AT_ONCE:
            count += 1
        rows = [row for _, row in some[:count]]
        yield StoppedTexts(adapter, shard.ids[rows], [shard.lengths[row] for row in rows], depth)
        some = some[count:]


@contextmanager
def without_weight_gradients(adapter: ModelAdapter) -> Iterator[None]:
    """Keep no gradients of weights inside the block."""
    weights = [weight for weight in adapter.model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)
