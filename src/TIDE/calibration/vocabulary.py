"""The draft vocabulary: the smallest set of tokens that covers almost all of what the model would write, in order.

Covered is probability mass, not tokens seen: what the model considers without writing it on these texts it writes on
others. A smaller vocabulary makes an exit's LM head cheaper and its training too; it can never draft the rest. How much
of the list is used is for the machine that runs it to say (`routing/calibrated.py`).
"""

from __future__ import annotations

import torch

from TIDE.adapters.window import Window
from TIDE.calibration.collect import Collection
from TIDE.calibration.self_texts import end_tokens

COVERED = 0.999
LARGEST = 32768
POSITIONS = 100_000  # looked at


def draft_vocabulary(window: Window, data: Collection) -> torch.Tensor:
    """Ids of the tokens that cover `COVERED` of the mass the model gives at positions it wrote, end tokens first, then by mass."""
    mass = token_mass(window, data)
    ends = [token for token in sorted(end_tokens(window.model)) if token < len(mass)]
    first = mass.clone()
    first[ends] += mass.sum()
    order = first.argsort(descending=True)
    count = int((mass[order].cumsum(0) < COVERED * mass.sum()).sum()) + 1
    return order[: max(len(ends), min(count, LARGEST))]


def token_mass(window: Window, data: Collection) -> torch.Tensor:
    """(vocabulary,) what the full model gives each token, summed over positions it wrote."""
    stride = max(1, data.tokens // POSITIONS)
    total: torch.Tensor | None = None
    for shard, rows in data.in_order():
        states = shard.states(window.num_layers)[rows][shard.asked[rows]][::stride]
        for part in states.split(2048):
            mass = window.head(part).float().softmax(-1).sum(0)
            total = mass if total is None else total + mass
    assert total is not None, "no positions"
    return total.clone()
