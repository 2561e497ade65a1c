"""The exit decision: given a checkpoint and the states there, exit or go on, and with which prediction.

The engine asks `score` first and `predict` only for the tokens that leave. Whatever a policy answers,
mode "exact" writes the text of the full model; a policy decides speed, never truth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch

Head = Callable[[torch.Tensor], torch.Tensor]


class Candidates(NamedTuple):
    """Tokens that stand at a checkpoint, one per row asked."""

    depth: int  # layers they have run
    states: torch.Tensor  # (n, hidden) at that depth
    rows: list[int]  # which rows of the batch
    positions: list[int]  # where in their rows


class ExitPolicy(ABC):
    """Whether tokens may leave at a checkpoint.

    Attributes:
        checkpoints: depths at which the engine asks; 0 is allowed, the model's full depth is not.
        exit_threshold, min_layers, max_pending: used where `TIDEConfig` leaves them None.
    """

    checkpoints: tuple[int, ...] = ()
    exit_threshold: float = 0.5
    min_layers: int = 0
    max_pending: int = 8

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor:
        """(n,) in [0, 1]: how likely this exit's prediction is the full model's."""

    def predict(self, candidates: Candidates, head: Head) -> torch.Tensor:
        """(n, vocabulary) logits of the exit; the identity exit unless overridden.

        `head` is the model's own final norm and LM head.
        """
        return head(candidates.states)
