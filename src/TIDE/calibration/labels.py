"""Labels: the targets that a router learns to predict about an exit.

    agreement   the exit's most likely token is the full model's
    cosine      the state at the checkpoint has the direction of the state at full depth (the original criterion)

Convergence of a state does not depend on drafts, so the cosine label is the same at all draft steps.
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
    """Return the labels of chosen positions in rows of a shard, by draft step.

    Args:
        depths: of the checkpoint, and full depth.
        chosen: (n, steps) mask over the n counted positions of these rows, at each step.
        agreed: per step, for the chosen positions, True if the exit's token is the full model's.
    """
    if config.label == "agreement":
        return agreed
    asked = shard.asked[rows]
    shallow, deep = (shard.states(depth)[rows][asked] for depth in depths)
    near = converged(shallow, deep, config.convergence_threshold)
    return [near[picked] for picked in chosen.unbind(1)]


def agrees(logits: torch.Tensor, best: torch.Tensor, vocabulary: torch.Tensor | None) -> torch.Tensor:
    """Compare (n, vocabulary) logits of an exit with (n,) tokens of the full model; return (n,) agreement."""
    found = logits.argmax(-1)
    return (found if vocabulary is None else vocabulary[found]) == best


def converged(shallow: torch.Tensor, deep: torch.Tensor, threshold: float) -> torch.Tensor:
    """Compare (n, hidden) states at the checkpoint and at full depth by cosine similarity, in fp32; return (n,) booleans."""
    return F.cosine_similarity(shallow.float(), deep.float(), dim=-1) > threshold
