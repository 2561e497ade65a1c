"""Intervals for what was measured on the same questions by two contenders.

Scores of 0 and 1. Only questions that one of them answers right and the other wrong tell a difference. Their numbers, lost and
gained, are each binomial, so the difference gained - lost has an interval from two exact ones (Clopper and Pearson 1934), each
at half the level (union bound). It holds for any number of questions, and where nothing differs it is not empty, as a
bootstrap's would be: no difference in 20 questions does not show that there is none.

Anything else (perplexities, speeds). A paired bootstrap: questions are drawn again, with what both contenders made of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from TIDE.calibration.bounds import binomial_at_most

CONFIDENCE = 0.95
DRAWS = 1000
T = TypeVar("T")


class Interval(NamedTuple):
    """From low to high."""

    low: float
    high: float


def binomial_interval(successes: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Return the exact interval of a share, after Clopper and Pearson."""
    tail = (1 - confidence) / 2
    low = 0.0 if not successes else _solved(lambda share: 1 - binomial_at_most(successes - 1, count, share) >= tail)
    high = 1.0 if successes == count else _solved(lambda share: binomial_at_most(successes, count, share) <= tail)
    return Interval(low, high)


def difference_interval(lost: int, gained: int, count: int, confidence: float = CONFIDENCE) -> Interval:
    """Return an interval of (gained - lost) / count, from the exact ones of both."""
    half = 1 - (1 - confidence) / 2
    losses, gains = binomial_interval(lost, count, half), binomial_interval(gained, count, half)
    return Interval(gains.low - losses.high, gains.high - losses.low)


def discordant_p(lost: int, gained: int) -> float:
    """Return the two-sided p-value of "as many are lost as gained": the exact test of McNemar."""
    return min(1.0, 2 * binomial_at_most(min(lost, gained), lost + gained, 0.5)) if lost + gained else 1.0


def bootstrap(
    pairs: Sequence[T], statistic: Callable[[Sequence[T]], float], confidence: float = CONFIDENCE, draws: int = DRAWS
) -> Interval:
    """Return the interval of a statistic of pairs, by percentiles; the same pairs give the same interval."""
    chance = random.Random(0)
    found = sorted(statistic(chance.choices(pairs, k=len(pairs))) for _ in range(draws))
    tail = (1 - confidence) / 2
    return Interval(found[int(tail * draws)], found[min(draws - 1, int((1 - tail) * draws))])


def _solved(is_past: Callable[[float], bool]) -> float:
    """Return the smallest share in (0, 1) for which this is so, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if is_past(middle) else (middle, high)
    return high
