"""A router: a small MLP that scores, in [0, 1], how likely an exit's prediction is the full model's.

    score = sigmoid(up · silu(down · state))

on the state as the layer put it out, in fp32.
"""

from __future__ import annotations

import torch
from torch import nn


class Router(nn.Module):
    """Scores states of one checkpoint."""

    def __init__(self, hidden_dim: int, bottleneck_dim: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_dim, bottleneck_dim, bias=False)
        self.up = nn.Linear(bottleneck_dim, 1, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """(n, hidden) -> (n,)"""
        return torch.sigmoid(self.up(nn.functional.silu(self.down(states.float()))))[:, 0]
