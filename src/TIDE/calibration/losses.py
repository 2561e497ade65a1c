"""Losses: the distance of a continuation from the full model's, from 0 (the same) to 1 (nothing in common).

rouge_l     1 - F of the longest common subsequence of tokens (Lin 2004); an extra token does not shift the rest
mismatch    share of the positions that differ; if one text ends earlier, the missing positions differ
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Tokens = Sequence[int]
Loss = Callable[[Tokens, Tokens], float]


def rouge_l(found: Tokens, full: Tokens) -> float:
    """Return 1 - 2 · common / (found + full), in tokens."""
    if found == full:
        return 0.0
    return 1 - 2 * _common(found, full) / (len(found) + len(full))


def mismatch(found: Tokens, full: Tokens) -> float:
    """Return the share of positions of the longer text that differ."""
    longest = max(len(found), len(full))
    same = sum(one == other for one, other in zip(found, full, strict=False))
    return (longest - same) / longest if longest else 0.0


LOSSES: dict[str, Loss] = {"rouge_l": rouge_l, "mismatch": mismatch}


def named_loss(loss: str | Loss) -> tuple[str, Loss]:
    """Return a loss and its name. The results of a user's function are checked each time."""
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
    """Return the length of the longest common subsequence, by dynamic programming over one row."""
    row = [0] * (len(other) + 1)
    for token in one:
        diagonal = 0
        for place, against in enumerate(other, 1):
            above = row[place]
            row[place] = diagonal + 1 if token == against else max(above, row[place - 1])
            diagonal = above
    return row[-1]
