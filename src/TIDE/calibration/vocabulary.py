"""The draft vocabulary: the smallest set of tokens that covers almost all of what the model would write.

Covered is probability mass, not tokens seen: what the model considers without writing it on these texts it writes on
others. A smaller vocabulary makes an exit's LM head cheaper and its training too; it can never draft the rest.
"""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Collection
from TIDE.calibration.self_texts import end_tokens

COVERED = 0.999
FEW = 65536  # tokens that a GPU can do with as they are
LARGEST, CPU_LARGEST = 32768, 16384
POSITIONS = 100_000  # looked at


def draft_vocabulary(adapter: ModelAdapter, data: Collection) -> torch.Tensor | None:
    """Rising ids of the likeliest tokens, with those that end a text; None: training can afford all tokens."""
    cuda = adapter.device.type == "cuda"
    if cuda and adapter.vocab_size <= FEW:
        return None
    mass = token_mass(adapter, data)
    order = mass.argsort(descending=True)
    count = int((mass[order].cumsum(0) < COVERED * mass.sum()).sum()) + 1
    kept = torch.zeros(len(mass), dtype=torch.bool, device=mass.device)
    kept[order[: min(count, LARGEST if cuda else CPU_LARGEST)]] = True
    kept[[token for token in end_tokens(adapter.model) if token < len(mass)]] = True
    return kept.nonzero()[:, 0]


def token_mass(adapter: ModelAdapter, data: Collection) -> torch.Tensor:
    """(vocabulary,) what the full model gives each token, summed over positions it wrote."""
    stride = max(1, data.tokens // POSITIONS)
    total: torch.Tensor | None = None
    for shard, rows in data.in_order():
        states = shard.states(adapter.num_layers)[rows][shard.asked[rows]][::stride]
        for part in states.split(2048):
            mass = adapter.head(part).float().softmax(-1).sum(0)
            total = mass if total is None else total + mass
    assert total is not None, "no positions"
    return total.clone()
