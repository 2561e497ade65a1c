"""Figures of a router: how well scores in [0, 1] separate right exits from wrong ones.

    auroc               probability that a right exit scores higher than a wrong one
    calibration_error   mean distance between a score and the share of right exits with that score
    coverage            largest share of tokens that can exit with a given precision

All take 1-D scores and outcomes, and none of them is ever nan.
"""

from __future__ import annotations

from typing import Any

import torch

PRECISIONS = (0.90, 0.95, 0.98, 0.99)


def auroc(scores: torch.Tensor, right: torch.Tensor) -> float:
    """Return the probability that a right exit scores higher than a wrong one, ties counted half; 0.5 if there is no pair."""
    right = right.bool()
    rights, wrongs = int(right.sum()), int((~right).sum())
    if not rights or not wrongs:
        return 0.5
    _, which, counts = scores.unique(return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # equal scores share their mean rank
    above = float(ranks[which][right].sum()) - rights * (rights + 1) / 2
    return above / (rights * wrongs)


def calibration_error(scores: torch.Tensor, right: torch.Tensor, bins: int = 15) -> float:
    """Return the expected calibration error over bins of equal width, weighted by their counts."""
    if not len(scores):
        return 0.0
    place = (scores.double() * bins).long().clamp(0, bins - 1)
    surplus = torch.zeros(bins, dtype=torch.double, device=scores.device)
    surplus.index_add_(0, place, scores.double() - right.double())
    return float(surplus.abs().sum()) / len(scores)


def coverage(scores: torch.Tensor, right: torch.Tensor, precision: float) -> float:
    """Return the largest share of tokens at or above some threshold of which at least `precision` are right."""
    if not len(scores):
        return 0.0
    scores, order = scores.sort(descending=True)
    hits = right[order].double().cumsum(0)
    taken = torch.arange(1, len(scores) + 1, device=scores.device)
    threshold_fits = torch.ones_like(taken, dtype=torch.bool)  # equal scores exit together
    threshold_fits[:-1] = scores[:-1] != scores[1:]
    good = threshold_fits & (hits >= precision * taken - 1e-9)
    return float(taken[good].max()) / len(scores) if bool(good.any()) else 0.0


def router_figures(scores: torch.Tensor, right: torch.Tensor) -> dict[str, Any]:
    """Return all figures, rounded to 4 digits."""
    return {
        "agreement": share(right),
        "auroc": round(auroc(scores, right), 4),
        "calibration_error": round(calibration_error(scores, right), 4),
        "coverage": {f"{precision:.2f}": round(coverage(scores, right, precision), 4) for precision in PRECISIONS},
        "positions": len(scores),
    }


def share(right: torch.Tensor) -> float:
    """Return the share of right exits, rounded to 4 digits; 0 if there are none at all."""
    return round(float(right.double().mean()), 4) if len(right) else 0.0
