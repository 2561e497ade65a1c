"""Drafting: what rounds take and what is accepted decides, on the host and in rounds that are launched as a whole."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planners import a_planner, a_round, a_row, an_experience, drafts_of, in_rounds, over, record, some_costs
from TIDE.engine.cache.slots import MOST_ROUND
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import RoundResult
from TIDE.engine.schedule.acceptance import FIRST_REST, Experience
from TIDE.engine.schedule.costs import LATELY, Costs
from TIDE.engine.schedule.draft_planner import EVERY, LOOKS, TRIALS, lengths_on
from TIDE.kernels.reference.trees import tree_shape

# ---- rounds on the host ------------------------------------------------------------------------------------------------------


def test_no_exit_runs_before_a_full_step_was_timed():
    planner, row = a_planner(Experience()), a_row()
    planner.begin_round([row])
    assert not planner.should_draft(row)
    planner.costs.step.add(1.0)
    planner.begin_round([row])
    assert planner.should_draft(row)


def test_a_token_becomes_a_draft_if_it_is_likely_to_save_more_than_its_place_costs():
    planner, row = a_planner(), a_row()
    planner.begin_round([row])
    assert not planner.should_exit(row, 0.1)  # less than 0.1 steps and some per cent
    for score, is_draft in ((0.5, True), (0.19, False), (0.9, True), (0.9, True), (0.99, False)):
        drafted = len(row.drafts)
        drafts_of(planner, row, score, most=drafted + 1)
        assert (len(row.drafts) > drafted) == is_draft, score  # the fifth place costs a whole step


def test_exits_run_while_what_they_usually_bring_pays_for_exit_and_place():
    planner, row = a_planner(an_experience(exit_=0.3)), a_row()
    planner.known.gains[:] = [0.4] * len(planner.known.gains)
    planner.begin_round([row])
    assert drafts_of(planner, row, 0.5) == 1  # 0.5 · 0.4 of a step is less than 0.3
    over(planner, row, accepted=1)
    planner.begin_round([row])
    assert planner.should_draft(row)


def test_a_row_that_loses_rests_longer_each_time_and_tries_again():
    """Confident drafts that never stand: the scores say it pays, the share that is accepted does not."""
    planner, row = a_planner(), a_row()
    ran = [number for number in range(4000) if a_round(planner, row, 0.9, 0)[0]]
    rests = [after - before - 1 for before, after in pairwise(ran) if after - before > 2 * EVERY]
    assert len(rests) > 6 and rests == sorted(rests)
    assert rests[0] < 2 * FIRST_REST and rests[-1] in range(LATELY - 2 * EVERY, LATELY)


def test_drafting_can_lose_little_in_a_text():
    planner, row = a_planner(), a_row()
    spent = [a_round(planner, row, 0.9, 0) for _ in range(1000)]
    assert sum(0.1 * (exits + drafts) for exits, drafts in spent) / 1000 < 0.03


def test_a_row_that_wins_does_not_rest():
    planner, row = a_planner(), a_row()
    assert all(a_round(planner, row, 0.9, 9)[1] for _ in range(100))


def test_bad_rounds_among_good_ones_are_no_reason_to_rest():
    planner, row = a_planner(), a_row()
    for _ in range(50):
        assert a_round(planner, row, 0.9, 1, most=1)[1]
        assert a_round(planner, row, 0.9, 0, most=1)[1]


def test_a_row_that_wins_after_rests_drafts_as_ever():
    planner, row = a_planner(), a_row()
    for _ in range(500):
        a_round(planner, row, 0.9, 0)
    drafted = [a_round(planner, row, 0.9, 9)[1] for _ in range(LATELY + 20)]
    assert min(drafted[-10:]) >= 2


def test_exits_that_never_pay_run_a_few_times_in_a_text_only():
    """A router that is never confident."""
    experience, exits = an_experience(), 0
    for _ in range(10):
        planner, row = a_planner(experience), a_row()
        for _ in range(128):
            ran, drafts = a_round(planner, row, 0.0, 0)
            exits += ran
            assert not drafts
    assert 0 < exits * 0.1 < 0.01 * 1280  # of the time
    planner, row = a_planner(experience), a_row()
    drafted = sum(a_round(planner, row, 0.9, 9)[1] for _ in range(128))
    assert drafted > 128


def test_no_more_drafts_are_made_than_were_ever_accepted_and_one():
    planner, row = a_planner(an_experience(longest=0, passes=[1.0 + number / 1000 for number in range(9)])), a_row()
    for accepted in (0, 1, 2, 2):
        longest = planner.known.longest
        assert a_round(planner, row, 0.999, accepted)[1] == longest + 1
        assert planner.known.longest == accepted


def test_sure_scores_that_are_always_wrong_cost_little():
    """Routers that were trained on another question: every draft is made, none is ever accepted."""
    experience, lost = an_experience(longest=0), 0.0
    for _ in range(4):
        planner, row = a_planner(experience), a_row()
        for _ in range(128):
            lost += 0.1 * sum(a_round(planner, row, 0.999, 0))  # exits and places
    assert 0 < lost / (4 * 128) < 0.02


@pytest.mark.parametrize(("good", "bad"), [(1, 2), (2, 5), (4, 10), (20, 80)])
def test_scores_that_are_modest_where_drafts_stand_and_sure_where_they_fall_cost_little(good, bad):
    """What scores promise was too little so often that the share of accepted drafts says nothing against the next ones."""
    planner, row, steps, tokens = a_planner(), a_row(), 0.0, 0
    while tokens < 2000:
        for score, accepted in [(0.5, 1)] * good + [(0.99, 0)] * bad:
            exits, drafts = a_round(planner, row, score, accepted, most=5)
            steps, tokens = steps + 1 + 0.1 * (exits + drafts), tokens + 1 + min(accepted, drafts)
    assert tokens / steps > 0.96


def test_with_a_threshold_scores_decide_and_rows_that_lose_still_rest():
    planner, row = a_planner(weighs=False), a_row()
    planner.begin_round([row])
    assert planner.should_draft(row)
    assert not planner.should_exit(row, 0.69, 0.7)
    assert planner.should_exit(row, 0.7, 0.7)
    planner.costs.exit.mean = 5.0  # steps
    planner.begin_round([row])
    assert not planner.should_draft(row)
    assert any(planner.begin_round([row]) or planner.should_draft(row) for _ in range(FIRST_REST))


def test_a_threshold_that_lets_nothing_out_makes_rows_rest():
    planner, row, exits = a_planner(weighs=False), a_row(), 0
    for _ in range(500):
        planner.begin_round([row])
        exits += drafts_of(planner, row, 0.9, threshold=0.95)
        over(planner, row, 0)
    assert exits < 40


def test_exits_that_seemed_too_slow_run_again_after_a_rest():
    """The first time an exit runs may be its slowest; that must not stand for ever."""
    planner, row = a_planner(an_experience(exit_=5.0)), a_row()
    ran = [number for number in range(2 * FIRST_REST) if planner.begin_round([row]) or planner.should_draft(row)]
    assert ran == list(range(FIRST_REST - 1, FIRST_REST - 2 + EVERY))
    planner.costs.exit.add(0.1)
    planner.begin_round([row])
    assert planner.should_draft(row)


def test_a_busy_moment_is_not_held_against_drafts_for_good():
    """The first pass with a draft took four steps. Later ones would take 1.1, and texts are short: 64 tokens each."""
    experience, slow, drafted = Experience(), [4.0], []
    for _ in range(4):
        planner, row, size, made = a_planner(experience), a_row(), 0, 0
        while size < 64:
            planner.begin_round([row])
            if drafts_of(planner, row, 0.9):
                planner.costs.exit.add(0.1)
            drafts = len(row.drafts)
            planner.costs.saw_pass(1 + drafts, slow.pop() if slow and drafts else 1.0 + 0.1 * drafts)
            over(planner, row, drafts)
            size, made = size + 1 + drafts, made + drafts
        drafted.append(made)
    assert not slow and min(drafted[1:]) > 25


def test_scores_that_turn_out_too_high_are_corrected_by_number_in_the_round():
    """Scores of 0.9 of which the second draft never stands: it is soon no longer made."""
    planner, row = a_planner(), a_row()
    for _ in range(60):
        drafted = a_round(planner, row, 0.9, 1)[1]
    assert planner.texts[row].share(0) > 0.95
    assert planner.texts[row].share(1) < 0.2
    assert drafted == 1


def test_later_drafts_that_did_not_pay_are_tried_again():
    """After texts in which no second draft stands come others."""
    planner, row = a_planner(), a_row()
    for _ in range(200):
        a_round(planner, row, 0.9, 1)
    planner = a_planner(planner.experience)
    row, drafted = a_row(), []
    for _ in range(300):
        drafted.append(a_round(planner, row, 0.95, 9)[1])
    assert min(drafted[-20:]) >= 2


def test_rows_together_draft_only_where_a_place_costs_less_than_their_part_of_a_step():
    """A token of eight is worth an eighth of their step, 1.8 seconds, and a place costs a ninth of it."""
    planner, rows = a_planner(an_experience(exit_=0.01, passes=(1.0,))), [a_row() for _ in range(8)]
    planner.costs.begin_round(8)
    planner.costs.saw_pass(8, 1.8)
    planner.costs.saw_pass(16, 3.4)
    planner.begin_round(rows)
    assert not planner.should_exit(rows[0], 0.9)  # 0.9 of 0.125 is less than 0.111 and some per cent
    assert planner.should_exit(rows[1], 0.99)
    assert planner.costs.tokens == 9
    planner.begin_round(rows[:1])
    assert planner.should_exit(rows[0], 0.9)


def test_rows_together_try_one_for_all_and_seldom():
    """Exits that are too slow run again in one row, whatever request it is in: the others wait for it."""
    experience = an_experience(exit_=5.0)
    costs = some_costs(costs=experience.costs, exit_=5.0)
    costs.begin_round(4)
    costs.saw_pass(4, 1.3)
    ran = []
    for _ in range(100):  # requests
        planner, rows = a_planner(experience), [a_row() for _ in range(4)]
        for _ in range(64):
            planner.begin_round(rows)
            ran.append(sum(planner.should_draft(row) for row in rows))
    assert sum(ran) > 0 and max(ran) == 1
    assert sum(ran) * 5.0 / 1.3 < 1.1 * TRIALS * len(ran)


# ---- rounds that are launched as a whole -------------------------------------------------------------------------------------


def lengths_after(accepted, seconds, rounds=60):
    experience = Experience()
    planner, row = a_planner(experience), a_row()
    for _ in range(rounds):
        drafts = in_rounds(planner, [row])
        record(planner, row, drafts, accepted, seconds(drafts))

    def with_most(most):
        planner.plan.most_drafts = most
        return in_rounds(planner, [row])

    return with_most, experience


def test_the_length_goes_by_what_stands_and_what_it_takes():
    def a_tenth(drafts):
        return 1 + drafts / 10

    assert lengths_after(7, a_tenth)[0](7) == 7
    assert lengths_after(7, a_tenth)[0](4) == 4
    assert lengths_after(2, a_tenth)[0](7) == 2
    assert lengths_after(7, lambda drafts: 1 + 2 * drafts)[0](7) == 0


@pytest.mark.parametrize("most", range(1, 8))
def test_whatever_is_allowed_is_used(most):
    """As many drafts as `max_pending` allows, also where rounds usually have another number of them."""
    planner, row = a_planner(Experience(), most=most), a_row()
    for _ in range(60):
        drafts = in_rounds(planner, [row])
        record(planner, row, drafts, 7, 1 + drafts / 10)
    assert in_rounds(planner, [row]) == most


@given(st.integers(1, MOST_ROUND), st.integers(0, 7))
def test_rounds_have_room_for_their_drafts(slots, most):
    lengths = lengths_on(slots, most)
    assert lengths[0] == 0 and max(lengths) <= most and (max(lengths) + 1) * slots <= MOST_ROUND


def test_drafts_that_never_stand_are_tried_ever_more_rarely():
    _, experience = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    planner, row = a_planner(experience), a_row()
    tried = [number for number in range(4 * LATELY) if in_rounds(planner, [row])]
    assert tried[0] < FIRST_REST
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps) and max(gaps) == LATELY


def test_trials_of_many_rows_cost_a_hundredth_of_the_time_from_one_batch_to_the_next():
    """A round with one draft takes 1.7 times a step, and none is accepted."""
    experience, spent = Experience(), {0: 0.0, 1: 0.0}
    for batch in range(40):
        planner, rows = a_planner(experience), [a_row() for _ in range(64)]
        for _ in range(128):
            drafts = in_rounds(planner, rows, 64)
            seconds, round_ = 1.0 + 0.7 * drafts, Launched(list, drafts, rows=64)
            for row in rows:
                record(planner, row, drafts, 0, seconds, [0.4] * drafts, round_=round_)
            if batch:  # the first one learns
                spent[drafts] += seconds
    assert 0 < spent[1] * 0.7 / 1.7 < 0.011 * sum(spent.values())


def test_rounds_of_many_rows_are_timed_once_they_run_as_ever():
    """The device waits in the first two rounds with another number of drafts."""
    planner, row, timed = a_planner(Experience()), a_row(), []
    for drafts, seconds in ((0, 1.3), (0, 1.3), (0, 1.0), (1, 1.5), (1, 1.5), (1, 1.2)):
        record(planner, row, drafts, 0, seconds, [0.4] * drafts, slots=64)
        timed.append({number: round_.seconds for number, round_ in planner.known.costs.rounds(64).items()})
    assert timed == [{}, {}, {0: 1.0}, {0: 1.0}, {0: 1.0}, {0: 1.0, 1: 1.2}]


def test_many_rows_draft_again_once_a_trial_shows_that_it_pays():
    planner, rows = a_planner(Experience()), [a_row() for _ in range(64)]
    for number in range(2000):
        accepted = int(number > 400)
        drafts = in_rounds(planner, rows, 64)
        round_ = Launched(list, drafts, rows=64)
        for row in rows:
            record(planner, row, drafts, accepted, 1.0 + 0.3 * drafts, [0.1 + 0.8 * accepted] * drafts, round_=round_)
        if number == 400:
            assert not drafts
    assert drafts == 1


def test_the_last_rows_of_a_batch_do_not_speak_for_the_next_batch():
    """They are the ones in which drafts were rejected."""
    planner, rows = a_planner(Experience()), [a_row() for _ in range(8)]

    def round_of(some, score):
        drafts = max(1, in_rounds(planner, some, 8))
        for row in some:
            record(planner, row, drafts, 0, 1.0, [score], slots=8)

    for _ in range(20):
        round_of(rows, 0.9)
    for _ in range(20):
        round_of(rows[-1:], 0.1)
    last, after = planner.texts[rows[-1]], a_row()
    in_rounds(planner, [after], 8)
    assert planner.texts[after].scores[0] > 0.7 > 0.5 > last.scores[0]


@pytest.mark.parametrize(("rows", "slow", "drafts"), [(8, 1, 1), (9, 1, 3), (9, 2, 1), (64, 8, 1), (64, 7, 3)])
def test_drafts_of_many_rows_are_those_of_the_slowest_eighth(rows, slow, drafts):
    """They are waited for: of eight rows one, of nine one more is needed to be heard."""
    planner, texts = a_planner(Experience(), most=3), [a_row() for _ in range(rows)]
    for number in range(4):
        planner.known.costs.saw_round(64, number, 1 + number / 10)
    in_rounds(planner, texts, 64)
    for text in texts:
        planner.texts[text].scores = [1.0] * 16
    for text in texts[:slow]:
        planner.texts[text].scores = [0.4, *[0.0] * 15]
    assert [in_rounds(planner, texts, 64) for _ in range(EVERY)][-1] == drafts


def a_round_of(planner, rows, results):
    """Eight slots, three drafts of each row."""
    in_rounds(planner, rows, 8)
    round_ = Launched(list, 3, rows=8)
    for row, result in zip(rows, results, strict=True):
        planner.saw(row, result, round_, 1.0)


def test_a_text_of_many_in_which_scores_promise_too_much_is_trusted_less():
    """Of eight rows one has every second draft rejected, whatever its score."""
    planner, texts = a_planner(Experience()), [a_row() for _ in range(8)]
    hard, easy = (RoundResult([], 3, accepted, scores=[0.9] * 3, made=3) for accepted in (1, 3))
    for _ in range(12):
        a_round_of(planner, texts, [hard, *[easy] * 7])
    assert planner.tokens(texts[:1], 3)[3] < 2.3
    assert planner.tokens(texts[1:2], 3)[3] > 3.2


def test_trees_have_an_experience_of_their_own():
    """They have no scores: how often a depth was reached says all."""
    planner, row, tree = a_planner(Experience()), a_row(), tree_shape(7)
    for _ in range(60):
        in_rounds(planner, [row])
        record(planner, row, 4, 0, 1.4, [0.9] * 4)
    for seconds in (1.0, 1.2):
        for _ in range(60):
            planner.plan_round([row], 1, tree)
            levels = planner.chosen
            result = RoundResult([], levels, levels, made=levels, levels=[2] * levels)
            planner.saw(row, result, Launched(list, levels, tree=tree), seconds + levels / 10)
    assert levels == tree.levels
    assert in_rounds(planner, [row]) == 0


def test_a_draft_whose_score_is_below_the_threshold_is_none():
    planner, texts = a_planner(Experience()), [a_row() for _ in range(8)]
    for _ in range(16):
        a_round_of(planner, texts, [RoundResult([], made=3), *[RoundResult([], 3, 3, scores=[0.9] * 3, made=3)] * 7])
    assert planner.texts[texts[0]].scores[0] < 0.5 and planner.texts[texts[1]].scores[0] > 0.7


@pytest.mark.parametrize(("second", "drafts"), [(0.6, 1), (0.9, 2)])
def test_many_rows_change_their_drafts_only_for_some_gain(second, drafts):
    """A first draft is always accepted, and the second brings 1.4 % more per second, or 13 %."""
    experience = Experience()
    planner, texts = a_planner(experience, most=2), [a_row() for _ in range(8)]
    for number, seconds in enumerate((1.0, 1.1, 1.41)):
        experience.costs.saw_round(8, number, seconds)
    in_rounds(planner, texts, 8)
    for share in (0.1, second):
        for text in texts:
            planner.texts[text].scores = [1.0, share, *[0.0] * 14]
        chosen = [in_rounds(planner, texts, 8) for _ in range(2 * EVERY)]
        assert chosen[-1] == (1 if share == 0.1 else drafts)
    experience.acceptance.scores[:2] = [1.0, second]
    assert in_rounds(a_planner(experience, most=2), [a_row() for _ in range(8)], 8) == 2, "others are another matter"


def test_a_usual_number_of_drafts_that_no_longer_pays_is_not_kept():
    planner, texts = a_planner(Experience(), most=2), [a_row() for _ in range(8)]
    for number, seconds in enumerate((1.0, 1.2, 1.37)):
        planner.known.costs.saw_round(8, number, seconds)
    in_rounds(planner, texts, 8)
    for first, drafts in ((0.9, 1), (0.21, 2)):
        for text in texts:
            planner.texts[text].scores = [first, 0.0 if first == 0.9 else 1.0, *[0.0] * 14]
        assert [in_rounds(planner, texts, 8) for _ in range(2 * EVERY)][-1] == drafts


def test_the_length_adapts_quickly_to_a_new_text():
    _, experience = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    planner, row, chosen = a_planner(experience), a_row(), []
    for _ in range(3 * FIRST_REST):
        chosen.append(in_rounds(planner, [row]))
        record(planner, row, chosen[-1], chosen[-1], 1 + chosen[-1] / 10)
    assert min(chosen[-FIRST_REST:]) > 2


def test_low_scores_shorten_rounds_before_drafts_are_rejected():
    """The share of drafts that scores promised changes slowly; the scores of the latest rounds count at once."""

    def after(score):
        planner, row = a_planner(Experience()), a_row()
        for _ in range(40):
            drafts = in_rounds(planner, [row])
            record(planner, row, drafts, drafts, 1 + drafts / 10, [0.9] * drafts)
        for _ in range(10):
            record(planner, row, 4, 4, 1.4, [score] * 4)
        return in_rounds(planner, [row])

    assert after(0.9) == 7
    assert after(0.1) < 7


def test_what_a_round_without_drafts_takes_is_looked_at_while_drafts_pay():
    """Otherwise a time from a busy moment would stand for good."""
    planner, row, chosen = a_planner(Experience()), a_row(), []
    for _ in range(3 * LOOKS):
        chosen.append(in_rounds(planner, [row]))
        seconds = 1 + chosen[-1] / 10 if len(chosen) > 2 else 50.0
        record(planner, row, chosen[-1], chosen[-1], seconds, [0.9] * chosen[-1])
    assert chosen[LOOKS // 2 :].count(0) == 2
    assert planner.known.costs.rounds(1)[0].seconds < 50


# ---- threads -----------------------------------------------------------------------------------------------------------------


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


def test_rounds_of_one_planner_do_not_change_those_of_another():
    """Threads share costs and experience; the round at hand is a planner's own."""
    experience = an_experience()
    experience.costs.saw_round(1, 0, 1.0)
    easy, hard = a_planner(experience), a_planner(experience)
    rows = [a_row() for _ in range(3)]
    easy.plan_round(rows[:1], 1)
    chosen = easy.chosen
    hard.begin_round(rows[1:])
    hard.plan_round(rows[1:], 64)
    assert chosen and easy.chosen == chosen and not hard.chosen
    assert easy.costs.rows == 1 and hard.costs.rows == 2
    assert not easy.texts.keys() & hard.texts.keys()


def test_threads_that_share_costs_keep_their_own_rounds(hurried_threads):
    experience = an_experience(exit_=0.01)

    def decode(count):
        planner, rows = a_planner(experience), [a_row() for _ in range(count)]
        for _ in range(3000 // count):
            planner.begin_round(rows)
            for row in rows:
                drafts_of(planner, row, 0.99, most=5)
            drafts = sum(len(row.drafts) for row in rows)
            assert (planner.costs.rows, planner.costs.tokens) == (count, count + drafts)
            planner.costs.saw_pass(planner.costs.tokens, 1.0 + 0.01 * planner.costs.tokens)
            for row in rows:
                over(planner, row, 9)

    at_once(lambda: decode(1), lambda: decode(3))


def test_threads_read_captured_rounds_that_others_record(hurried_threads):
    costs = Costs()

    def decode():
        for slots in range(30_000):
            costs.saw_round(slots, 0, 1.0)
            assert costs.captured_round(slots + 1, 0) in (None, 1.0)

    at_once(decode, decode)
