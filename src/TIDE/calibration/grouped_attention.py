"""Attention for generating many texts at once with a model whose query heads share K/V.

If rows are padded, transformers copies K/V once for every query head before attention, and for one new token that takes
longer than all the rest. Here the query heads of a group are treated as if they were tokens:

    queries (n, heads, 1, d)  →  (n, kv_heads, heads / kv_heads, d), all of which see the same keys
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "tide_grouped"


def without_plans() -> AbstractContextManager[None]:
    """Exclude the attention of cuDNN, which plans for every new length: that takes longer than the attention itself."""
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


def grouped_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention like transformers' "sdpa", without copies if there is one new token per row."""
    (rows, heads, tokens, _), groups = query.shape, query.shape[1] // key.shape[1]
    if tokens > 1 or groups == 1 or attention_mask is None or rest.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **rest)
    together = query.reshape(rows, key.shape[1], groups, -1)
    found = F.scaled_dot_product_attention(together, key, value, attn_mask=attention_mask, scale=scaling)
    return found.reshape(rows, 1, heads, -1), None


@contextmanager
def grouped(model: PreTrainedModel) -> Iterator[None]:
    """Use this attention inside the block, if the model has query heads to group and uses transformers' "sdpa"."""
    config = model.config
    shared = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    if config._attn_implementation != "sdpa" or config.sub_configs or shared == getattr(config, "num_attention_heads", None):
        yield
        return
    AttentionInterface.register(NAME, grouped_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
