"""The exit policy of a router file: an exit head guesses, a router scores how likely the guess is right.

The head runs before the router, because its confidence is the router's most useful input; its logits are kept for `predict`,
so an exit costs one head evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from TIDE.kernels.layer import UNLIKELY
from TIDE.routing.compiled_head import compiled_head
from TIDE.routing.eagle3.head import EagleHead
from TIDE.routing.heads import DraftHead
from TIDE.routing.memory import HeadMemory
from TIDE.routing.policy import Candidates, ExitPolicy, Head
from TIDE.routing.router import Router

if TYPE_CHECKING:
    from TIDE.adapters.adapter import ModelAdapter
    from TIDE.routing.exits import Exit
    from TIDE.routing.router_file import RouterFile


class CalibratedPolicy(ExitPolicy):
    """The calibrated exits of a model: copies of a file's heads and routers, on the model's device, heads in its dtype."""

    weighs = True
    fast_threshold = 0.95  # scores are probabilities: nineteen in twenty exits agree

    def __init__(self, file: RouterFile, adapter: ModelAdapter, head: Head | None = None) -> None:
        device, dtype = adapter.device, adapter.model.dtype
        self.made_for = _words(adapter)
        self.exits = {depth: file.exits[depth].copied(device, dtype) for depth in file.checkpoints}
        self.compiled = {depth: compiled_head(at.head) for depth, at in self.exits.items()}
        self.checkpoints = file.checkpoints
        self.exit_thresholds = {depth: at.threshold for depth, at in self.exits.items()}
        self.max_pending = file.max_pending
        self.num_layers = adapter.num_layers
        self.vocabulary = None if file.vocabulary is None else file.vocabulary.to(device)
        self.vocab_size = adapter.vocab_size
        self.watches = tuple(sorted({depth for own in map(self._watched, self.exits.items()) for depth in own}))
        routers = [(depth, own) for depth, at in self.exits.items() if (own := _on_model_logits(at)) is not None]
        takes_signals = device.type == "cpu" and len(routers) == len(self.exits)
        self.routers = {depth: own.arrays() for depth, own in routers} if takes_signals else {}
        request = self.start(1, adapter.head if head is None else head)
        nothing = torch.zeros(1, adapter.hidden_dim, device=device, dtype=dtype)
        for depth in self.exits:  # warm up, so that the first request does not pay for it
            request.judge(depth, nothing)

    def _watched(self, place: tuple[int, Exit]) -> list[int]:
        depth, at = place
        if not isinstance(at.head, DraftHead):
            return []
        inputs, memories = at.head.seen(depth, self.num_layers)
        return [*inputs, *memories]

    def check_model(self, adapter: ModelAdapter) -> None:
        if self.made_for != (there := _words(adapter)):
            raise ValueError(
                f"these exits were made for a model in {self.made_for}; this one is in {there}. Give the engine their router "
                f"file or its path."
            )

    def start(self, rows: int, head: Head) -> _Request:
        return _Request(self, rows, head)

    def over_all_tokens(self, logits: torch.Tensor) -> torch.Tensor:
        """Map (n, v) logits of the exits' vocabulary to (n, vocabulary) ones of the model's."""
        if self.vocabulary is None:
            return logits
        # Not minus infinity: processors may leave only tokens that the exit head did not score.
        lowest = (logits.amin(-1, keepdim=True) - UNLIKELY).expand(-1, self.vocab_size)
        return lowest.scatter(1, self.vocabulary.expand(len(logits), -1), logits)

    def score(self, candidates: Candidates) -> torch.Tensor:
        raise RuntimeError("a calibrated policy decides through what `start` returns.")


def _words(adapter: ModelAdapter) -> str:
    return f"{str(adapter.model.dtype).removeprefix('torch.')} on {adapter.device}"


def _on_model_logits(at: Exit) -> Router | None:
    """Return the router of an exit if it takes signals of logits that the model's own LM head gives."""
    router, has_own_logits = at.router, isinstance(at.head, EagleHead)
    return router if isinstance(router, Router) and router.signals and not has_own_logits else None


class _Request(ExitPolicy):
    """The state of a calibrated policy for one request."""

    def __init__(self, policy: CalibratedPolicy, rows: int, head: Head) -> None:
        self.policy = policy
        self.watches = policy.watches
        self.head = head
        int8 = getattr(head, "int8", None)
        # made from the current weights; None if there is no compiled code for it
        self.int8_head = int8(policy.vocabulary) if int8 is not None and policy.routers else None
        self.memories = {
            depth: HeadMemory(at.head, depth, policy.num_layers, rows, policy.compiled[depth])
            for depth, at in policy.exits.items()
            if isinstance(at.head, DraftHead)
        }
        self._scored: tuple[list[int], torch.Tensor] = ([], torch.zeros(0))  # rows last scored, and their logits

    def judge(self, depth: int, guess: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (n, hidden) guesses of an exit to the logits of its vocabulary and (n,) scores."""
        policy = self.policy
        if self.int8_head is not None:
            logits, scores = self.int8_head.judge(guess, policy.routers[depth])
            return logits, scores
        head = policy.exits[depth].head
        logits = head.logits(guess) if isinstance(head, EagleHead) else self.head(guess, policy.vocabulary)
        return logits, policy.exits[depth].router(guess, logits)

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        for memory in self.memories.values():
            memory.observe(depth, row, position, states)

    def forget(self, row: int, length: int) -> None:
        for memory in self.memories.values():
            memory.forget(row, length)

    def copied(self, row: int) -> Any:
        return {depth: memory.copied(row) for depth, memory in self.memories.items()}

    def paste(self, row: int, copied: Any, length: int) -> None:
        for depth, memory in self.memories.items():
            memory.paste(row, copied[depth], length)

    def score(self, candidates: Candidates) -> torch.Tensor:
        depth = candidates.depth
        if depth in self.memories:
            guess = self.memories[depth].guess(candidates.rows, candidates.positions)
        else:
            guess = self.policy.exits[depth].head(candidates.states)
        guess = guess.to(candidates.states.dtype)
        logits, scores = self.judge(depth, guess)
        self._scored = candidates.rows, logits
        return scores

    def predict(self, candidates: Candidates, head: Head) -> torch.Tensor:
        rows, logits = self._scored
        if candidates.rows != rows:
            logits = logits[[rows.index(row) for row in candidates.rows]]
        return self.policy.over_all_tokens(logits)
