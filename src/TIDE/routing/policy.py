"""The exit decision: given a checkpoint and the states there, exit or continue, and with which prediction.

The engine calls `score` first and `predict` only for the tokens that exit. Whatever a policy returns, mode "exact" generates
the text of the full model: a policy affects speed, not the output.

Policies are stateless. One that needs per-request state returns it from `start`. The engine passes it the states at the
depths it `watches`, as they are computed, and calls `forget` when tokens are rejected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from TIDE.routing.certificate import Certificate
from TIDE.routing.exits import Exit

if TYPE_CHECKING:
    from TIDE.adapters.adapter import ModelAdapter

Head = Callable[..., torch.Tensor]  # (n, hidden) states [, (v,) token ids] -> (n, vocabulary or v) logits


class Candidates(NamedTuple):
    """Tokens at a checkpoint, one per candidate row."""

    depth: int  # number of layers run
    states: torch.Tensor  # (n, hidden) at that depth
    rows: list[int]  # their rows in the batch
    positions: list[int]  # their positions in their rows


class ExitPolicy(ABC):
    """The interface that decides which tokens exit at a checkpoint.

    Attributes:
        checkpoints: depths at which the engine calls `score`; 0 is allowed, the model's full depth is not.
        exit_threshold, min_layers, max_pending: used if `TIDEConfig` leaves them None.
        exit_thresholds: by depth, for checkpoints with thresholds of their own.
        fast_threshold: lower bound of all thresholds in mode "fast", which does not verify.
        certificate: gives the threshold of mode "fast" instead, if its settings are those of the engine.
        exits: heads and routers by depth, if it has any: whole rounds on a device draft from one of them.
        vocabulary: token ids that its exits may predict; None: all.
        watches: depths whose states are passed to `observe`, for all tokens.
        weighs: True if scores are probabilities of agreement, so that mode "exact" may weigh them against time instead of
            using thresholds.
    """

    checkpoints: tuple[int, ...] = ()
    watches: tuple[int, ...] = ()
    weighs: bool = False
    exit_threshold: float = 0.5
    exit_thresholds: Mapping[int, float] = MappingProxyType({})
    fast_threshold: float = 0.0
    certificate: Certificate | None = None
    exits: Mapping[int, Exit] = MappingProxyType({})
    vocabulary: torch.Tensor | None = None
    min_layers: int = 0
    max_pending: int = 8

    def check_model(self, adapter: ModelAdapter) -> None:  # noqa: B027 (most serve any model)
        """Raise if it was made for a model of another dtype, or on another device, than an adapter's."""

    @abstractmethod
    def score(self, candidates: Candidates) -> torch.Tensor:
        """Return (n,) scores in [0, 1]: the probability that the exit's prediction is the full model's."""

    def predict(self, candidates: Candidates, head: Head) -> torch.Tensor:
        """Return (n, vocabulary) logits of the exit; the identity exit unless overridden.

        `head` is the model's own final norm and LM head.
        """
        return head(candidates.states)

    def start(self, rows: int, head: Head) -> ExitPolicy:
        """Return the policy of one request with `rows` rows; the policy itself unless it needs per-request state."""
        return self

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        """Receive (n, hidden) states at a watched depth, of a row's tokens from `position` on."""
        return None

    def forget(self, row: int, length: int) -> None:
        """Drop the state of a row beyond its first `length` tokens: the rest was rejected."""
        return None

    def copied(self, row: int) -> Any:
        """Return a copy of the state of a row, for another text that begins alike. Policies that watch states, and have no
        copies, share nothing."""
        return None

    def paste(self, row: int, copied: Any, length: int) -> None:
        """Let a new row begin with the first `length` tokens of a copy."""
        return None
