"""Calibration by the clock: texts and steps that fit into the minutes there are."""

from __future__ import annotations

import logging
import time

import pytest

from TIDE.calibration import timing
from TIDE.calibration.clock import ENOUGH, FEWEST, HEAD_SHARE, MORE_SHARE, TEXTS_SHARE, Clock


@pytest.fixture(autouse=True)
def now(tmp_path, monkeypatch):
    """A clock that stands still until it is moved, and a cache of its own."""
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    moment = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: moment[0])
    return moment


def per_text(seconds: float):
    return lambda: lambda count: seconds * count


def no_head() -> float:
    return 0.0


def test_texts_take_their_share_of_the_time(caplog):
    assert Clock(3, "a").texts(per_text(0.01), no_head, room=10**9) == TEXTS_SHARE * 180 / 0.01
    assert Clock(30, "a").texts(per_text(0.01), no_head, room=10**9) == TEXTS_SHARE * 1800 / 0.01
    assert not caplog.records


def test_no_more_texts_than_there_is_room_for():
    assert Clock(3, "a").texts(per_text(0.01), no_head, room=500) == 500


def test_few_texts_that_take_as_long_as_many_do_not_end_with_few():
    """A GPU writes 20 texts in 25 of 60 seconds, and a hundred more in each second after that."""
    found = Clock(1, "a").texts(lambda: lambda count: 25 + count / 100, no_head, room=10**9)
    assert found == pytest.approx(100 * MORE_SHARE * 60 + FEWEST, abs=1)
    assert Clock(0.7, "a").texts(lambda: lambda count: 25 + count / 100, no_head, room=10**9) == pytest.approx(440, abs=1)


def test_too_few_minutes_are_said_before_it_starts(caplog):
    assert Clock(3, "a").texts(per_text(1.0), no_head, room=10**9) == 72
    said = (
        f"in 3 min there is time for 72 texts on this machine. Exits learn little from fewer than {ENOUGH}, which take about 83"
    )
    assert said in caplog.text and "needs about" not in caplog.text


@pytest.mark.parametrize("is_quick", [False, True])
def test_minutes_that_cannot_be_kept_are_said_with_those_that_it_takes(now, is_quick, caplog):
    """10 s have gone by, twenty texts take 50, and the least head 60, which is its 0.6 of the rest: 160 s."""
    clock = Clock(1, "a", is_quick)
    now[0] = 10.0
    assert clock.texts(per_text(2.5), lambda: 60.0, room=10**9) == FEWEST
    (said,) = [record.getMessage() for record in caplog.records]
    assert "calibration needs about 2.7 min on this machine: 20 texts and one head are the least; asked were 1 min." in said
    assert ("with `quick`" in said) == (not is_quick)


def test_the_plan_and_too_few_minutes_are_said_before_every_start(caplog):
    with caplog.at_level(logging.INFO):
        Clock(3, "a").texts(per_text(1.0), no_head, room=10**9)
        first = [record.getMessage() for record in caplog.records]
        caplog.clear()
        Clock(3, "a").texts(lambda: pytest.fail("measured again"), no_head, room=10**9)
    assert "72 texts: about 72 s of 180" in first and len(first) == 2
    assert [record.getMessage() for record in caplog.records] == first


def test_a_number_of_texts_that_an_older_version_kept_is_used(caplog):
    timing.keep("a|3 minutes|texts", {"count": 50})
    assert Clock(3, "a").texts(lambda: pytest.fail("measured again"), no_head, room=10**9) == 50
    assert not caplog.records


def test_each_head_takes_its_share_of_what_is_left(now):
    clock = Clock(2, "a")
    now[0] = 20.0
    assert clock.steps(0, lambda: 0.1, most=10**9) == HEAD_SHARE * 100 / 0.1
    now[0] = 80.0
    assert clock.steps(4, lambda: 0.1, most=10**9) == HEAD_SHARE * 40 / 0.1
    now[0] = 500.0
    assert clock.steps(8, lambda: 0.1, most=10**9) == 0
    assert Clock(2, "b").steps(0, lambda: 0.1, most=7) == 7


def test_time_that_measuring_a_step_takes_is_not_left_for_steps(now):
    def measured() -> float:
        now[0] += 20
        return 0.1

    assert Clock(2, "a").steps(0, measured, most=10**9) == HEAD_SHARE * 100 / 0.1


def test_the_end_of_time_is_decided_once(now):
    clock = Clock(2, "a")
    assert not clock.is_over(4)
    now[0] = 120.0
    assert clock.is_over(8) and not clock.is_over(4)
    now[0] = 0.0
    assert Clock(2, "a").is_over(8)


def test_a_decision_is_made_once_for_a_model_a_machine_and_settings(now):
    first = Clock(3, "a").texts(per_text(0.01), no_head, room=10**9)
    assert Clock(3, "a").texts(lambda: pytest.fail("measured again"), no_head, room=10**9) == first
    assert Clock(4, "a").texts(per_text(0.02), no_head, room=10**9) != first
    assert Clock(3, "b").texts(per_text(0.02), no_head, room=10**9) != first
