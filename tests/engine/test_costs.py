"""What passes and rounds cost, by measurements that a busy machine skews."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planners import some_costs
from TIDE.engine.schedule.costs import LATEST, ClippedMean, Costs, RoundCosts, Undisturbed
from TIDE.engine.schedule.draft_planner import LOOKS


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_a_mean_stays_within_what_it_saw(values):
    mean = ClippedMean()
    for value in values:
        mean.add(value)
    assert min(values) * (1 - 1e-9) <= mean.mean <= max(values) * (1 + 1e-9)


def test_a_place_between_measured_passes_costs_its_part():
    costs = RoundCosts(Costs())
    costs.step.add(1.0)
    costs.saw_pass(1, 1.0)
    costs.saw_pass(5, 1.8)
    assert costs.marginal_cost(1) == costs.marginal_cost(4) == pytest.approx(0.2)
    assert costs.marginal_cost(5) == pytest.approx(0.1)  # not measured: a guess


def test_a_short_time_counts_at_once_and_a_long_one_little():
    seconds = ClippedMean()
    for value, expected in ((8.0, 8.0), (1.0, 1.0), (100.0, 1.2)):
        seconds.add(value)
        assert seconds.mean == pytest.approx(expected)


def test_rounds_in_which_the_device_waited_do_not_count():
    """Rows of a batch end one after the other, and each end keeps the host busy: most of the last rounds seem long."""
    round_ = Undisturbed()
    for number in range(LATEST):
        round_.add(1.0 if number < LATEST // 2 or number % 4 == 0 else 1.5, number)
    assert round_.seconds == 1.0


def test_rounds_that_have_become_longer_do_count():
    round_ = Undisturbed()
    for number, value in enumerate([1.0] * 1000 + [1.5] * (LATEST - LATEST // 4)):
        round_.add(value, number)
    assert round_.seconds == 1.0
    round_.add(1.5, number + 1)
    assert round_.seconds == 1.5


def test_short_texts_after_long_ones_are_soon_known_to_take_less():
    """While drafts pay, a round without any comes once in LOOKS rounds: sixty-four of them are too many to remember."""
    costs = Costs()
    for step in [5.5] * 10 + [4.0] * 2:
        for _ in range(LOOKS):
            costs.saw_round(1, 2, step + 0.6)
        costs.saw_round(1, 0, step)
    assert costs.captured_round(1, 0) == 4.0 and costs.captured_round(1, 2) == 4.6


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=3 * LATEST))
def test_a_quarter_of_the_latest_rounds_took_no_longer_than_is_said(values):
    round_ = Undisturbed()
    for number, value in enumerate(values):
        round_.add(value, number)
    latest = sorted(values[-LATEST:])
    assert round_.seconds == latest[(len(latest) - 1) // 4]


def test_costs_of_rows_together_are_their_own():
    costs = some_costs()
    costs.begin_round(8)
    assert costs.step.mean is None
    for _ in range(9):
        costs.saw_pass(8, 2.0)
    costs.saw_pass(12, 3.0)
    assert (costs.step.mean, costs.deep(8), costs.deep(10)) == (2.0, 1.0, pytest.approx(1.25))
    costs.begin_round(1)
    assert (costs.step.mean, costs.deep(2)) == (1.0, pytest.approx(1.1))
