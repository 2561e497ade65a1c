"""The first request of an engine on a GPU, and what it says about graphs; references take the place of kernels."""

from __future__ import annotations

import time

import pytest
import torch

import TIDE
from families import build
from router_files import exits_of
from runners import Recording, on_modules, on_references
from TIDE.engine.runners.graphs import Graphs
from TIDE.engine.schedule.costs import Costs
from TIDE.engine.slots.prefill import Prefill

OPTIONS = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 50), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("place", [on_references, on_modules])
@pytest.mark.parametrize("depth", [None, 0])
def test_nothing_of_a_first_request_runs_twice(place, depth, ids):
    """The runner is checked before its first token, so the prompt runs once and rounds go on from there."""
    model = build("llama")
    policy = None if depth is None else exits_of(model, "memory", depth)
    with place(TIDE.TIDE(model, policy)) as engine:
        engine.scheduler = Recording(then=2)  # not by seconds: the work of both requests is compared
        stream = engine.stream(ids, **OPTIONS)
        assert not engine.runner.is_checked
        first = [next(stream)]
        assert engine.runner.is_checked
        first += stream
        assert engine.scheduler.rounds
        work = engine.last_stats.layers_run
        assert engine.last_stats.cold_starts == 1 and "Waited for kernels" in engine.last_stats.summary()
        assert list(engine.stream(ids, **OPTIONS)) == first
        assert engine.last_stats.cold_starts == 0
        assert work == engine.last_stats.layers_run
    assert first == model.generate(ids, **OPTIONS)[0, 50:].tolist()


def test_seconds_of_captures_are_known_during_a_stream_and_never_lost(ids, monkeypatch):
    def run(self, key, work):
        self.seconds += 1.0
        work()
        return True

    monkeypatch.setattr(Graphs, "run", run)
    with on_references(TIDE.TIDE(build("llama"))) as engine:
        stream = engine.stream(ids, **OPTIONS)
        next(stream)
        next(stream)
        during = engine.capture_seconds
        assert during > 0
        assert engine.without_graphs == "there are none on cpu"
        list(stream)
        after = engine.capture_seconds
        engine.generate(ids.repeat(1, 30), **OPTIONS)  # needs larger slots: the smaller ones are dropped
        assert engine.capture_seconds > after >= during


def test_a_prompt_does_not_count_as_a_slow_round(ids, monkeypatch):
    run, clock, seen, late = Prefill.run, time.perf_counter, [], [0.0]

    def slowly(self, *given):
        late[0] += 1000.0
        return run(self, *given)

    monkeypatch.setattr(Prefill, "run", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(Costs, "saw_round", lambda self, slots, drafts, seconds: seen.append(seconds))
    with on_references(TIDE.TIDE(build("llama"))) as engine:
        engine.generate(ids, **OPTIONS)
        engine.generate(ids, **OPTIONS)
    assert late[0] >= 2000 and len(seen) > 12 and max(seen) < 1000


def test_a_request_without_memory_for_slots_is_decoded_on_the_host_and_others_are_not(ids, monkeypatch, caplog):
    model = build("llama")
    with on_references(TIDE.TIDE(model)) as engine:
        make, asked = engine.runner.make_slots, []

        def without_memory(rows, columns, exit_):
            asked.append(columns)
            if columns > 1024:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return make(rows, columns, exit_)

        monkeypatch.setattr(engine.runner, "make_slots", without_memory)
        stops = model.generate(ids, **OPTIONS)[0, 55].item()
        options = {**OPTIONS, "max_new_tokens": 3000, "eos_token_id": stops, "pad_token_id": 0}
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))
        assert "there is no memory for 1 rows" in caplog.text
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert asked == [2048, 1024, 1024] and engine.runner.why_not(engine.last_rows[0]) is None
