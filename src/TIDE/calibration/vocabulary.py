"""The draft vocabulary: the smallest set of tokens that covers almost all of the model's probability mass.

Probability mass is covered, not tokens seen: a token that is likely on these texts but not sampled occurs in others. A
smaller vocabulary makes an exit's LM head and its training cheaper; tokens outside it are never drafted.
"""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Collection
from TIDE.calibration.self_texts import end_tokens

COVERED = 0.999
FEW = 65536  # vocabulary size up to which a GPU uses all tokens
LARGEST, CPU_LARGEST = 32768, 16384
POSITIONS = 100_000  # examined


def draft_vocabulary(adapter: ModelAdapter, data: Collection) -> torch.Tensor | None:
    """Return the sorted ids of the most likely tokens and of end tokens; None: use all tokens."""
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
    """Return (vocabulary,) probabilities of the full model, summed over the positions it wrote."""
    stride = max(1, data.tokens // POSITIONS)
    total: torch.Tensor | None = None
    for shard, rows in data.in_order():
        states = shard.states(adapter.num_layers)[rows][shard.asked[rows]][::stride]
        for part in states.split(2048):
            mass = adapter.head(part).float().softmax(-1).sum(0)
            total = mass if total is None else total + mass
    assert total is not None, "no positions"
    return total.clone()
