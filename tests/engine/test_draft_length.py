"""How many drafts a round makes follows from what was accepted and what rounds took."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from TIDE.engine.cache.slots import MOST_ROUND
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import RoundResult, Row
from TIDE.engine.rows.stop import StopRule
from TIDE.engine.schedule.acceptance import FIRST_REST, LONGEST_REST
from TIDE.engine.schedule.costs import Costs
from TIDE.engine.schedule.draft_length import DraftLength, lengths_on


def a_text(length):
    row = Row([1, 2], StopRule(), 4)
    length.begin(row)
    return row


def record(length, row, drafts, accepted, seconds):
    length.saw(row, Launched(list, drafts), RoundResult([], drafts, min(drafts, accepted), made=drafts), seconds)


def lengths_after(accepted, seconds, rounds=60):
    length = DraftLength(Costs())
    row = a_text(length)
    for _ in range(rounds):
        drafts = length.choose([row], 7)
        record(length, row, drafts, accepted, seconds(drafts))
    return lambda most: length.choose([row], most), length


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
    length = DraftLength(Costs())
    row = a_text(length)
    for _ in range(60):
        drafts = length.choose([row], most)
        record(length, row, drafts, 7, 1 + drafts / 10)
    assert length.choose([row], most) == most


@given(st.integers(1, MOST_ROUND), st.integers(0, 7))
def test_rounds_have_room_for_their_drafts(slots, most):
    lengths = lengths_on(slots, most)
    assert lengths[0] == 0 and max(lengths) <= most and (max(lengths) + 1) * slots <= MOST_ROUND


def test_drafts_that_never_stand_are_tried_ever_more_rarely():
    _, length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    row = a_text(length)
    tried = [number for number in range(4 * LONGEST_REST) if length.choose([row], 7)]
    assert tried[0] < FIRST_REST
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps) and max(gaps) == LONGEST_REST


def test_trials_of_many_rows_cost_a_hundredth_of_the_time_from_one_batch_to_the_next():
    """A round with one draft takes 1.7 times a step, and none is accepted."""
    length, spent = DraftLength(Costs()), {0: 0.0, 1: 0.0}
    for batch in range(40):
        rows = [a_text(length) for _ in range(64)]
        for _ in range(128):
            drafts = length.choose(rows, 7, slots=64)
            seconds = 1.0 + 0.7 * drafts
            for row in rows:
                result = RoundResult([], drafts, 0, scores=[0.4] * drafts, made=drafts)
                length.saw(row, Launched(list, drafts, rows=64), result, seconds)
            if batch:  # the first one learns
                spent[drafts] += seconds
    assert 0 < spent[1] * 0.7 / 1.7 < 0.011 * sum(spent.values())


def test_rounds_of_many_rows_are_timed_once_they_run_as_ever():
    """The device waits in the first two rounds with another number of drafts."""
    costs = Costs()
    length = DraftLength(costs)
    row, timed = a_text(length), []
    for drafts, seconds in ((0, 1.3), (0, 1.3), (0, 1.0), (1, 1.5), (1, 1.5), (1, 1.2)):
        result = RoundResult([], drafts, 0, scores=[0.4] * drafts, made=drafts)
        length.saw(row, Launched(list, drafts, rows=64), result, seconds)
        timed.append({number: own.seconds for number, own in costs.rounds(64).items()})
    assert timed == [{}, {}, {0: 1.0}, {0: 1.0}, {0: 1.0}, {0: 1.0, 1: 1.2}]


def test_many_rows_draft_again_once_a_trial_shows_that_it_pays():
    length, accepted = DraftLength(Costs()), 0
    rows = [a_text(length) for _ in range(64)]
    for number in range(2000):
        accepted = int(number > 400)
        drafts = length.choose(rows, 7, slots=64)
        for row in rows:
            result = RoundResult([], drafts, min(drafts, accepted), scores=[0.1 + 0.8 * accepted] * drafts, made=drafts)
            length.saw(row, Launched(list, drafts, rows=64), result, 1.0 + 0.3 * drafts)
        if number == 400:
            assert not drafts
    assert drafts == 1


def test_the_last_rows_of_a_batch_do_not_speak_for_the_next_batch():
    """They are the ones in which drafts were rejected."""
    length = DraftLength(Costs())
    rows = [a_text(length) for _ in range(8)]

    def a_round(own, score):
        drafts = max(1, length.choose(own, 7, 8))
        for row in own:
            length.saw(row, Launched(list, drafts, rows=8), RoundResult([], drafts, 0, scores=[score], made=drafts), 1.0)

    for _ in range(20):
        a_round(rows, 0.9)
    for _ in range(20):
        a_round(rows[-1:], 0.1)
    assert a_text(length).scores[0] > 0.7 > 0.5 > rows[-1].scores[0]


@pytest.mark.parametrize(("rows", "slow", "drafts"), [(8, 1, 1), (9, 1, 3), (9, 2, 1), (64, 8, 1), (64, 7, 3)])
def test_drafts_of_many_rows_are_those_of_the_slowest_eighth(rows, slow, drafts):
    """They are waited for: of eight rows one, of nine one more is needed to be heard."""
    length = DraftLength(Costs())
    texts = [a_text(length) for _ in range(rows)]
    for number in range(4):
        length.costs.saw_round(64, number, 1 + number / 10)
    for text in texts:
        text.scores = [1.0] * 7
    for text in texts[:slow]:
        text.scores = [0.4, *[0.0] * 6]
    assert [length.choose(texts, 3, 64) for _ in range(4)][-1] == drafts


def a_round_of(length, rows, results):
    """Eight slots, three drafts of each row."""
    length.choose(rows, 3, 8)
    round_ = Launched(list, 3, rows=8)
    for row, result in zip(rows, results, strict=True):
        length.saw(row, round_, result, 1.0)


def test_a_text_of_many_in_which_scores_promise_too_much_is_trusted_less():
    """Of eight rows one has every second draft rejected, whatever its score."""
    length = DraftLength(Costs())
    texts = [a_text(length) for _ in range(8)]
    hard, easy = (RoundResult([], 3, accepted, scores=[0.9] * 3, made=3) for accepted in (1, 3))
    for _ in range(12):
        a_round_of(length, texts, [hard, *[easy] * 7])
    assert length.tokens(texts[:1])[3] < 2.3
    assert length.tokens(texts[1:2])[3] > 3.2


def test_trees_have_no_scores_to_trust():
    """How often a depth was reached says all of them, also of rows that have drafted in a row before."""
    length = DraftLength(Costs(), has_scores=False)
    texts = [a_text(length) for _ in range(2)]
    length.choose(texts, 3, 2)
    before = length.tokens(texts)
    for text in texts:
        text.outcome = [4.0, 16.0]
    assert length.tokens(texts) == before


def test_a_draft_whose_score_is_below_the_threshold_is_none():
    length = DraftLength(Costs())
    texts = [a_text(length) for _ in range(8)]
    for _ in range(12):
        a_round_of(length, texts, [RoundResult([], made=3), *[RoundResult([], 3, 3, scores=[0.9] * 3, made=3)] * 7])
    assert texts[0].scores[0] < 0.5 and texts[1].scores[0] > 0.7


@pytest.mark.parametrize(("second", "drafts"), [(0.6, 1), (0.9, 2)])
def test_many_rows_change_their_drafts_only_for_some_gain(second, drafts):
    """A first draft is always accepted, and the second brings 1.4 % more per second, or 13 %."""
    length = DraftLength(Costs())
    texts = [a_text(length) for _ in range(8)]
    for number, seconds in enumerate((1.0, 1.1, 1.41)):
        length.costs.saw_round(8, number, seconds)
    for share in (0.1, second):
        for text in texts:
            text.scores = [1.0, share, *[0.0] * 5]
        chosen = [length.choose(texts, 2, 8) for _ in range(8)]
        assert chosen[-1] == (1 if share == 0.1 else drafts)
    assert [length.choose([a_text(length) for _ in range(8)], 2, 8) for _ in range(4)][-1] == 2, "others are another matter"


def test_a_usual_number_of_drafts_that_no_longer_pays_is_not_kept():
    length = DraftLength(Costs())
    texts = [a_text(length) for _ in range(8)]
    for number, seconds in enumerate((1.0, 1.2, 1.37)):
        length.costs.saw_round(8, number, seconds)
    for first, drafts in ((0.9, 1), (0.21, 2)):
        for text in texts:
            text.scores = [first, 0.0 if first == 0.9 else 1.0, *[0.0] * 5]
        assert [length.choose(texts, 2, 8) for _ in range(8)][-1] == drafts


def test_draft_length_adapts_quickly_to_a_new_prompt():
    _, length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    row, chosen = a_text(length), []
    for _ in range(3 * FIRST_REST):
        chosen.append(length.choose([row], 7))
        record(length, row, chosen[-1], chosen[-1], 1 + chosen[-1] / 10)
    assert min(chosen[-FIRST_REST:]) > 2
