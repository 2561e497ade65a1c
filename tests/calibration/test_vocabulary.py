"""The draft vocabulary: ranked by probability mass, measured with a head, chosen where it gains."""

from __future__ import annotations

import pytest
import torch

import TIDE
from TIDE.calibration import calibrate, vocabulary
from TIDE.calibration.collect import Budget, collect
from TIDE.calibration.fit import Exits, Split, agreement
from TIDE.calibration.placement import Placed
from TIDE.calibration.text import Text
from TIDE.calibration.timing import Costs
from TIDE.calibration.vocabulary import Measured, best_of, choose_vocabulary, ranked, token_mass, training_vocabulary
from TIDE.routing.heads import build_head, head_sizes, memory_depths

COSTS = Costs(1e-4, {1: 1e-3, 2: 1e-3, 16: 1.2e-3}, {1: 1e-3, 2: 1e-3, 16: 1e-3}, 1e-5, 4)


@pytest.fixture
def split(adapter, tmp_path):
    depths, budget = memory_depths(adapter.num_layers, 3), Budget(adapter.model.device, tmp_path)
    dice = torch.Generator().manual_seed(0)
    texts = [Text(torch.randint(3, 120, (14,), generator=dice).tolist(), 4, i) for i in range(24)]
    return Split(*(collect(adapter, own, [0, *depths], budget, "") for own in (texts[:12], texts[12:])))


def test_tokens_are_ranked_by_mass_and_end_tokens_come_first(adapter, split):
    mass = token_mass(adapter, split.train)
    assert float(mass.sum()) == pytest.approx(split.train.tokens, rel=1e-3)
    adapter.model.generation_config.eos_token_id = None
    assert torch.equal(ranked(adapter, split.train).order, mass.argsort(descending=True, stable=True))
    rare = int(mass.argmin())
    adapter.model.generation_config.eos_token_id = rare
    found = ranked(adapter, split.train)
    assert found.order[0] == rare, "an exit has to be able to end the text"
    assert set(found.first(5).tolist()) == {rare, *mass.topk(4).indices.tolist()}
    assert torch.equal(found.first(5), found.first(5).sort().values)


def test_heads_are_trained_on_the_fewest_tokens_that_cover_the_mass(adapter, split, monkeypatch):
    tokens = ranked(adapter, split.train)
    found = training_vocabulary(adapter, tokens)
    assert float(tokens.mass[found].sum()) >= 0.999
    assert float(tokens.mass[tokens.first(len(found) - 1)].sum()) < 0.999
    monkeypatch.setattr(vocabulary, "CPU_LARGEST", 5)
    assert torch.equal(training_vocabulary(adapter, tokens), tokens.first(5))


def test_each_size_is_measured_with_the_head_on_held_out_texts(adapter, split, monkeypatch):
    monkeypatch.setattr(vocabulary, "SIZES", (16, 64, 1000))
    torch.manual_seed(0)
    head = build_head("memory", head_sizes("memory", adapter.model.config, adapter.hidden_dim)).eval()
    tokens, asked = ranked(adapter, split.train), []

    def seconds(own):
        asked.append(own)
        return {16: 2e-3, 64: 5e-3}.get(0 if own is None else len(own), 3e-3)

    found = choose_vocabulary(adapter, head, 0, 2, split.valid, tokens, COSTS, seconds)
    assert [one.tokens for one in found.measured] == [16, 64, adapter.vocab_size]
    assert [None if own is None else len(own) for own in asked] == [16, 64, None]
    for one, own in zip(found.measured, asked, strict=True):
        assert one.agreement == pytest.approx(agreement(adapter, head, split.valid, Exits(0, own), 2))
    assert [one.seconds for one in found.measured] == [2e-3, 3e-3, 3e-3], "64 tokens cannot take longer than all"
    assert found.measured[0].row()["megabytes"] == round(16 * adapter.hidden_dim * 4 / 1e6, 1)


def measured(tokens: int, per_second: float, share: float = 0.5) -> Measured:
    return Measured(tokens, [share], 1e-3, 8, Placed((0,), (0.0,), 3, per_second, 2.0))


def test_fewer_tokens_have_to_be_clearly_faster():
    whole = measured(1000, 100.0)
    assert best_of([measured(10, 101.0), whole]) is whole
    few, more = measured(10, 104.0), measured(100, 110.0)
    assert best_of([few, more, whole]) is more
    assert "100 of 1,000 tokens" in vocabulary.Choice(None, more, [few, more, whole]).words
    assert "1.10 times the tokens per second" in vocabulary.Choice(None, more, [few, more, whole]).words
    assert "all 1,000 tokens" in vocabulary.Choice(None, whole, [few, whole]).words


@pytest.mark.full
@pytest.mark.parametrize("slow", [True, False], ids=["a dear LM head", "a cheap LM head"])
def test_a_calibration_drafts_from_few_tokens_where_the_lm_head_is_dear(slow, llama, chatty, tmp_path, monkeypatch, caplog):
    """The first 64 tokens are as good as all to an untrained head; what differs is what a draft costs."""
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(vocabulary, "SIZES", (64,))
    price = (lambda own: 1e-2 if own is None else 1e-4) if slow else (lambda own: 1e-4)
    monkeypatch.setattr(calibrate, "measure_head", lambda adapter, policy, depth, key: price(policy.vocabulary))
    monkeypatch.setattr(calibrate, "measure_costs", lambda *_: COSTS)
    config = TIDE.TIDEConfig(calibration_samples=20, checkpoint_interval=4)
    caplog.set_level("INFO", "TIDE")
    file = TIDE.calibrate(llama, chatty, tmp_path / "a.safetensors", config, quick=True, epochs=1)
    assert (file.vocabulary is not None) == slow
    assert file.figures["draft_vocabulary"] in caplog.text
    rows = file.figures["draft_vocabularies"]
    assert [row["tokens"] for row in rows] == [64, 128]
    assert file.exits[0].figures["agreement_by_step"] == pytest.approx(rows[0 if slow else 1]["agreement"], abs=1e-4), (
        "said of the vocabulary that is used"
    )
    ids = torch.tensor([[1, 20, 30, 40, 50]])
    expected = llama.generate(ids, max_new_tokens=16, do_sample=False)
    with TIDE.TIDE(llama, tmp_path / "a.safetensors") as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=16, do_sample=False), expected), "exact stays exact"
        assert (engine.policy.vocabulary is None) == (not slow)
