"""The exit decision: given a checkpoint and the states there, exit or go on, and with which prediction.

The engine asks `score` first and `predict` only for the tokens that leave. Whatever a policy answers,
mode "exact" writes the text of the full model; a policy decides speed, never truth.

A policy that has to remember a text keeps nothing itself: `start` gives what decides for one request. The engine
shows that the states at the depths it `watches`, as they are computed, and tells it what was taken back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from TIDE.routing.certificate import Certificate

Head = Callable[..., torch.Tensor]  # (n, hidden) states [, (v,) token ids] -> (n, vocabulary or v) logits


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
        exit_thresholds: by depth, where checkpoints have thresholds of their own.
        fast_threshold: the least of all of these in mode "fast", which does not look back.
        certificate: what mode "fast" goes by instead, where its settings are the engine's.
        watches: depths whose states the policy wants to see, of all tokens.
        weighs: scores are the shares of exits that agree, so mode "exact" may weigh them against time instead of thresholds.
    """

    checkpoints: tuple[int, ...] = ()
    watches: tuple[int, ...] = ()
    weighs: bool = False
    exit_threshold: float = 0.5
    exit_thresholds: Mapping[int, float] = MappingProxyType({})
    fast_threshold: float = 0.0
    certificate: Certificate | None = None
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

    def start(self, rows: int, head: Head) -> ExitPolicy:
        """What decides for one request of so many rows; the policy itself, unless it has to remember the text."""
        return self

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        """(n, hidden) states at a watched depth of the tokens of a row from `position` on."""
        return None

    def forget(self, row: int, length: int) -> None:
        """What a row held beyond `length` tokens was taken back."""
        return None
