"""Placement: the checkpoints, thresholds and draft length with the most expected tokens per second.

From every held-out position a round of mode "exact" is simulated with the recorded scores and agreement of the exits:

    draft        the newest token runs to a checkpoint; it exits there if its score is high enough, or continues
    deep pass    the first token that does not exit takes all pending ones through the rest; wrong drafts are rejected
    a round      emits the accepted drafts and one token of the full model

A setting is rated by its tokens per second, with the costs timed on this machine.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from TIDE.calibration.fit_router import Trace
from TIDE.calibration.timing import Costs

THRESHOLDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
COARSE = (0.1, 0.3, 0.5, 0.7, 0.9)  # for two checkpoints with a threshold each
DRAFTS = (1, 2, 3, 4, 5, 6, 8)
POSITIONS = 5_000  # from which a round is simulated
CLEARLY = 1.02  # times as many tokens per second


class Candidate(NamedTuple):
    """The trace and cost of an exit that may be used."""

    trace: Trace
    head: float  # seconds


class Placed(NamedTuple):
    """A setting and its expected speed."""

    checkpoints: tuple[int, ...]
    thresholds: tuple[float, ...]
    max_pending: int
    tokens_per_second: float
    tokens_per_round: float

    def row(self, costs: Costs) -> dict[str, Any]:
        """Return a row of a table."""
        return {
            "checkpoints": list(self.checkpoints),
            "thresholds": list(self.thresholds),
            "draft_length": self.max_pending,
            "tokens_per_round": round(self.tokens_per_round, 3),
            "tokens_per_second": round(self.tokens_per_second, 2),
            "speedup": round(self.tokens_per_second * costs.full_step, 3),
        }


def best_setting(candidates: dict[int, Candidate], checkpoints: tuple[int, ...], costs: Costs) -> Placed:
    """Return the best thresholds and draft length for these checkpoints."""
    grid = THRESHOLDS if len(checkpoints) == 1 else COARSE
    settings = itertools.product(itertools.product(grid, repeat=len(checkpoints)), DRAFTS)
    found = (play(candidates, checkpoints, thresholds, drafts, costs) for thresholds, drafts in settings)
    return max(found, key=lambda placed: placed.tokens_per_second)


def is_worth_going_deeper(tried: list[Placed]) -> bool:
    """Return True if the last setting, the deepest one, is clearly faster than all before it."""
    *before, last = [placed.tokens_per_second for placed in tried]
    return not before or last > CLEARLY * max(before)


def place(candidates: dict[int, Candidate], singles: list[Placed], costs: Costs) -> list[Placed]:
    """Return the given settings of single checkpoints and the best setting of every pair, fastest first."""
    pairs = tqdm([*itertools.combinations(sorted(candidates), 2)], desc="placement", unit="pair")
    found = [best_setting(candidates, pair, costs) for pair in pairs]
    return sorted(singles + found, key=lambda placed: -placed.tokens_per_second)


def play(
    candidates: dict[int, Candidate], checkpoints: tuple[int, ...], thresholds: tuple[float, ...], drafts: int, costs: Costs
) -> Placed:
    """Simulate one round from every position."""
    texts = candidates[checkpoints[0]].trace.texts
    starts = torch.arange(0, len(texts), max(1, len(texts) // POSITIONS))
    edges = [0, *checkpoints, costs.num_layers]
    prices = [costs.span(start, stop, torch.arange(drafts + 2.0)) for start, stop in itertools.pairwise(edges)]  # by tokens
    seconds, accepted = torch.zeros(len(starts)), torch.zeros(len(starts), dtype=torch.long)
    budget, right = torch.ones(len(starts), dtype=torch.bool), torch.ones(len(starts), dtype=torch.bool)
    waiting = [torch.zeros_like(accepted) for _ in checkpoints]  # tokens that exited at each checkpoint
    for step in range(drafts):
        at = (starts + step).clamp(max=len(texts) - 1)
        inside = texts[at] == texts[starts]
        undecided = budget.clone()
        seconds += budget * prices[0][1]
        for place_, (depth, threshold) in enumerate(zip(checkpoints, thresholds, strict=True)):
            trace, head = candidates[depth]
            known = min(step, trace.scores.shape[1] - 1)
            seconds += undecided * head
            should_exit = undecided & inside & (trace.scores[at, known] >= threshold)
            seconds += should_exit * costs.choice
            right &= ~should_exit | trace.agreed[at, known]
            accepted += should_exit & right
            undecided &= ~should_exit
            seconds += undecided * prices[place_ + 1][1 + waiting[place_]]
            if place_ + 1 < len(checkpoints):
                waiting[place_ + 1] += undecided * waiting[place_]
            waiting[place_] = torch.where(undecided, 0, waiting[place_] + should_exit)
        seconds += undecided * (1 + accepted) * costs.choice  # the full model sampled, and verified every draft
        budget &= ~undecided
    carried = torch.ones_like(accepted)
    for place_, price in enumerate(prices):
        carried = carried + (waiting[place_ - 1] if place_ else 0)
        seconds += budget * price[carried]
    seconds += budget * (1 + accepted) * costs.choice
    tokens = 1.0 + accepted
    return Placed(checkpoints, thresholds, drafts, float(tokens.sum() / seconds.sum()), float(tokens.mean()))
