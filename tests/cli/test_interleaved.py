"""Contenders of the demo are timed by turns, and no disturbance of one of them becomes a ratio."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from TIDE.cli import interleaved as timing
from TIDE.disturbance import Load

TITLES = {"generate": "model.generate", "exact": "TIDE"}
SECONDS = {"generate": 1.0, "exact": 0.4}  # of a run of eight tokens when the machine is quiet
BUSY = (0.9, 8.0)  # CPUs that other programs use, and by how much they slow a run


class Machine:
    """A machine with a clock of its own, on which another program runs during some of the runs."""

    def __init__(self, monkeypatch, disturbed, texts=()):
        self.texts = dict(texts)
        self.now, self.others, self.ran, self.said, self.disturbed = 0.0, 0.0, [], "", disturbed
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(timing, "moment", lambda: None)
        monkeypatch.setattr(timing, "since", lambda before: Load(2, 1.0, 1.0, self.others, self.others))

    def run(self, name):
        self.others, slower = self.disturbed.get((name, self.ran.count(name)), (0.0, 1.0))
        self.ran.append(name)
        self.now += SECONDS[name] * slower
        text = self.texts.get((name, self.ran.count(name)), "a text")
        return SimpleNamespace(shape=(1, 10), tolist=lambda: text)  # prompt and answer

    def rounds(self, count=3):
        runs = {name: lambda name=name: self.run(name) for name in SECONDS}
        return timing.interleaved(runs, 2, count, TITLES, self.say)

    def say(self, text, nl=True):
        self.said += text + "\n" * nl


def test_every_round_begins_with_another_contender(monkeypatch):
    machine = Machine(monkeypatch, {})
    found = machine.rounds()
    assert machine.ran == ["generate", "exact", "exact", "generate", "generate", "exact"]
    assert found.speeds("generate") == pytest.approx([8.0] * 3) and found.ratio("exact", "generate") == pytest.approx(2.5)
    assert found.notices(TITLES) == []
    assert machine.said.splitlines()[1] == "round 2 of 3: TIDE 20.0 tok/s; model.generate 8.0 tok/s; undisturbed"


def test_a_disturbed_round_is_repeated_and_does_not_count(monkeypatch):
    machine = Machine(monkeypatch, {("exact", 1): BUSY})
    found = machine.rounds()
    assert len(found.timed) == 4 and found.speeds("exact") == pytest.approx([20.0] * 3)
    assert found.notices(TITLES) == [] and "a disturbed round again" in machine.said


def test_a_machine_that_stays_busy_is_not_waited_for_forever(monkeypatch):
    machine = Machine(monkeypatch, {(name, turn): BUSY for name in SECONDS for turn in range(99)})
    found = machine.rounds()
    assert len(found.timed) == 3 + timing.MOST_REPEATS and len(found.kept) == 3
    assert found.ratio("exact", "generate") == pytest.approx(2.5), "all were disturbed alike"
    assert found.notices(TITLES)[:2] == [f"round 1, {title}: other programs used 0.9 of 2 CPUs" for title in TITLES.values()]


def test_slow_rounds_are_not_repeated(monkeypatch):
    slow = {(name, turn): (0.9, 60.0) for name in SECONDS for turn in range(99)}
    assert len(Machine(monkeypatch, slow).rounds().timed) == 3


@pytest.mark.parametrize("others", [0.9, 0.0], ids=["seen", "not seen"])
def test_a_contender_that_is_disturbed_alone_gives_no_ratio(monkeypatch, others):
    machine = Machine(monkeypatch, {("exact", turn): (others, 8.0) for turn in range(1, 99)})
    found = machine.rounds(2)
    assert found.ratio("exact", "generate") == pytest.approx(2.5), "of the one round in which none was disturbed"
    assert "round 2 gives no ratio: its contenders were not disturbed alike" in found.notices(TITLES)
    reason = "other programs used 0.9 of 2 CPUs" if others else "it ran at 12% of its best speed, for an unknown reason"
    assert f"round 2, TIDE: {reason}" in found.notices(TITLES)


def test_without_a_round_that_can_be_compared_there_is_no_ratio(monkeypatch):
    machine = Machine(monkeypatch, {("exact", turn): BUSY for turn in range(99)})
    assert machine.rounds().ratio("exact", "generate") is None


def test_a_text_that_differs_in_one_round_is_not_the_same(monkeypatch):
    assert Machine(monkeypatch, {}).rounds().is_same("exact", "generate")
    other = {("exact", 2): "another text"}
    assert not Machine(monkeypatch, {}, other).rounds().is_same("exact", "generate")
