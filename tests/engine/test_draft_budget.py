"""Drafting: decisions follow from scores and seconds, and losing rows rest."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from TIDE.engine.schedule.acceptance import FIRST_REST, LONGEST_REST
from TIDE.engine.schedule.costs import LATEST, ClippedMean, Costs, RoundCosts, Undisturbed
from TIDE.engine.schedule.draft_budget import BETWEEN, TRIAL, DraftBudget, Experience
from TIDE.engine.schedule.draft_length import LOOKS


def some_costs(step=1.0, exit_=0.1, passes=(1.0, 1.1, 1.2, 1.3, 2.3)) -> RoundCosts:
    """Deep passes of 1 to 5 tokens; the fifth is dear."""
    costs = RoundCosts(Costs())
    costs.step.add(step)
    costs.exit.add(exit_)
    for tokens, seconds in enumerate(passes, 1):
        costs.saw_pass(tokens, seconds)
    return costs


def some_experience(longest=8) -> Experience:
    """As many drafts were accepted before as anyone wants."""
    experience = Experience()
    experience.longest = longest
    return experience


def a_budget(costs=None, experience=None, weighs=True) -> DraftBudget:
    return DraftBudget(0, costs or some_costs(), experience or some_experience(), weighs)


def test_nothing_is_asked_before_a_full_step_was_timed():
    budget = a_budget(RoundCosts(Costs()))
    assert not budget.should_draft(10)
    budget.costs.step.add(1.0)
    assert budget.should_draft(10)


def test_a_token_becomes_a_draft_if_it_is_likely_to_save_more_than_its_place_costs():
    budget = a_budget()
    assert not budget.should_exit(0.09)
    assert budget.should_exit(0.5)
    assert not budget.should_exit(0.19)  # 0.5 · 0.19 of a step is less than 0.1
    assert budget.should_exit(0.9)
    assert budget.should_exit(0.9)
    assert not budget.should_exit(0.99)  # the fifth place costs a whole step


def test_exits_are_asked_while_the_usual_score_pays_for_exit_and_place():
    budget = a_budget(some_costs(exit_=0.3))
    budget.experience.gain.mean = 0.4
    assert budget.should_draft(10)
    assert budget.should_exit(0.5)
    assert not budget.should_draft(11)  # 0.5 · 0.5 of a step is less than 0.3 + 0.1
    budget.record_round(12, tokens=2)
    budget.costs.begin_round(1)
    assert budget.should_draft(12)


def a_round(budget, size, score, tokens):
    """One exit asked and left, and what came of it."""
    budget.costs.begin_round(1)
    asked = budget.should_draft(size)
    if asked:
        budget.should_exit(score)
    budget.record_round(size + tokens, tokens if asked else 1)
    return asked


def test_a_row_that_loses_rests_longer_each_time_and_tries_again():
    """Confident drafts that never stand: the scores say it pays, the balance does not."""
    budget, asked = a_budget(), []
    for size in range(2000):
        if a_round(budget, size, 0.9, tokens=1):
            asked.append(size)
    rests = [after - before - 1 for before, after in pairwise(asked) if after - before > 1]
    assert rests[:7] == [min(FIRST_REST * 2**i, LONGEST_REST) for i in range(7)]


def test_what_drafting_can_lose_is_a_few_steps_for_every_rest():
    budget, lost = a_budget(), 0.0
    for size in range(1000):
        lost += 0.2 * a_round(budget, size, 0.9, tokens=1)  # exit and place
    assert lost / 1000 < 0.03


def test_a_row_that_wins_does_not_rest():
    budget = a_budget()
    assert all(a_round(budget, size, 0.9, tokens=2) for size in range(0, 100, 2))


def test_bad_rounds_among_good_ones_are_no_reason_to_rest():
    budget = a_budget()
    for turn in range(50):
        assert a_round(budget, 10 * turn, 0.9, tokens=2)
        assert a_round(budget, 10 * turn + 2, 0.9, tokens=1)


def test_a_row_that_wins_again_rests_shortly_next_time():
    budget, size = a_budget(), 0
    while budget._rest.length < 8 * FIRST_REST:
        a_round(budget, size, 0.9, tokens=1)
        size += 1
    size += LONGEST_REST
    for _ in range(5):
        assert a_round(budget, size, 0.9, tokens=2)
    assert budget._rest.length == FIRST_REST


def test_exits_that_never_pay_are_asked_a_few_times_in_a_text_only():
    """A router that is never confident."""
    costs, experience, asked = some_costs(), some_experience(), 0
    for _ in range(10):
        budget = a_budget(costs, experience)
        for size in range(128):
            costs.begin_round(1)
            if budget.should_draft(size):
                asked += 1
                assert not budget.should_exit(0.0)
            budget.record_round(size + 1, 1)
    assert 0 < asked <= 40  # of 1280 tokens
    assert budget.should_exit(0.9)
    budget.record_round(130, tokens=2)  # one accepted draft, and the next text is a text like others
    assert a_budget(costs, experience).should_draft(0)


def test_no_more_drafts_are_made_than_were_ever_accepted_and_one():
    budget = a_budget()
    budget.experience.longest = 0
    for accepted in (0, 1, 2, 2):
        made = 0
        budget.costs.begin_round(1)
        while budget.should_exit(0.99) and made < 8:
            made += 1
        assert made == budget.experience.longest + 1
        budget.record_round(10, tokens=accepted + 1)
        assert budget.experience.longest == accepted


def test_sure_scores_that_are_always_wrong_cost_little():
    """Routers that were trained on another question: every draft is made, none is ever accepted."""
    costs, experience, lost = some_costs(), some_experience(longest=0), 0.0
    for _ in range(4):
        budget = a_budget(costs, experience)
        for size in range(128):
            drafts = 0
            costs.begin_round(1)
            while budget.should_draft(size) and drafts < 8 and budget.should_exit(0.999):
                drafts += 1
            lost += 0.1 * (budget.asked + drafts)  # exits and places
            budget.record_round(size + 1, 1)
    assert 0 < lost / (4 * 128) < 0.02


def test_with_a_threshold_scores_decide_and_rows_that_lose_still_rest():
    budget = a_budget(some_costs(exit_=5.0), weighs=False)
    assert budget.should_draft(0)
    assert not budget.should_exit(0.69, 0.7)
    assert budget.should_exit(0.7, 0.7)
    budget.record_round(1, 1)  # an exit takes five steps here
    assert not budget.should_draft(1)
    assert budget.should_draft(1 + FIRST_REST)


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


def test_exits_that_seemed_too_slow_are_tried_again_after_a_rest():
    """The first time an exit runs may be its slowest; that must not stand for ever."""
    budget = a_budget(some_costs(exit_=5.0))
    asked = [size for size in range(40) if budget.should_draft(size)]
    assert asked[:TRIAL] == list(range(TRIAL))
    assert asked[TRIAL] >= FIRST_REST
    budget.costs.exit.add(0.1)
    assert budget.should_draft(10**6)
    assert budget.should_draft(10**6 + 1)


def test_a_busy_moment_is_not_held_against_drafts_for_good():
    """The first pass with a draft took four steps. Later ones would take 1.1, and texts are short: 64 tokens each."""
    costs, experience, slow, drafted = RoundCosts(Costs()), Experience(), [4.0], []
    for _ in range(4):
        budget, size, drafts = a_budget(costs, experience), 10, 0
        while size < 74:
            costs.begin_round(1)
            while budget.should_draft(size):
                costs.exit.add(0.1)
                if not budget.should_exit(0.9):
                    break
                size += 1
                drafts += 1
            tokens = len(budget.odds)
            costs.saw_pass(tokens, slow.pop() if slow and tokens > 1 else 0.9 + 0.1 * tokens)
            size += 1
            budget.record_round(size, tokens)
        drafted.append(drafts)
    assert not slow and min(drafted[1:]) > 40


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


def test_odds_that_turn_out_too_high_are_corrected_by_number_in_the_row():
    """Scores of 0.9 of which the second draft never stands: it is soon no longer made."""
    budget = a_budget()
    for _ in range(60):
        budget.costs.begin_round(1)
        budget.should_exit(0.9)
        budget.should_exit(0.9)
        budget.record_round(10, tokens=2)
    budget.costs.begin_round(1)
    assert budget.acceptance.share(1) > 0.95
    assert budget.acceptance.share(2) < 0.2
    assert budget.should_exit(0.9)
    assert not budget.should_exit(0.9)


def test_rows_together_draft_only_where_a_place_costs_less_than_their_part_of_a_step():
    """A token of eight is worth an eighth of their step, 1.8 seconds, and a place costs a ninth of it."""
    costs = some_costs(exit_=0.01, passes=(1.0,))
    costs.begin_round(8)
    costs.saw_pass(8, 1.8)
    costs.saw_pass(16, 3.4)
    rows = [DraftBudget(0, costs, some_experience()) for _ in range(8)]
    costs.begin_round(8)
    assert not rows[0].should_exit(0.9)  # 0.9 · 0.95 of 0.125 is less than 0.111
    assert rows[1].should_exit(0.99)
    assert costs.tokens == 9
    costs.begin_round(1)
    assert rows[0].should_exit(0.9)


def test_rows_together_try_one_after_the_other_and_seldom():
    """Exits that are too slow are tried again by one row for all, whatever request it is in: the others wait for it."""
    costs, experience = some_costs(exit_=5.0), some_experience()
    costs.begin_round(4)
    costs.saw_pass(4, 1.3)
    asked = []
    for _ in range(5):  # requests
        rows = [DraftBudget(0, costs, experience) for _ in range(4)]
        for size in range(BETWEEN // 2):
            costs.begin_round(4)
            asked.append([place for place, row in enumerate(rows) if row.should_draft(size)])
    tried = [round_ for round_, places in enumerate(asked) if places]
    assert all(len(places) <= 1 for places in asked)
    assert tried == [start + trial for start in (0, BETWEEN, 2 * BETWEEN) for trial in range(TRIAL)]


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


@pytest.fixture
def hurried_threads():
    """Threads that take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def at_once(*tasks) -> None:
    """Run tasks in threads that begin together; raise what one of them raised."""
    begin = threading.Barrier(len(tasks))

    def run(task):
        begin.wait()
        task()

    with ThreadPoolExecutor(len(tasks)) as threads:
        for done in [threads.submit(run, task) for task in tasks]:
            done.result()


def test_threads_that_share_costs_keep_their_own_rounds(hurried_threads):
    shared, experience = Costs(), some_experience()
    shared.exit.add(0.01)

    def decode(rows):
        costs = RoundCosts(shared)
        budget = a_budget(costs, experience)
        for size in range(3000):
            costs.begin_round(rows)
            drafts = 0
            while budget.should_draft(size) and drafts < 5 and budget.should_exit(0.99):
                drafts += 1
            assert (costs.rows, costs.tokens) == (rows, rows + drafts)
            costs.saw_pass(costs.tokens, 1.0 + 0.01 * costs.tokens)
            budget.record_round(size, drafts + 1)

    at_once(lambda: decode(1), lambda: decode(3))


def test_threads_read_captured_rounds_that_others_record(hurried_threads):
    costs = Costs()

    def decode():
        for slots in range(30_000):
            costs.saw_round(slots, 0, 1.0)
            assert costs.captured_round(slots + 1, 0) in (None, 1.0)

    at_once(decode, decode)
