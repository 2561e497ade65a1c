"""Labels: what a router learns to predict about an exit.

    agreement   the exit's best token is the full model's
    cosine      the state at the checkpoint already points where the state at full depth will (the original criterion)

A state is converged or not whatever is drafted from it, so the cosine label is the same at all draft steps.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from TIDE.calibration.collect import Shard
from TIDE.config import TIDEConfig


def labels(
    config: TIDEConfig,
    shard: Shard,
    rows: torch.Tensor,
    depths: tuple[int, int],
    chosen: torch.Tensor,
    agreed: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Labels of chosen positions in rows of a shard, by draft step.

    Args:
        depths: of the checkpoint, and full depth.
        chosen: (n, steps) which of the n asked positions of these rows are wanted at each step.
        agreed: per step, for the chosen positions, whether the exit's best token is the full model's.
    """
    if config.label == "agreement":
        return agreed
    asked = shard.asked[rows]
    shallow, deep = (shard.states(depth)[rows][asked] for depth in depths)
    near = converged(shallow, deep, config.convergence_threshold)
    return [near[picked] for picked in chosen.unbind(1)]


def agrees(logits: torch.Tensor, best: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """(n, vocabulary) logits of an exit and (n,) best tokens of the full model -> (n,) whether they agree."""
    found = logits.argmax(-1)
    return (found if vocabulary is None else vocabulary[found]) == best


def converged(shallow: torch.Tensor, deep: torch.Tensor, threshold: float) -> torch.Tensor:
    """(n, hidden) states at the checkpoint and at full depth -> (n,) whether they point the same way, in fp32."""
    return F.cosine_similarity(shallow.float(), deep.float(), dim=-1) > threshold
