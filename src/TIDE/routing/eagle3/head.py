"""An EAGLE-3 head: a draft model of one decoder block before the first layer.

    memory of token i       g_i = fc([a_i ; b_i ; c_i])          its states at three depths, each normed first with `fc_norm`
    position i + 1          x = [norm(e(t_{i+1})) ; norm(h)]     h = g_i, or while drafting the carry of the position before
    queries, keys, values   of x; the residual stream is h alone, or norm(h) with `norm_before_residual`
    block                   y = h + o(attention);   z = y + MLP(norm(y))
    logits                  lm_head(norm(z)), of its own and often of fewer tokens than the model has
    carry                   z, or norm(z) with `norm_output`

So a guess z is no state of the model, and the model's own norm and LM head are not asked. There is nothing before the first
token, so position 0 does not exist for the others. Norms are RMS, computed in fp32 and rounded before their gain is applied.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from TIDE.kernels.layer import Norm, no_norm
from TIDE.routing.heads import DraftHead, HeadSizes, Jitter, Seen, spread


@dataclass(frozen=True)
class EagleSizes(HeadSizes):
    """The sizes of an EAGLE-3 head, and how its weights are to be read.

    Attributes:
        vocabulary: number of tokens it chooses from.
        depths: whose states are remembered, rising; (): those of EAGLE-3, which depend on the number of layers.
        rope_scaling: of its rotary embedding, as Hugging Face configurations have it.
        context: tokens that its configuration allows.
    """

    vocabulary: int = 0
    depths: tuple[int, ...] = ()
    eps: float = 1e-6
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    context: int = 2048
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "depths", tuple(self.depths))  # JSON has lists


def default_depths(num_layers: int) -> tuple[int, ...]:
    """Return the depths of a head that names none."""
    return 2, num_layers // 2, num_layers - 3


class EagleHead(DraftHead):
    """The head."""

    sizes: EagleSizes
    begins_at = 1

    def __init__(self, sizes: EagleSizes) -> None:
        super().__init__(sizes)
        dim, seen = sizes.hidden_dim, sizes.memories * sizes.hidden_dim
        self.fc = nn.Linear(seen, dim, bias=False)
        self.part_gains = nn.Parameter(torch.ones(sizes.memories, dim)) if sizes.fc_norm else None
        self.fc_gain = nn.Parameter(torch.ones(seen)) if sizes.norm_before_fc else None
        self.token_gain = nn.Parameter(torch.ones(dim))
        self.memory_gain = nn.Parameter(torch.ones(dim))
        self._add_block(2 * dim)
        self.gain = nn.Parameter(torch.ones(dim))
        self.lm_head = nn.Linear(dim, sizes.vocabulary, bias=False)

    def seen(self, depth: int, num_layers: int) -> Seen:
        return Seen([depth], list(self.sizes.depths or default_depths(num_layers)))

    @torch.no_grad()
    def measure(self, shallow: torch.Tensor, deep: torch.Tensor) -> None:
        """Set the gains of inputs so that they have a spread of at most 1."""
        self.token_gain.copy_(1 / spread(F.rms_norm(shallow.float(), shallow.shape[-1:], eps=self.sizes.eps)))
        if self.part_gains is not None:
            parts = deep.float().unflatten(-1, self.part_gains.shape)
            self.part_gains.copy_(1 / spread(F.rms_norm(parts, parts.shape[-1:], eps=self.sizes.eps)))

    def remember(self, deep: torch.Tensor) -> torch.Tensor:
        if self.part_gains is not None:
            deep = self._normed(deep.unflatten(-1, self.part_gains.shape), self.part_gains).flatten(-2)
        if self.fc_gain is not None:
            deep = self._normed(deep, self.fc_gain)
        return self.fc(deep.to(self.fc.weight.dtype))

    def enter(self, shallow: torch.Tensor, before: torch.Tensor, jitter: Jitter | None = None) -> torch.Tensor:
        """Return token, memory and residual stream side by side, (n, q, 3 * hidden)."""
        token, memory = self._normed(shallow, self.token_gain), self._normed(before, self.memory_gain)
        joined = torch.cat([token, memory], -1)
        if jitter is not None:
            joined = joined + jitter.size * torch.randn(joined.shape, generator=jitter.generator, device=joined.device)
        residual = memory if self.sizes.norm_before_residual else before
        return torch.cat([joined, residual], -1).to(self.fc.weight.dtype)

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        y = x[..., 2 * self.sizes.hidden_dim :] + self.o(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self._normed(y, self.mlp_gain)).chunk(2, -1)
        found: torch.Tensor = y + self.down(F.silu(gate) * up)
        return found

    def carry(self, guess: torch.Tensor) -> torch.Tensor:
        return self._normed(guess, self.gain) if self.sizes.norm_output else guess

    def logits(self, guess: torch.Tensor) -> torch.Tensor:
        """Map (n, hidden) guesses to (n, vocabulary) logits."""
        found: torch.Tensor = self.lm_head(self._normed(guess, self.gain))
        return found

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        frequencies, scale = self._rope
        angles = positions.float()[:, None, :, None] * frequencies.to(positions.device)
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def norms(self) -> tuple[Norm, Norm]:
        return no_norm(torch.zeros(0)), self.norm_with(self.mlp_gain)

    def norm_with(self, gain: torch.Tensor) -> Norm:
        """Return a norm of the head in the form of that of a layer."""
        return Norm(gain, self.sizes.eps, 0.0, False, torch.zeros(0))

    def read_as(self, sizes: EagleSizes) -> EagleHead:
        """Return a head of the same weights, read in another way."""
        with torch.device("meta"):
            found = EagleHead(sizes).eval().requires_grad_(False)
        found.load_state_dict(self.state_dict(), assign=True)
        return found

    def _projected(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        found = F.linear(x[..., : 2 * self.sizes.hidden_dim], weight)
        return found.view(*x.shape[:2], -1, self.sizes.head_dim).transpose(1, 2)

    def _normed(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.sizes.eps).to(gain.dtype) * gain

    @functools.cached_property
    def _rope(self) -> tuple[torch.Tensor, float]:
        """The frequencies of the rotary embedding, and the factor of its cosines and sines."""
        return frequencies(self.sizes)


def frequencies(sizes: EagleSizes) -> tuple[torch.Tensor, float]:
    """Return (head_dim / 2,) frequencies and a factor, as transformers computes them for a Llama of these sizes."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": "default"} | sizes.rope_scaling | {"rope_theta": sizes.rope_theta}
    config = LlamaConfig(
        hidden_size=sizes.heads * sizes.head_dim,
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=sizes.context,
        rope_parameters=rope,
    )
    with torch.device("cpu"):
        made = LlamaRotaryEmbedding(config)
    return made.inv_freq.float(), float(made.attention_scaling)
