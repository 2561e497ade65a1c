"""Intervals: against figures of others, and by simulation: they hold as often as they say."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from TIDE.evals.intervals import binomial_interval, bootstrap, difference_interval, discordant_p


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"),
    [  # by the quantiles of the beta distribution (scipy.stats.beta.ppf)
        (0, 10, 0.0, 0.3084971078187607),
        (10, 10, 0.6915028921812392, 1.0),
        (5, 10, 0.18708602844739876, 0.8129139715526012),
        (1, 200, 0.00012658102786701825, 0.02754189845720562),
    ],
)
def test_the_interval_of_a_share_is_clopper_and_pearsons(successes, count, low, high):
    assert binomial_interval(successes, count) == pytest.approx((low, high), rel=1e-6)


def test_no_difference_in_few_questions_does_not_show_that_there_is_none():
    low, high = difference_interval(0, 0, 20)
    assert low == -high and 0.15 < high < 0.25
    assert difference_interval(0, 0, 2000)[1] < 0.003


def test_the_interval_of_a_difference_holds_as_often_as_it_says():
    chance, held, runs = random.Random(1), 0, 400
    for _ in range(runs):
        drawn = chance.choices(("lost", "gained", "same"), weights=(0.1, 0.04, 0.86), k=60)
        low, high = difference_interval(drawn.count("lost"), drawn.count("gained"), 60)
        held += low <= -0.06 <= high
    assert held / runs >= 0.95


def test_a_difference_that_is_there_is_found():
    low, high = difference_interval(lost=40, gained=5, count=200)
    assert low < -0.175 < high < 0


@pytest.mark.parametrize(("lost", "gained", "p"), [(0, 0, 1.0), (5, 0, 0.0625), (0, 5, 0.0625), (8, 2, 0.109375), (3, 3, 1.0)])
def test_the_test_of_discordant_questions_is_mcnemars(lost, gained, p):
    assert discordant_p(lost, gained) == pytest.approx(p)


def test_a_bootstrap_holds_about_as_often_as_it_says_and_repeats_itself():
    chance, held = random.Random(2), 0
    for _ in range(100):
        sample = [chance.expovariate(1.0) for _ in range(50)]
        low, high = bootstrap(sample, fmean, draws=200)
        held += low <= 1 <= high
    assert held >= 82
    assert bootstrap(sample, fmean) == bootstrap(sample, fmean)
