"""An untrained EAGLE-3 head for a model, of version 3.1 (`fc_norm`, `norm_output`).

Its block has the sizes of one of the model's layers, and it ends in the model's own last norm and LM head, which stays as it
is in training: so its guesses are states of the model at full depth, up to their norm, and there is less to learn.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.weights import holds_numbers, is_stock
from TIDE.kernels.layer import Norm
from TIDE.kernels.weights import dense, some_rows
from TIDE.routing.eagle3.head import EagleHead, EagleSizes, default_depths
from TIDE.routing.eagle3.resolve import reads_embeddings
from TIDE.routing.heads import MEMORIES, head_sizes, memory_depths

USE = "Use exit_strategy='memory'"


def fresh_depths(num_layers: int) -> tuple[int, ...]:
    """Return the depths whose states a fresh head remembers: those of EAGLE-3, unless the model has too few layers."""
    usual = default_depths(num_layers)
    return usual if list(usual) == sorted(set(usual)) else tuple(sorted({*memory_depths(num_layers, MEMORIES)}))


def fresh_eagle_head(adapter: ModelAdapter, vocabulary: torch.Tensor | None, seed: int) -> EagleHead:
    """Return an untrained head, the same for the same seed, for a model that `check_model` lets pass.

    Args:
        vocabulary: sorted ids of the tokens it chooses from; None: all.
    """
    norm, weight = _last_norm(adapter), adapter.lm_head.plain
    assert norm is not None and weight is not None
    rows = dense(weight if vocabulary is None else some_rows(weight, vocabulary))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        head = EagleHead(_sizes(adapter, len(rows), norm.eps))
    with torch.no_grad():
        head.lm_head.weight.copy_(rows)
        head.gain.copy_(norm.weight + norm.offset)
    return head


def check_model(adapter: ModelAdapter) -> None:
    """Raise if a model is none that EAGLE-3 heads are made for."""
    why = None
    if not reads_embeddings(adapter):
        why = "it changes embeddings before its first layer (by positions or a norm)"
    elif _last_norm(adapter) is None:
        why = "its logits are not those of an RMS norm and a product"
    if why is not None:
        raise ValueError(f"no EAGLE-3 head can be trained for {type(adapter.model).__name__}: {why}. {USE}.")


@torch.no_grad()
def _last_norm(adapter: ModelAdapter) -> Norm | None:
    """Return the norm before the LM head if it is an RMS norm by what it computes: names of classes do not tell."""
    norm, rows = getattr(adapter.model.get_decoder(), "norm", None), adapter.lm_head.plain
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if norm is None or weight is None or eps is None or rows is None or not is_stock(norm) or not holds_numbers(weight):
        return None
    drawn = torch.randn(16, adapter.hidden_dim, generator=torch.Generator().manual_seed(0)) + 0.5
    states = drawn.to(weight.device, weight.dtype)
    computed, close = norm(states).float(), 1e-4 if weight.dtype == torch.float32 else 3e-2
    for offset in (0.0, 1.0):  # weights of Gemma's norms are around 0
        expected = F.rms_norm(states.float(), states.shape[-1:], eps=eps) * (weight.float() + offset)
        if torch.allclose(computed, expected, rtol=close, atol=close * float(expected.abs().max())):
            return Norm(weight, float(eps), offset, False, torch.zeros(0))
    return None


def _sizes(adapter: ModelAdapter, tokens: int, eps: float) -> EagleSizes:
    config = adapter.model.config.get_text_config(decoder=True)
    block, depths = head_sizes("memory", config, adapter.hidden_dim), fresh_depths(adapter.num_layers)
    return EagleSizes(
        hidden_dim=block.hidden_dim,
        inner_dim=block.inner_dim,
        heads=block.heads,
        kv_heads=block.kv_heads,
        head_dim=block.head_dim,
        rope_theta=block.rope_theta,
        memories=len(depths),
        vocabulary=tokens,
        depths=depths,
        eps=eps,
        context=int(getattr(config, "max_position_embeddings", None) or EagleSizes.context),
        fc_norm=True,
        norm_output=True,
    )
