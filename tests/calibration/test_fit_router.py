"""Routers learn what they are shown, say shares, and are the same each time."""

from __future__ import annotations

import math

import pytest
import torch

from families import LAYERS, VOCAB, build
from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration import fit_router as fitting
from TIDE.calibration.collect import Budget, Collection, Shard, collect
from TIDE.calibration.figures import calibration_error
from TIDE.calibration.fit import Exits, Split, agreement, guesses
from TIDE.calibration.fit_router import fit_router, platt
from TIDE.calibration.text import Text
from TIDE.config import TIDEConfig
from TIDE.routing.heads import HeadSizes, build_head, head_sizes

DEPTH, STEPS = 2, 3
CONFIG = TIDEConfig(router_bottleneck_dim=16)
SOME = torch.arange(0, VOCAB, 2)


@pytest.fixture(scope="module")
def adapter():
    adapter = ModelAdapter(build("llama"))
    yield adapter
    adapter.close()


@pytest.fixture(scope="module")
def split(adapter, tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    depths = sorted({1, 2, 3, LAYERS})

    def texts(count):
        lengths = torch.randint(20, 40, (count,), generator=generator).tolist()
        return [Text(torch.randint(3, VOCAB, (n,), generator=generator).tolist(), 8, 0) for n in lengths]

    budget = Budget(adapter.model.device, tmp_path_factory.mktemp("states"))
    return Split(*[collect(adapter, texts(count), depths, budget, "texts") for count in (30, 20)])


def head_for(adapter, strategy):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build_head(strategy, head_sizes(strategy, adapter.model.config, adapter.hidden_dim)).eval().requires_grad_(False)


def fit(adapter, head, split, seed=0, config=CONFIG, vocabulary=None):
    return fit_router(adapter, head, split, Exits(DEPTH, vocabulary), config, STEPS, seed, "router")


@pytest.mark.parametrize("vocabulary", [None, SOME], ids=["all", "some"])
@pytest.mark.parametrize("strategy", ["identity", "lens", "memory"])
def test_the_trace_tells_what_the_exit_did(adapter, split, strategy, vocabulary):
    head = head_for(adapter, strategy)
    found = fit(adapter, head, split, vocabulary=vocabulary)
    expected = agreement(adapter, head, split.valid, Exits(DEPTH, vocabulary), STEPS)
    assert found.trace.agreed.double().mean(0).tolist() == pytest.approx(expected)
    assert found.trace.scores.shape == (split.valid.tokens, STEPS if strategy == "memory" else 1)
    assert ((found.trace.scores >= 0) & (found.trace.scores <= 1)).all()
    assert len(found.figures["by_step"]) == len(expected)
    counts = [int(asked.sum()) for shard in split.valid.shards for asked in shard.asked]
    assert found.trace.texts.bincount().tolist() == counts
    odd = found.trace.texts % 2 == 1
    assert found.figures["positions"] == int(odd.sum())
    assert found.figures["agreement"] == pytest.approx(float(found.trace.agreed[odd, 0].double().mean()), abs=1e-4)


def test_scores_are_those_the_engine_will_see(adapter, split):
    head = head_for(adapter, "memory")
    found = fit(adapter, head, split)
    shard = split.valid.shards[0]
    guess = guesses(adapter, head, shard, torch.arange(len(shard.lengths)), DEPTH, STEPS)[1][shard.asked]
    scores = found.router(guess, adapter.head(guess))
    torch.testing.assert_close(scores, found.trace.scores[: len(scores), 1])
    assert not found.router.training
    assert not any(parameter.requires_grad for parameter in found.router.parameters())


def test_the_same_seed_gives_the_same_router_and_leaves_random_numbers_alone(adapter, split):
    head = head_for(adapter, "lens")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    routers = [fit(adapter, head, split, seed).router.state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(routers[0][name], routers[1][name]) for name in routers[0])
    assert not torch.equal(routers[0]["down.weight"], routers[2]["down.weight"])


def test_examples_never_exceed_the_cap(adapter, split, monkeypatch):
    monkeypatch.setattr(fitting, "EXAMPLES", 100)
    sizes = []
    monkeypatch.setattr(
        fitting, "train_router", lambda router, features, right, *rest: sizes.append((len(features), len(right)))
    )
    fit(adapter, head_for(adapter, "memory"), split)
    assert sizes == [(100, 100)]


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_the_cosine_label_obeys_its_threshold(adapter, split, threshold, monkeypatch):
    config = TIDEConfig(router_bottleneck_dim=16, label="cosine", convergence_threshold=threshold)
    shares = []
    monkeypatch.setattr(
        fitting, "train_router", lambda router, features, right, *rest: shares.append(float(right.double().mean()))
    )
    found = fit(adapter, head_for(adapter, "memory"), split, config=config)
    states = [[shard.states(depth)[shard.asked] for depth in (DEPTH, LAYERS)] for shard in split.train.shards]
    near = torch.cat([torch.cosine_similarity(*pair, dim=-1) for pair in states])
    assert shares == [pytest.approx(float((near > threshold).double().mean()))]
    expected = agreement(adapter, head_for(adapter, "memory"), split.valid, Exits(DEPTH, None), STEPS)
    assert found.trace.agreed.double().mean(0).tolist() == pytest.approx(expected)  # agreement, whatever the label


def invented(adapter, texts, seed, chance):
    """States of other seeds than the weights; full-model tokens agree with the exit's with a chance given by the state."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(texts, 20, adapter.hidden_dim, generator=generator)
    flat = states.flatten(0, 1)
    right = torch.rand(len(flat), generator=generator) < chance(flat)
    best = adapter.head(flat).argmax(-1)
    best = torch.where(right, best, (best + 1) % VOCAB).view(texts, 20)
    asked = torch.ones(texts, 20, dtype=torch.bool)
    shard = Shard(torch.zeros(texts, 20, dtype=torch.long), [20] * texts, asked, asked, best, {DEPTH: states, LAYERS: states})
    return Collection([shard])


def invented_split(adapter, chance, train=400, valid=150):
    return Split(invented(adapter, train, 100, chance), invented(adapter, valid, 101, chance))


def test_a_router_learns_a_pattern_and_its_scores_are_calibrated(adapter):
    split = invented_split(adapter, lambda states: torch.sigmoid(6 * states[:, :4].sum(-1) - 3))
    found = fit(adapter, build_head("identity", HeadSizes(adapter.hidden_dim)), split)
    assert found.figures["auroc"] > 0.9
    assert found.figures["calibration_error"] < 0.05
    assert found.figures["coverage"]["0.90"] > 0.2
    assert "held_out" not in found.figures


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_router_is_fitted_where_all_examples_are_right_or_all_wrong(adapter, share):
    split = invented_split(adapter, lambda states: torch.full((len(states),), share), train=20, valid=10)
    found = fit(adapter, build_head("identity", HeadSizes(adapter.hidden_dim)), split)
    assert found.trace.scores.mean() == pytest.approx(share, abs=0.02)
    assert found.figures["agreement"] == share


def test_few_held_out_positions_are_used_for_both_and_said_to_be_few(adapter):
    split = invented_split(adapter, lambda states: torch.full((len(states),), 0.5), train=20, valid=2)
    found = fit(adapter, build_head("identity", HeadSizes(adapter.hidden_dim)), split)
    assert found.figures["held_out"] == "too few"
    assert found.figures["positions"] == 40


def test_a_router_is_fitted_without_held_out_texts_but_not_without_training_texts(adapter):
    split = invented_split(adapter, lambda states: torch.full((len(states),), 0.5), train=20, valid=2)
    head = build_head("identity", HeadSizes(adapter.hidden_dim))
    found = fit(adapter, head, Split(split.train, Collection([])))
    assert found.figures["positions"] == 0 and math.isfinite(float(found.router.temperature))
    with pytest.raises(ValueError, match="more or longer texts"):
        fit(adapter, head, Split(Collection([]), split.valid))


@pytest.mark.parametrize(("slope", "offset"), [(0.3, 1.0), (2.0, -1.5)])
def test_platt_scaling_finds_slope_and_offset(slope, offset):
    raw = torch.randn(50_000, generator=torch.Generator().manual_seed(0)) * 3
    right = torch.rand(50_000, generator=torch.Generator().manual_seed(1)) < torch.sigmoid(slope * raw + offset)
    temperature, found = platt(raw, right)
    assert 1 / temperature == pytest.approx(slope, rel=0.05)
    assert found == pytest.approx(offset, rel=0.05)
    assert calibration_error(torch.sigmoid(raw / temperature + found), right) < 0.01


def test_platt_scaling_never_turns_scores_round():
    raw = torch.linspace(-3, 3, 200)
    assert platt(raw, raw < 0)[0] > 0
