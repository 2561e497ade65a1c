"""The weight of a model's LM head, where it is a linear layer."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel

from TIDE.adapters.patches import original_class
from TIDE.adapters.weights import holds_numbers, read_linear, state_of
from TIDE.kernels.weights import Dense, Weight


class _Rows(NamedTuple):
    """Rows of the weight and bias of an LM head, with what they were copied from: models are trained and given other heads."""

    weight: torch.Tensor
    state: tuple[Any, ...]
    rows: tuple[torch.Tensor, torch.Tensor | None]


class LMHeadWeight:
    """The weight of the LM head that a model has now.

    Args:
        is_known: of a family in the table, whose `forward` does nothing but to call the head.

    Attributes:
        module: the LM head if it is a module of its own, and not the embedding.
    """

    def __init__(self, model: PreTrainedModel, is_known: bool) -> None:
        head: Any = model.get_output_embeddings()
        self.module: Any = None if head is model.get_input_embeddings() else head
        self._is_known = is_known
        self._kept: MutableMapping[torch.Tensor, _Rows] = WeakIdKeyDictionary()  # by vocabulary, as long as that lives

    @property
    def _is_linear(self) -> bool:
        head = self.module
        return self._is_known and head is not None and original_class(head) is nn.Linear and holds_numbers(head.weight)

    @property
    def plain(self) -> Weight | None:
        """The weight if the head has no bias; None: it is another kind of head."""
        return read_linear(self.module) if self._is_linear and self.module.bias is None else None

    def plain_rows(self, vocabulary: torch.Tensor) -> Weight:
        """Return the rows of `plain` for some tokens."""
        rows = self.rows(vocabulary)
        assert rows is not None and rows[1] is None
        return Dense(rows[0])

    def rows(self, vocabulary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Return the rows of weight and bias for some tokens, copied once; None if it is no plain linear layer."""
        if not self._is_linear:
            return None
        head, kept = self.module, self._kept.get(vocabulary)
        state = state_of(Dense(head.weight))
        if kept is None or kept.state != state:
            with torch.inference_mode(False), torch.no_grad():
                bias = None if head.bias is None else head.bias[vocabulary].clone()
                rows = head.weight[vocabulary].clone(), bias
            self._kept[vocabulary] = kept = _Rows(head.weight, state, rows)
        return kept.rows
