"""The LM head as exits use it, in compiled code: weights in 8 bits, and likely tokens first.

Most tokenizers give low ids to frequent pieces. If the best token of the first third is likely enough, the others are not
looked at: a draft is verified anyway, and the rows of an LM head are most of what an exit has to read.
"""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

LIKELY = 3  # of so many tokens one is looked at first
SURE = 0.5  # probability of the best of them from which the others are not looked at


class RoughHead:
    """The LM head for some tokens; all where `vocabulary` is None."""

    def __init__(self, weight: torch.Tensor, vocabulary: torch.Tensor | None, exits: ModuleType) -> None:
        self.vocabulary = vocabulary
        self.exits = exits
        rows = (weight if vocabulary is None else weight[vocabulary]).detach().numpy()
        first = len(rows) // LIKELY if vocabulary is None else len(rows)
        self.likely, self.others = (exits.cpu_ops.in_bytes(part) for part in (rows[:first], rows[first:]))

    def __call__(self, normed: np.ndarray) -> torch.Tensor:
        """(n, hidden) normed states -> (n, tokens) logits, or (n, likely tokens)."""
        linear = self.exits.cpu_ops.linear
        found = linear(normed, self.likely)
        if len(self.others.values) and self.exits.signals(found)[:, 0].min() < SURE:
            found = np.concatenate([found, linear(normed, self.others)], 1)
        return torch.from_numpy(found)
