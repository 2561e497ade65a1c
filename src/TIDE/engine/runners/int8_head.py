"""The LM head as exits use it, in compiled code: weights in 8 bits, and likely tokens first.

Most tokenizers give low ids to frequent pieces. If the best token of the first third is likely enough, the others are not
looked at: a draft is verified anyway, and the rows of an LM head are most of what an exit has to read.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from TIDE.kernels.dispatch import arrays
from TIDE.kernels.layer import Norm
from TIDE.kernels.weights import Weight, dense, quantize_int8, some_rows

LIKELY = 3  # one token in three is looked at first
SURE = 0.5  # probability of the best of them from which the others are not looked at


class Int8LMHead:
    """Norm and LM head for some tokens; all where `vocabulary` is None.

    Args:
        norm: the model's last one.
        weight: (tokens, hidden) of the LM head.
    """

    def __init__(self, norm: Norm, weight: Weight, vocabulary: torch.Tensor | None, exits: ModuleType) -> None:
        self.exits = exits
        self.norm: Norm = arrays(norm)
        rows = dense(weight if vocabulary is None else some_rows(weight, vocabulary))
        first = len(rows) // LIKELY if vocabulary is None else len(rows)
        self.likely, self.others = (arrays(quantize_int8(part)) for part in (rows[:first], rows[first:]))

    def judge(self, guesses: torch.Tensor, router: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, hidden) guesses of an exit head -> (n, tokens) logits, and (n,) scores of a router given by its arrays."""
        logits, scores = self.exits.judge(guesses.numpy(), self.norm, self.likely, self.others, SURE, router)
        return torch.from_numpy(logits), torch.from_numpy(scores)
