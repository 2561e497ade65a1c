"""After `warm_up` nothing is compiled or captured in a request, and nothing of it shows."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import TIDE
from arrivals import finish
from families import VOCAB, build
from router_files import exits_of
from runners import on_modules, on_references
from TIDE.config import TIDEConfig
from TIDE.engine.runners.graphs import GraphPool, Graphs
from TIDE.engine.schedule.costs import Costs

OPTIONS = dict(max_new_tokens=8, eos_token_id=None, pad_token_id=0)


def with_exits(model, strategy, **settings):
    return TIDE.TIDE(model, exits_of(model, strategy, 0), TIDEConfig(**settings))


@pytest.fixture
def first_times(monkeypatch):
    """Keys of work that was asked for the first time, as it is then run and later captured."""
    found, run = [], Graphs.run

    def noting(self, key, work):
        is_known = run(self, key, work)
        if not is_known:
            found.append(key)
        return is_known

    monkeypatch.setattr(Graphs, "run", noting)
    return found


def prompts(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCAB, (1, 5 + 11 * number), generator=generator) for number in range(count)]


def test_nothing_is_captured_while_kernels_only_compile(monkeypatch):
    """Such a graph would have no kernels: a head would never be fed what it missed."""
    pytest.importorskip("triton")
    captured, slots = [], object()
    monkeypatch.setattr(Graphs, "_capture", lambda self, key, work: captured.append(key))
    pool = GraphPool(torch.device("cpu"))
    pool.of[slots] = Graphs(pool.device)
    pool.of[slots].without = None
    with pool.compiled_ahead(shows=False):
        for _ in range(3):
            assert not pool.launch(slots, "feed", lambda: None)
    assert not captured
    pool.launch(slots, "feed", lambda: None)
    assert not captured  # it has not run before
    pool.launch(slots, "feed", lambda: None)
    assert captured == ["feed"]


@pytest.mark.full
@pytest.mark.parametrize(("place", "strategy"), [(on_references, None), (on_references, "memory"), (on_modules, "lens")])
def test_prompts_of_new_lengths_find_everything_ready(place, strategy, first_times):
    model = build("llama", num_hidden_layers=2)
    with place(with_exits(model, strategy or "lens") if strategy else TIDE.TIDE(model)) as engine:
        engine.warm_up(progress=False)
        assert first_times
        first_times.clear()
        for ids in prompts(20)[::3]:
            assert torch.equal(
                engine.generate(ids, do_sample=False, **OPTIONS), model.generate(ids, do_sample=False, **OPTIONS)
            )
            engine.generate(ids, do_sample=True, temperature=0.7, top_p=0.9, **OPTIONS)
        assert first_times == []


@pytest.mark.full
@pytest.mark.parametrize("new", [40, 900])
def test_long_texts_and_short_ones_find_everything_ready(new, first_times):
    model = build("llama", num_hidden_layers=2, max_position_embeddings=4096)
    with on_references(TIDE.TIDE(model)) as engine:
        engine.warm_up(tokens=2000, progress=False)
        first_times.clear()
        for ids in (prompts(3)[2], prompts(95)[94]):  # they may be long, and end soon
            engine.generate(ids, do_sample=False, max_new_tokens=new, eos_token_id=[*range(VOCAB // 2)], pad_token_id=0)
        assert first_times == []


@pytest.mark.parametrize("exits", [True, False])
def test_a_budget_is_left_for_rows_without_exits(exits):
    model = build("llama", num_hidden_layers=2)
    with on_references(with_exits(model, "memory")) as engine:
        size = engine.runner.make_store(None).block_bytes / 2**30
        config, plan = (dataclasses.replace(own, cache_gib=100 * size) for own in (engine.config, engine.plan))
        engine._settings = engine._settings._replace(config=config, plan=plan)
        engine.warm_up(rows=32, progress=False)
        row = engine.add(prompts(3)[2], exits=exits, do_sample=False, **OPTIONS)
        finish(engine, row)
        assert row.error is None and len(row.new_tokens) == 8


def test_a_device_that_refuses_is_told_and_requests_are_answered(monkeypatch, caplog):
    model = build("llama", num_hidden_layers=2)
    with on_references(TIDE.TIDE(model)) as engine:
        monkeypatch.setattr(engine.runner.graphs, "launch", lambda *given: 1 / 0)
        engine.warm_up(progress=False)
        assert "the warm-up ended early" in caplog.text
        (ids,) = prompts(1)
        assert torch.equal(engine.generate(ids, do_sample=False, **OPTIONS), model.generate(ids, do_sample=False, **OPTIONS))


def test_rows_together_find_everything_ready(first_times, monkeypatch):
    """With every number of drafts that there may be."""
    monkeypatch.setattr(Costs, "captured_round", lambda self, slots, drafts: 1.0)  # then more drafts are better
    model = build("llama", num_hidden_layers=2)
    with on_references(with_exits(model, "memory")) as engine:
        engine.warm_up(rows=8, tokens=200, progress=False)
        first_times.clear()
        for count in (8, 3, 1, 5):
            rows = [engine.add(ids, do_sample=False, **OPTIONS) for ids in prompts(count)]
            finish(engine, *rows)
            for ids, row in zip(prompts(count), rows, strict=True):
                assert row.tokens == model.generate(ids, do_sample=False, **OPTIONS)[0].tolist()
        assert first_times == []


def test_in_mode_fast_too(first_times):
    model = build("llama", num_hidden_layers=2)
    with on_references(with_exits(model, "memory", mode="fast", max_pending=3)) as engine:
        engine.warm_up(progress=False)
        first_times.clear()
        engine.generate(prompts(3)[2], do_sample=False, **OPTIONS)
        assert first_times == []


def test_where_there_are_no_rounds_a_text_is_written(caplog, llama):
    with TIDE.TIDE(llama) as engine, caplog.at_level("INFO"):
        engine.warm_up()
    assert "there are no graphs to capture" in caplog.text


def test_a_warm_up_that_is_broken_off_leaves_the_engine_usable(monkeypatch):
    model = build("llama", num_hidden_layers=2)
    with on_references(TIDE.TIDE(model)) as engine:
        run, left = engine.runner.graphs.launch, [20]

        def interrupted(*given):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return run(*given)

        monkeypatch.setattr(engine.runner.graphs, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.warm_up(progress=False)
        (ids,) = prompts(1)
        assert torch.equal(engine.generate(ids, do_sample=False, **OPTIONS), model.generate(ids, do_sample=False, **OPTIONS))


@pytest.mark.parametrize("wrong", [dict(rows=0), dict(tokens=-1), dict(rows=1.5)])
def test_wrong_numbers_are_named(wrong, llama):
    ((name, value),) = wrong.items()
    with TIDE.TIDE(llama) as engine, pytest.raises(ValueError, match=f"{name} must be a whole number from 1 on, found {value}"):
        engine.warm_up(**wrong)
