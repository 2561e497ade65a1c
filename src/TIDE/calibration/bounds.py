"""Bounds: the confidence that the mean of a loss in [0, 1] is at most a risk, from a sample of it.

A p-value is for the hypothesis "the mean is above the risk". Under it, whatever the distribution, the p-value is at
most x with a probability of at most x. Two are computed, and each is tighter in some cases:

    Hoeffding-Bentkus     from the mean of the sample; best if almost all losses are zero
    betting               Waudby-Smith and Ramdas: a gambler bets on losses below the risk, one after the other; the
                          gambler's capital is a supermartingale under the hypothesis; best if losses vary little

The smaller of the two, doubled (union bound), is a p-value again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class PValues(NamedTuple):
    """Two p-values of "the mean is above the risk"; a small one rejects it."""

    hoeffding_bentkus: float
    betting: float

    @property
    def both(self) -> float:
        """The smaller of the two, with the union bound."""
        return min(1.0, 2 * min(self))


def p_values(losses: Sequence[float], risk: float, confidence: float) -> PValues:
    """Return both p-values of losses in [0, 1]. They are read in order, which must not depend on their values.

    Args:
        confidence: the bets are sized for it; the p-values are valid for any value.
    """
    check_share("risk", risk)
    check_share("confidence", confidence)
    if not losses:
        raise ValueError("a bound needs at least one loss, found none. Give prompts.")
    if not all(0 <= loss <= 1 for loss in losses):
        raise ValueError(f"losses must be numbers from 0 to 1, found {min(losses)} to {max(losses)}.")
    return PValues(hoeffding_bentkus(losses, risk), betting(losses, risk, (1 - confidence) / 2))


def prompts_needed(risk: float, confidence: float) -> int:
    """Return the fewest losses, all of them 0, with which a mean of at most `risk` can be certified."""
    check_share("risk", risk)
    check_share("confidence", confidence)
    guess = max(1, math.floor(math.log(2 / (1 - confidence)) / -math.log1p(-risk)) - 1)
    while 2 * _hoeffding(0.0, guess, risk) > 1 - confidence:
        guess += 1
    return guess


def check_enough(prompts: int, risk: float, confidence: float) -> None:
    """Raise if no losses of so few prompts could certify the risk."""
    if prompts < (needed := prompts_needed(risk, confidence)):
        raise ValueError(
            f"{prompts} prompts are too few: even without any loss, a risk of {risk:g} with confidence {confidence:g} needs "
            f"{needed}. Give more prompts, or ask for a higher risk or less confidence."
        )


def hoeffding_bentkus(losses: Sequence[float], risk: float) -> float:
    """Return the smaller of Hoeffding's and Bentkus's bounds on a sum this small (of the same tail, so no union bound)."""
    total, count = math.fsum(losses), len(losses)
    bentkus = math.e * binomial_at_most(math.ceil(total), count, risk)
    return min(1.0, _hoeffding(total / count, count, risk), bentkus)


def betting(losses: Sequence[float], risk: float, level: float) -> float:
    """Return 1 / the largest capital of a gambler who starts with 1 and bets up to all of it on the next loss being small.

    A bet is sized by the mean and variance of the losses before it, to reach 1 / level.
    """
    capital = most = 0.0  # logarithms
    total, squares = 0.5, 0.25  # as if a loss of 0.5 with a variance of 0.25 had been seen
    for seen, loss in enumerate(losses, 1):
        bet = min(1.0, math.sqrt(2 * math.log(1 / level) * seen / (len(losses) * squares)))
        capital += math.log1p(-bet * (loss - risk))
        most = max(most, capital)
        total += loss
        squares += (loss - total / (seen + 1)) ** 2
    return math.exp(-most)


def binomial_at_most(successes: int, count: int, share: float) -> float:
    """Return the probability of at most `successes` in `count` trials, each with probability `share`, in (0, 1)."""
    if successes >= count:
        return 1.0
    logs = [
        math.lgamma(count + 1)
        - math.lgamma(k + 1)
        - math.lgamma(count - k + 1)
        + k * math.log(share)
        + (count - k) * math.log1p(-share)
        for k in range(successes + 1)
    ]
    return min(1.0, math.fsum(map(math.exp, logs)))


def check_share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, found {value!r}.")


def _hoeffding(mean: float, count: int, risk: float) -> float:
    """Return exp(-n KL(mean, risk)); 1 if the mean is not below the risk."""
    if mean >= risk:
        return 1.0
    divergence = (1 - mean) * math.log((1 - mean) / (1 - risk))
    if mean > 0:
        divergence += mean * math.log(mean / risk)
    return math.exp(-count * divergence)
