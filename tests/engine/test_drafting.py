"""Drafting: decisions follow from scores and seconds, and losing rows rest."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from TIDE.engine.drafting import FIRST_REST, LONGEST_REST, TRIAL, Drafting, Pace
from TIDE.engine.running import Timed


def a_pace(step=1.0, exit_=0.1, passes=(1.0, 1.1, 1.2, 1.3, 2.3)) -> Pace:
    """Deep passes of 1 to 5 tokens; the fifth is dear. As many drafts were accepted before as anyone wants."""
    pace = Pace()
    pace.proven = 8
    pace.step.add(step)
    pace.exit.add(exit_)
    for tokens, seconds in enumerate(passes, 1):
        pace.saw_pass(tokens, seconds)
    return pace


def test_nothing_is_asked_before_a_full_step_was_timed():
    drafting = Drafting([0], Pace())
    assert not drafting.may_ask(0, 10)
    drafting.pace.step.add(1.0)
    assert drafting.may_ask(0, 10)


def test_a_token_becomes_a_draft_if_it_is_likely_to_save_more_than_its_place_costs():
    drafting = Drafting([0], a_pace())
    assert not drafting.leaves(0, 0.09)
    assert drafting.leaves(0, 0.5)
    assert not drafting.leaves(0, 0.19)  # 0.5 · 0.19 of a step is less than 0.1
    assert drafting.leaves(0, 0.9)
    assert drafting.leaves(0, 0.9)
    assert not drafting.leaves(0, 0.99)  # the fifth place costs a whole step


def test_exits_are_asked_while_the_usual_score_pays_for_exit_and_place():
    drafting = Drafting([0], a_pace(exit_=0.3))
    drafting.pace.gain.mean = 0.4
    assert drafting.may_ask(0, 10)
    assert drafting.leaves(0, 0.5)
    assert not drafting.may_ask(0, 11)  # 0.5 · 0.5 of a step is less than 0.3 + 0.1
    drafting.verified(0, 12, tokens=2)
    assert drafting.may_ask(0, 12)


def test_rows_decide_for_themselves():
    drafting = Drafting([0, 0], a_pace(exit_=0.3))
    drafting.pace.gain.mean = 0.4
    assert drafting.leaves(1, 0.5)
    assert drafting.may_ask(0, 10)
    assert not drafting.may_ask(1, 10)


def a_round(drafting, size, score, tokens):
    """One exit asked and left, and what came of it."""
    asked = drafting.may_ask(0, size)
    if asked:
        drafting.leaves(0, score)
    drafting.verified(0, size + tokens, tokens if asked else 1)
    return asked


def test_a_row_that_loses_rests_longer_each_time_and_tries_again():
    """Confident drafts that never stand: the scores say it pays, the balance does not."""
    drafting, asked = Drafting([0], a_pace()), []
    for size in range(2000):
        if a_round(drafting, size, 0.9, tokens=1):
            asked.append(size)
    rests = [after - before - 1 for before, after in pairwise(asked) if after - before > 1]
    assert rests[:7] == [min(FIRST_REST * 2**i, LONGEST_REST) for i in range(7)]


def test_what_drafting_can_lose_is_a_few_steps_for_every_rest():
    drafting, lost = Drafting([0], a_pace()), 0.0
    for size in range(1000):
        lost += 0.2 * a_round(drafting, size, 0.9, tokens=1)  # exit and place
    assert lost / 1000 < 0.03


def test_a_row_that_wins_does_not_rest():
    drafting = Drafting([0], a_pace())
    assert all(a_round(drafting, size, 0.9, tokens=2) for size in range(0, 100, 2))


def test_bad_rounds_among_good_ones_are_no_reason_to_rest():
    drafting = Drafting([0], a_pace())
    for turn in range(50):
        assert a_round(drafting, 10 * turn, 0.9, tokens=2)
        assert a_round(drafting, 10 * turn + 2, 0.9, tokens=1)


def test_a_row_that_wins_again_rests_shortly_next_time():
    drafting, size = Drafting([0], a_pace()), 0
    while drafting._rest[0] < 8 * FIRST_REST:
        a_round(drafting, size, 0.9, tokens=1)
        size += 1
    size += LONGEST_REST
    for _ in range(5):
        assert a_round(drafting, size, 0.9, tokens=2)
    assert drafting._rest[0] == FIRST_REST


def test_exits_that_never_pay_are_asked_a_few_times_in_a_text_only():
    """A router that is never confident."""
    pace, asked = a_pace(), 0
    for _ in range(10):
        drafting = Drafting([0], pace)
        for size in range(128):
            if drafting.may_ask(0, size):
                asked += 1
                assert not drafting.leaves(0, 0.0)
            drafting.verified(0, size + 1, 1)
    assert 0 < asked <= 40  # of 1280 tokens
    assert drafting.leaves(0, 0.9)
    drafting.verified(0, 130, tokens=2)  # one accepted draft, and the next text is a text like others
    assert Drafting([0], pace).may_ask(0, 0)


def test_no_more_drafts_are_made_than_were_ever_accepted_and_one():
    drafting = Drafting([0], a_pace())
    drafting.pace.proven = 0
    for accepted in (0, 1, 2, 2):
        made = 0
        while drafting.leaves(0, 0.99) and made < 8:
            made += 1
        assert made == drafting.pace.proven + 1
        drafting.verified(0, 10, tokens=accepted + 1)
        assert drafting.pace.proven == accepted


def test_sure_scores_that_are_always_wrong_cost_little():
    """Routers that were trained on another question: every draft is made, none is ever accepted."""
    pace, lost = a_pace(), 0.0
    pace.proven = 0
    for _ in range(4):
        drafting = Drafting([0], pace)
        for size in range(128):
            drafts = 0
            while drafting.may_ask(0, size) and drafts < 8 and drafting.leaves(0, 0.999):
                drafts += 1
            lost += 0.1 * (drafting.asked[0] + drafts)  # exits and places
            drafting.verified(0, size + 1, 1)
    assert 0 < lost / (4 * 128) < 0.02


def test_with_a_threshold_scores_decide_and_rows_that_lose_still_rest():
    drafting = Drafting([0], a_pace(exit_=5.0), weighs=False)
    assert drafting.may_ask(0, 0)
    assert not drafting.leaves(0, 0.69, 0.7)
    assert drafting.leaves(0, 0.7, 0.7)
    drafting.verified(0, 1, 1)  # an exit takes five steps here
    assert not drafting.may_ask(0, 1)
    assert drafting.may_ask(0, 1 + FIRST_REST)


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_a_mean_stays_within_what_it_saw(values):
    mean = Timed()
    for value in values:
        mean.add(value)
    assert min(values) * (1 - 1e-9) <= mean.mean <= max(values) * (1 + 1e-9)


def test_a_place_between_measured_passes_costs_its_part():
    pace = Pace()
    pace.step.add(1.0)
    pace.saw_pass(1, 1.0)
    pace.saw_pass(5, 1.8)
    assert pace.place(1) == pace.place(4) == pytest.approx(0.2)
    assert pace.place(5) == pytest.approx(0.1)  # not measured: a guess


def test_exits_that_seemed_too_slow_are_tried_again_after_a_rest():
    """The first time an exit runs may be its slowest; that must not stand for ever."""
    drafting = Drafting([0], a_pace(exit_=5.0))
    asked = [size for size in range(40) if drafting.may_ask(0, size)]
    assert asked[:TRIAL] == list(range(TRIAL))
    assert asked[TRIAL] >= FIRST_REST
    drafting.pace.exit.add(0.1)
    assert drafting.may_ask(0, 10**6)
    assert drafting.may_ask(0, 10**6 + 1)


def test_a_short_time_counts_at_once_and_a_long_one_little():
    seconds = Timed()
    for value, expected in ((8.0, 8.0), (1.0, 1.0), (100.0, 1.2)):
        seconds.add(value)
        assert seconds.mean == pytest.approx(expected)


def test_odds_that_turn_out_too_high_are_corrected_by_number_in_the_row():
    """Scores of 0.9 of which the second draft never stands: it is soon no longer made."""
    drafting = Drafting([0], a_pace())
    for _ in range(60):
        drafting.leaves(0, 0.9)
        drafting.leaves(0, 0.9)
        drafting.verified(0, 10, tokens=2)
    assert drafting.trust(1) > 0.95
    assert drafting.trust(2) < 0.2
    assert drafting.leaves(0, 0.9)
    assert not drafting.leaves(0, 0.9)
