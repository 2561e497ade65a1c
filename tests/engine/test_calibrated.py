"""Exits of a router file in the engine: exact whatever the weights, and fed with what calibration saw."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, KINDS, build
from levels import daily
from policies import texts_of
from router_files import a_file
from TIDE import TIDE, TIDEConfig
from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.heads import memory_depths
from TIDE.routing.memory import HeadMemory
from TIDE.routing.router_file import RouterFile


def saved(file: RouterFile, folder) -> str:
    path = folder / "router.safetensors"
    file.save(path)
    return str(path)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("name", daily(sorted(FAMILIES), KINDS))
def test_exact_mode_writes_the_models_text_with_memory_heads_in_every_family(name, prompts):
    model, (ids, mask) = build(name), prompts
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **options)
    adapter = ModelAdapter(model)
    layers = adapter.num_layers
    policy = CalibratedPolicy(a_file(model, "memory", (0, layers // 2), 0.0), adapter)
    adapter.close()
    with TIDE(model, policy, TIDEConfig(exit_threshold=0.0)) as engine:
        found = engine.generate(ids, **options)
        assert engine.last_stats.drafted > 0
    assert texts_of(found, mask) == texts_of(expected, mask)


@pytest.mark.parametrize("strategy", ["identity", "lens", "memory"])
@pytest.mark.parametrize(
    "config",
    [{}, {"mode": "fast", "exit_threshold": 0.4}, {"mode": "fast", "exit_threshold": 0.4, "kv_cache_strategy": "zero_pad"}],
)
def test_every_strategy_runs_from_its_file_in_every_mode(strategy, config, llama, prompts, tmp_path):
    ids, mask = prompts
    path = saved(a_file(llama, strategy, (1, 2), 0.4, torch.arange(0, 96, 2)), tmp_path)
    options = dict(attention_mask=mask, max_new_tokens=10, do_sample=False, pad_token_id=0)
    expected = llama.generate(ids, **options)
    with TIDE(llama, path, TIDEConfig(**config)) as engine:
        found = engine.generate(ids, **options)
        assert engine.last_stats.drafted > 0
        assert torch.equal(found, engine.generate(ids, **options)), "a second request starts from nothing"
    if not config:
        assert torch.equal(found, expected)


def test_mode_fast_asks_for_nineteen_in_twenty_unless_told_otherwise(llama, tmp_path):
    path = saved(a_file(llama, "lens", (1, 2), 0.3), tmp_path)
    for config, expected in (({}, 0.3), ({"mode": "fast"}, 0.95), ({"mode": "fast", "exit_threshold": 0.5}, 0.5)):
        with TIDE(llama, path, TIDEConfig(**config)) as engine:
            assert engine.plan.threshold(1) == engine.plan.threshold(2) == expected


def test_a_draft_vocabulary_limits_what_exits_say_and_nothing_else(llama, prompts, tmp_path):
    ids, mask = prompts
    allowed = torch.arange(0, 96, 3)
    path = saved(a_file(llama, "memory", (0,), 0.0, allowed), tmp_path)
    with TIDE(llama, path, TIDEConfig(mode="fast", exit_threshold=0.0, max_pending=10**6)) as engine:
        found = engine.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert set(found[:, ids.shape[1] + 1 :].flatten().tolist()) <= set(allowed.tolist())
        sampled = engine.generate(
            ids[2:], max_new_tokens=4, do_sample=True, prefix_allowed_tokens_fn=lambda *_: [1, 2, 4], pad_token_id=0
        )
    assert set(sampled[:, ids.shape[1] :].flatten().tolist()) <= {0, 1, 2, 4}, "even where no token is left to the exit"


@pytest.mark.invariant(6)
@pytest.mark.parametrize("kernels", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("pending", [1, 3])
def test_what_a_router_sees_in_the_engine_is_what_it_saw_in_calibration(
    pending, kernels, llama, prompts, tmp_path, monkeypatch
):
    """The guesses of heads while decoding, against the unrolled ones of training; compiled ones have weights in 8 bits."""
    monkeypatch.setenv("TIDE_BACKEND", "numba" if kernels else "modules")
    ids = prompts[0][2:]
    depth = 2
    file = a_file(llama, "memory", (depth,), 0.0)
    seen: dict[tuple[int, int], torch.Tensor] = {}
    guess = HeadMemory.guess

    def watched(self, rows, positions):
        found = guess(self, rows, positions)
        seen[positions[0], positions[0] - self.known[0]] = found[0].clone()
        return found

    monkeypatch.setattr(HeadMemory, "guess", watched)
    monkeypatch.setattr(DraftPlanner, "_exit_pays", lambda *_: True)  # no rests: exits of a tiny model never pay
    with TIDE(llama, saved(file, tmp_path), TIDEConfig(exit_threshold=0.0, max_pending=pending)) as engine:
        text = engine.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)
        adapter, layers = engine.adapter, engine.adapter.num_layers
        positions = torch.arange(text.shape[1])[None]
        depths = memory_depths(layers, 3)
        taps = tuple({0, depth, *depths} - {layers})
        passed = adapter.run(0, layers, PassInputs(text, positions, None, None), taps=taps)
    states = {**passed.taps, layers: passed.states}
    head = engine.policy.exits[depth].head
    guesses = head.unroll(torch.cat([states[0], states[depth]], -1), torch.cat([states[d] for d in depths], -1), pending)
    first = {position: step for position, step in seen if step == 0}
    assert len(first) >= 4
    for position, step in seen:
        if step == 0:  # later steps follow drafts, which a random head gets wrong
            close = dict(rtol=0.05, atol=0.05) if kernels else dict(rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(seen[position, 0], guesses[0][0, position], **close)
