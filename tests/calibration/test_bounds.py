"""Bounds: a risk that is exceeded is hardly ever certified, one that is kept is, and the numbers are the textbook's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from TIDE.calibration.bounds import betting, binomial_at_most, hoeffding_bentkus, p_values, prompts_needed

RUNS = 1000
RISK, CONFIDENCE = 0.1, 0.9
# losses whose mean is just above the risk: the hardest case for a bound
TOO_LOSSY: dict[str, Callable[[random.Random], float]] = {
    "none or all": lambda r: float(r.random() < 0.101),
    "seldom half": lambda r: 0.5 * (r.random() < 0.202),
    "always the same": lambda r: 0.101,
    "spread evenly": lambda r: 0.202 * r.random(),
    "mostly small": lambda r: r.betavariate(0.2, 1.779),  # mean 0.2 / 1.979
    "rare disasters": lambda r: 1.0 if r.random() < 0.03 else 0.0732,
}


@pytest.mark.parametrize("name", TOO_LOSSY)
@pytest.mark.parametrize("count", [40, 150])
def test_a_mean_above_the_risk_is_certified_no_more_often_than_allowed(name, count):
    """Each p-value alone, and both together, within three standard errors of the Monte-Carlo estimate."""
    random_ = random.Random(f"{name} {count}")
    draw, allowed = TOO_LOSSY[name], 1 - CONFIDENCE
    wrong = {"hoeffding_bentkus": 0, "betting": 0, "both": 0}
    for _ in range(RUNS):
        found = p_values([draw(random_) for _ in range(count)], RISK, CONFIDENCE)
        for kind in wrong:
            wrong[kind] += getattr(found, kind) <= allowed
    most = allowed + 3 * math.sqrt(allowed * CONFIDENCE / RUNS)
    assert all(times / RUNS <= most for times in wrong.values()), wrong


def test_the_simulation_would_notice_a_bound_that_is_none():
    """Believing the sample's mean certifies far too often."""
    random_ = random.Random(0)
    draw = TOO_LOSSY["none or all"]
    certified = sum(sum(draw(random_) for _ in range(150)) / 150 <= RISK for _ in range(RUNS))
    assert certified / RUNS > 0.3


@pytest.mark.parametrize(
    ("draw", "least"),
    [
        (lambda r: float(r.random() < 0.02), 0.95),
        (lambda r: 0.08 * r.random(), 0.99),
        (lambda r: 0.3 * (r.random() < 0.1), 0.95),
    ],
    ids=["none or all", "spread evenly", "seldom"],
)
def test_a_mean_clearly_below_the_risk_is_certified(draw, least):
    random_ = random.Random(1)
    certified = sum(p_values([draw(random_) for _ in range(200)], RISK, CONFIDENCE).both <= 1 - CONFIDENCE for _ in range(200))
    assert certified / 200 >= least


def test_each_of_the_two_is_better_somewhere():
    none, small = [0.0] * 100, [0.04] * 100
    assert hoeffding_bentkus(none, RISK) < betting(none, RISK, 0.05)
    assert betting(small, RISK, 0.05) < hoeffding_bentkus(small, RISK)


def test_binomial_probabilities_are_the_exact_ones():
    assert binomial_at_most(0, 3, 0.5) == pytest.approx(1 / 8)
    assert binomial_at_most(1, 3, 0.5) == pytest.approx(4 / 8)
    assert binomial_at_most(2, 5, 0.2) == pytest.approx((1024 + 5 * 256 + 10 * 64) / 3125)
    assert binomial_at_most(3, 3, 0.5) == 1.0
    many = sum(math.comb(1000, k) * 5**k * 95 ** (1000 - k) for k in range(31))
    assert binomial_at_most(30, 1000, 0.05) == pytest.approx(many / 100**1000)


def test_hoeffding_and_bentkus_are_those_of_a_hand_calculation():
    # 10 losses of sum 1, risk 1/2. Hoeffding: (5/9)^9 · 5 = 0.02520; Bentkus: e · (1 + 10) / 2^10 = 0.02920
    assert hoeffding_bentkus([1.0] + [0.0] * 9, 0.5) == pytest.approx((5 / 9) ** 9 * 5)
    # 20 of sum 7, risk 1/2. Hoeffding: exp(-20 · 0.045647) = 0.40129; Bentkus: e · 137980 / 2^20 = 0.35769
    assert hoeffding_bentkus([1.0] * 7 + [0.0] * 13, 0.5) == pytest.approx(math.e * 137980 / 2**20)
    assert hoeffding_bentkus([0.0] * 10, 0.05) == pytest.approx(0.95**10)
    assert hoeffding_bentkus([0.6] * 10, 0.5) == 1.0


def test_the_gambler_multiplies_what_he_owns():
    # The first bet: sqrt(2 log 20 / (2 · 0.25)) > 1, so all of it; the second: squares = 0.25 + (0 - 0.25)^2, all again.
    assert betting([0.0, 0.0], 0.1, 0.05) == pytest.approx(1 / 1.1**2)
    assert betting([0.0, 1.0], 0.1, 0.05) == pytest.approx(1 / 1.1), "the most ever owned counts"
    assert betting([1.0, 1.0], 0.1, 0.05) == 1.0


def test_both_together_pay_for_choosing():
    found = p_values([0.02] * 50, RISK, CONFIDENCE)
    assert found.both == 2 * min(found.hoeffding_bentkus, found.betting)
    assert p_values([0.5] * 50, RISK, CONFIDENCE).both == 1.0


@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.02, 0.95), (0.1, 0.9), (0.5, 0.5), (0.01, 0.99), (0.9, 0.6)])
def test_so_many_prompts_are_needed_and_no_fewer(risk, confidence):
    needed = prompts_needed(risk, confidence)
    assert p_values([0.0] * needed, risk, confidence).both <= 1 - confidence
    if needed > 1:
        assert p_values([0.0] * (needed - 1), risk, confidence).both > 1 - confidence


def test_72_prompts_are_needed_for_five_percent_at_ninety_five():
    assert prompts_needed(0.05, 0.95) == 72  # 0.95^72 = 0.0249 <= 0.025 < 0.95^71


@pytest.mark.parametrize(
    ("losses", "risk", "confidence", "said"),
    [
        ([0.1], 0.0, 0.9, "risk must be a number between 0 and 1, found 0.0"),
        ([0.1], 0.1, 1, "confidence must be a number between 0 and 1, found 1"),
        ([], 0.1, 0.9, "at least one loss"),
        ([0.1, 1.5], 0.1, 0.9, "from 0 to 1, found 0.1 to 1.5"),
        ([float("nan")], 0.1, 0.9, "from 0 to 1"),
    ],
)
def test_losses_and_levels_out_of_range_are_refused(losses, risk, confidence, said):
    with pytest.raises(ValueError, match=said):
        p_values(losses, risk, confidence)
