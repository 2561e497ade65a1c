"""A router: a small MLP that scores, in [0, 1], how likely an exit's prediction is the full model's.

    score = sigmoid(up · silu(down · x) / temperature + offset)

x is the normed guess of the exit head together with *signals* of its logits: the head has to run to emit a token
anyway, so its confidence is free. Temperature and offset are fitted on prompts the router was not trained on, so that
of the exits with a score of 0.9 nine in ten agree. Routers of the original system (`signals=0`) see only the output
state of the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from TIDE.routing.heads import EPS, normed

SIGNALS = 4


class Router(nn.Module):
    """The router of one checkpoint, in fp32."""

    temperature: torch.Tensor
    offset: torch.Tensor

    def __init__(self, hidden_dim: int, bottleneck_dim: int, signals: int = 0) -> None:
        super().__init__()
        self.signals = signals
        self.down = nn.Linear(hidden_dim + signals, bottleneck_dim, bias=signals > 0)
        self.up = nn.Linear(bottleneck_dim, 1, bias=signals > 0)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("offset", torch.zeros(()))

    def forward(self, states: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Map (n, hidden) states and, if the router takes signals, (n, vocabulary) logits to (n,) scores."""
        return torch.sigmoid(self.raw(self.features(states, logits)) / self.temperature + self.offset)

    def arrays(self) -> tuple[Any, ...]:
        """Return the weights of a router that takes signals as numpy arrays of the same memory, for compiled code."""
        weights = self.down.weight, self.down.bias, self.up.weight, self.up.bias, self.temperature[None], self.offset[None]
        return (*[x.detach().numpy() for x in weights], EPS)

    def features(self, states: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Return the input of the MLP, (n, hidden + signals)."""
        if not self.signals:
            return states.float()
        assert logits is not None, "this router takes the exit's logits too"
        return torch.cat([normed(states), signals_of(logits)], -1)

    def raw(self, features: torch.Tensor) -> torch.Tensor:
        """Map (n, hidden + signals) features to (n,) logits, before temperature and offset."""
        return self.up(nn.functional.silu(self.down(features)))[:, 0]


class OwnProbability(nn.Module):
    """The score of exits without a router: the probability that the exit itself gives to its best token."""

    def forward(self, states: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Map (n, vocabulary) logits to (n,) scores."""
        return logits.float().softmax(-1).amax(-1)


def signals_of(logits: torch.Tensor) -> torch.Tensor:
    """Map (n, vocabulary) logits to (n, 4): best probability, its logarithm, its lead over the second, entropy."""
    logs = logits.float().log_softmax(-1)
    best = logs.topk(2, -1).values
    probs = best.exp()
    entropy = -(logs.exp() * logs).sum(-1)
    return torch.stack([probs[:, 0], best[:, 0], probs[:, 0] - probs[:, 1], entropy], -1)
