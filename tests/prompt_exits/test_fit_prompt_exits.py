"""Exits in the prompt, fitted: maps in closed form, effects on what follows, a router, and a threshold that was measured."""

from __future__ import annotations

import json

import pytest
import torch

import TIDE
from families import build
from router_files import made
from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.calibration.collect import Collection, laid_out
from TIDE.calibration.fit import Split
from TIDE.calibration.text import Text
from TIDE.engine.host.segments import Segments
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.prompt_exits.effects import StoppedTexts
from TIDE.prompt_exits.fit import MOST_RISE, fit_prompt_exit, is_harmless
from TIDE.prompt_exits.maps import FittedPromptExit, PromptExit, StateMap
from TIDE.prompt_exits.moments import Moments, fit_maps
from TIDE.prompt_exits.prefill import PromptExitPass
from TIDE.routing.router_file import RouterFile

DEPTH, LAYERS = 2, 4


def some_ids(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def collection(ids: torch.Tensor) -> Collection:
    texts = [Text(own.tolist(), 0, number) for number, own in enumerate(ids)]
    return Collection([laid_out(texts, torch.device("cpu"))])


@pytest.fixture
def adapter(llama):
    own = ModelAdapter(llama)
    yield own
    own.close()


@pytest.fixture
def split():
    return Split(collection(some_ids(16, 40)), collection(some_ids(8, 40, seed=1)))


def test_a_map_of_low_rank_is_found_again():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 24, generator=generator) + 0.5
    down, up = torch.randn(4, 24, generator=generator), torch.randn(24, 4, generator=generator)
    deeper = x + x @ down.T @ up.T + 3.0
    moments = Moments(24, torch.device("cpu"))
    for part in (slice(0, 200), slice(200, 500)):
        moments.add(x[part], {3: deeper[part]})
    own, left = moments.fit(3, rank=4)
    assert left < 1e-3
    torch.testing.assert_close(own(x), deeper, atol=0.1, rtol=0.05)
    _, poorer = moments.fit(3, rank=2)
    assert poorer > 10 * left


@torch.no_grad()
def test_maps_are_nearer_to_the_states_than_plain_propagation(adapter, split):
    maps, left = fit_maps(adapter, split.train, DEPTH)
    assert sorted(maps) == [3, 4] and all(0 <= share < 1 for share in left)
    ids = some_ids(4, 40, seed=7)
    positions = torch.arange(40).expand(4, -1)
    passed = adapter.run(0, LAYERS, PassInputs(ids, positions, None, None), taps=(DEPTH, 3))
    states = passed.taps | {LAYERS: passed.states}
    for depth, own in maps.items():
        x, y = states[DEPTH][:, 1:], states[depth][:, 1:]
        assert (own(x) - y).norm() < 0.9 * (x - y).norm()


class Forced(PromptExit):
    """Odd tokens stop."""

    depth = DEPTH

    def stops(self, states, positions):
        return torch.tensor([position % 2 == 1 for position in positions])

    def predict(self, depth, states):
        return states * (1 + 0.1 * (depth - DEPTH))


@torch.no_grad()
def test_what_calibration_measures_is_what_the_engine_does(adapter):
    """Settled in part by shares of 0 and 1, in a pass of all tokens; and by the engine's gathered prefill."""
    ids, exit_ = some_ids(1, 40), Forced()
    texts = StoppedTexts(adapter, ids, [40], DEPTH)
    shares = torch.tensor([[float(position % 2 == 1) for position in range(texts.prompt - 1)]])
    found = texts.followed(texts.predicted(exit_.predict), shares)
    adapter.close()
    with TIDE.TIDE(adapter.model) as engine:
        row = Row(ids[0].tolist(), StopRule(), LAYERS)
        row.prompt = texts.prompt
        segments = Segments(engine.runner, [range(LAYERS)], [row], 40, prompt_pass=PromptExitPass(exit_, None))
        segments.run_prompts({row: texts.prompt})
        segments.run(0, {row: 0})
        logits = segments.run(0, {row: 39 - texts.prompt}, {row: texts.prompt})[row]
        expected = -logits.log_softmax(-1).gather(1, ids[0, texts.prompt + 1 :, None]).sum()
        first = Row(ids[0, : texts.prompt].tolist(), StopRule(), LAYERS)
        again = Segments(engine.runner, [range(LAYERS)], [first], 40, prompt_pass=PromptExitPass(exit_, None))
        own = again.run_prompts({first: texts.prompt}, {first: texts.prompt - 1})[first]
        expected += -own.log_softmax(-1)[0, ids[0, texts.prompt]]
    assert row.stats.settled_tokens == int(shares.sum())
    torch.testing.assert_close(found.loss[0], expected, atol=1e-3, rtol=1e-4)
    assert found.tokens.tolist() == [20] and float(found.divergence) > 1e-4


def test_effects_of_small_errors_add_up_to_the_divergence(adapter):
    """The divergence is quadratic in small errors of K/V."""
    ids = some_ids(3, 40)
    texts = StoppedTexts(adapter, ids, [40] * 3, DEPTH)
    passed = adapter.run(0, LAYERS, PassInputs(ids, texts.positions, None, None), taps=(DEPTH, 3))
    noise = 0.01 * torch.randn(passed.taps[3].shape, generator=torch.Generator().manual_seed(0))

    def predict(depth, states):
        return (passed.taps[depth] * (1 + noise)).flatten(0, 1)

    generator = torch.Generator().manual_seed(0)
    states, effects = texts.effects(predict, generator)
    chosen = torch.rand(3, 19, generator=torch.Generator().manual_seed(0)) < 0.5
    chosen[:, 0] = False
    assert len(states) == len(effects) == int(chosen.sum())
    found = texts.followed(texts.predicted(predict), chosen.float())
    torch.testing.assert_close(effects.sum(), (found.divergence / found.tokens).sum(), rtol=0.1, atol=1e-6)
    assert all(weight.requires_grad for weight in adapter.model.parameters()), "as it was"


def test_the_smallest_effects_are_harmless():
    assert is_harmless(torch.tensor([5.0, 0.1, -2.0, 0.4, 4.5])).tolist() == [False, True, True, True, False]


def test_all_of_it_is_fitted_measured_and_saved(adapter, split, tmp_path):
    fitted = fit_prompt_exit(adapter, split, 16, seed=0)
    again = fit_prompt_exit(adapter, split, 16, seed=0)
    assert json.dumps(fitted.describe()) == json.dumps(again.describe())
    curve = fitted.figures["curve"]
    assert {point["kind"] for point in curve} == {"map", "plain"}
    chosen = [point for point in curve if point["rise"] <= MOST_RISE]
    assert fitted.threshold == max(chosen, key=lambda point: point["share"])["threshold"]
    file = made("identity", adapter.model)
    file.prompt_exit = fitted
    file.save(tmp_path / "router.safetensors")
    read = RouterFile.load(tmp_path / "router.safetensors")
    states = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(read.prompt_exit.scores(states), fitted.scores(states))
    for depth in fitted.maps:
        torch.testing.assert_close(read.prompt_exit.predict(depth, states.bfloat16()), fitted.predict(depth, states.bfloat16()))
    assert "exits in the prompt" in read.summary()
    adapter.close()
    ids = some_ids(1, 30)
    with TIDE.TIDE(adapter.model, tmp_path / "router.safetensors", TIDE.TIDEConfig(mode="fast", prefill_exits=True)) as engine:
        engine.generate(ids, max_new_tokens=4, do_sample=False)
        assert engine.last_stats.settled_tokens == int(
            engine.plan.prompt_pass.exit.stops(_at(engine, ids), torch.arange(29)).sum()
        )


@torch.no_grad()
def _at(engine, ids):
    positions = torch.arange(ids.shape[1])[None]
    inputs = PassInputs(ids, positions, None, None)
    return engine.adapter.run(0, engine.plan.prompt_pass.depth, inputs).states[0, :-1]


def test_a_threshold_that_costs_too_much_is_not_chosen(adapter, split, monkeypatch, caplog):
    monkeypatch.setattr("TIDE.prompt_exits.fit.MOST_RISE", -1.0)
    fitted = fit_prompt_exit(adapter, split, 16, seed=0)
    assert fitted.threshold is None and "no token will settle" in caplog.text
    assert not fitted.stops(torch.randn(3, 64), torch.arange(3)).any()


def test_layers_that_share_kv_are_refused(split):
    other = ModelAdapter(build("gemma4-shared"))
    with pytest.raises(ValueError, match="Calibrate without prefill_exits"):
        fit_prompt_exit(other, split, 16, seed=0)
    other.close()


def test_damaged_maps_are_named(tmp_path):
    file = made("identity")
    generator = torch.Generator().manual_seed(0)
    maps = {depth: StateMap(*(torch.randn(s, generator=generator) for s in ((8, 64), (64, 8), (64,)))) for depth in (3, 4)}
    from TIDE.routing.router import Router

    file.prompt_exit = FittedPromptExit(DEPTH, Router(64, 8, 1), maps, 0.5)
    file.save(tmp_path / "router.pt")
    assert RouterFile.load(tmp_path / "router.pt").prompt_exit.describe()["ranks"] == {3: 8, 4: 8}
    del file.prompt_exit.maps[3]
    with pytest.raises(ValueError, match="expected maps of prompts to every depth behind 2"):
        file.save(tmp_path / "other.pt")
    file.prompt_exit = None
    file.save(tmp_path / "none.pt")
    assert RouterFile.load(tmp_path / "none.pt").prompt_exit is None
