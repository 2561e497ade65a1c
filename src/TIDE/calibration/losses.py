"""Losses: how far a continuation is from the full model's, from 0 (the same) to 1 (nothing in common).

rouge_l     1 - F of the longest common subsequence of tokens (Lin 2004); a token too many shifts nothing
mismatch    share of the positions that differ; where one text ends earlier, all that is missing differs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Tokens = Sequence[int]
Loss = Callable[[Tokens, Tokens], float]


def rouge_l(found: Tokens, full: Tokens) -> float:
    """1 - 2 · common / (found + full), in tokens."""
    if found == full:
        return 0.0
    return 1 - 2 * _common(found, full) / (len(found) + len(full))


def mismatch(found: Tokens, full: Tokens) -> float:
    """Positions that differ, of those of the longer text."""
    longest = max(len(found), len(full))
    same = sum(one == other for one, other in zip(found, full, strict=False))
    return (longest - same) / longest if longest else 0.0


LOSSES: dict[str, Loss] = {"rouge_l": rouge_l, "mismatch": mismatch}


def named_loss(loss: str | Loss) -> tuple[str, Loss]:
    """A loss and what it is called. What a function of the user gives is checked each time."""
    if isinstance(loss, str) and loss in LOSSES:
        return loss, LOSSES[loss]
    if not callable(loss):
        raise ValueError(
            f"loss must be one of {list(LOSSES)} or a function of (ids found, ids of the full model), found {loss!r}."
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    return name, lambda found, full: _checked(name, loss(found, full))


def _checked(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not 0 <= number <= 1:
        raise ValueError(f"the loss {name} must give a number from 0 to 1, found {value!r}. Scale it to that range.")
    return number


def _common(one: Tokens, other: Tokens) -> int:
    """Length of the longest common subsequence: row by row of the usual table."""
    row = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for place, against in enumerate(other, 1):
            above = row[place]
            row[place] = diagonal + 1 if token == against else max(above, row[place - 1])
            diagonal = above
    return row[-1]
