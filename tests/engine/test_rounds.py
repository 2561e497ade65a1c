"""Rounds, which decode on a GPU without the host between, write the text of `model.generate`.

Here they run on a CPU, with the references in place of the kernels: the same rounds on the same slots, without graphs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import StoppingCriteria

from families import build
from router_files import a_file
from runners import in_rounds, on_modules, why_on_the_host
from TIDE.adapters.snapshot import ModelSnapshot
from TIDE.engine.cache.slots import Slots
from TIDE.engine.runners.graphs import GraphPool
from TIDE.engine.slots.module_prefill import LONGEST, SHORTEST, padded_length
from TIDE.kernels.reference import layers as reference
from TIDE.routing.policies import policy_for

OPTIONS = dict(max_new_tokens=16, do_sample=False, eos_token_id=None)


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0))


def test_a_model_that_does_not_work_on_a_static_cache_runs_as_it_is(ids, caplog):
    model = build("gpt_neo")  # its attention counts the columns it is handed
    with in_rounds(model, place=on_modules) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.runner.name == "modules" and "with a static cache its states are" in engine.backend
    assert "runs as it is, without compiled layers or graphs" in caplog.text


def test_there_are_four_lengths_to_each_doubling():
    asked = (1, SHORTEST, 33, 64, 65, 80, 81, 1025, LONGEST)
    assert [padded_length(n) for n in asked] == [32, 32, 40, 64, 80, 80, 96, 1280, LONGEST]
    assert padded_length(LONGEST + 1) == LONGEST + 1
    assert all(n <= padded_length(n) <= max(SHORTEST, 1.25 * n) for n in range(1, LONGEST))


@pytest.mark.parametrize(("depth", "tree"), [(0, 0), (2, 0), (0, 15)])
@pytest.mark.parametrize("lengths", [[0] * 40, [0] * 20 + [4] * 9, [2, 0, 0, 7, *[0] * 17, 2], [4, 0] * 9])
def test_a_memory_head_is_fed_every_token_once_it_is_asked_again(lengths, depth, tree):
    """Whatever rounds there were: what it keeps is what a prefill of the same text leaves."""
    model = build("llama")
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1))

    def kept(ids, script, **options):
        seen, clear = [], Slots.clear

        def noting(self, place):
            seen.append(int(self.memory.fed[place]))
            clear(self, place)

        how = dict(script=script, then=2, draft_tree=tree)
        with pytest.MonkeyPatch.context() as patch, in_rounds(model, depth, **how) as engine:
            patch.setattr(Slots, "clear", noting)
            text = engine.generate(ids, do_sample=False, eos_token_id=None, **options)
            (slots,) = engine.runner.pool.free_slots
            store, fed = slots.store, seen[-1]
            first = int(store._free[-1])  # the block the row had first is the next to be taken
            assert first == 1 and fed < store.size
        before = store.before[first * store.size :][: store.size]
        return text, fed, (before, store.keys[-1][first].transpose(0, 1), store.values[-1][first].transpose(0, 1))

    text, fed, found = kept(ids, lengths, max_new_tokens=30)
    assert fed >= 9 + 16
    _, length, expected = kept(text[:, : fed + 1], [], max_new_tokens=2)  # the newest token runs in a round
    assert length >= fed
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours[:fed], theirs[:fed], rtol=1e-4, atol=1e-4)


def test_graphs_of_one_draft_vocabulary_do_not_serve_another(ids, monkeypatch):
    """Same runner, slots and exit: a graph has the addresses of one vocabulary, so its key has to name it."""
    model, keys = build("llama"), []
    launch = GraphPool.launch
    monkeypatch.setattr(GraphPool, "launch", lambda self, slots, key, work: keys.append(key) or launch(self, slots, key, work))
    file = a_file(model, "memory", (0,), 0.0, torch.arange(0, 96, 3))
    with in_rounds(model, 0, then=2) as engine:
        policies = [
            policy_for(replace(file, vocabulary=own), engine.adapter) for own in (file.vocabulary, torch.arange(0, 96, 2), None)
        ]
        seen = []
        for policy in (*policies, policies[0]):
            keys.clear()
            engine._settings = engine._settings._replace(policy=policy)
            engine.generate(ids, **OPTIONS)
            seen.append({key[-1] for key in keys if key[0] in ("round", "tree")})
    first, second, whole, again = seen
    assert first == again and all(len(vocabularies) == 1 for vocabularies in seen)
    assert not first & second and not first & whole and not second & whole


def test_a_threshold_in_mode_exact_decides_what_is_drafted(ids):
    model = build("llama")
    with in_rounds(model, 0, exit_threshold=1.0) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.last_stats.accepted == 0


@pytest.fixture
def batch(prompts):
    """Three left-padded prompts."""
    return dict(zip(("input_ids", "attention_mask"), prompts, strict=True))


@pytest.mark.parametrize("strategy", ["none", "lens", "identity", "memory"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_end_at_different_lengths_share_rounds(name, strategy, batch):
    model, width = build(name), batch["input_ids"].shape[1]
    with in_rounds(model, None if strategy == "none" else 2, strategy=strategy, then=4, max_pending=7) as engine:
        whole = model.generate(**batch, **OPTIONS, pad_token_id=0)
        assert torch.equal(engine.generate(**batch, **OPTIONS, pad_token_id=0), whole)
        texts, seen = whole[:, width:].tolist(), set()
        for row in range(3):  # each row ends in its middle, and those that do not know the token go on
            options = {**OPTIONS, "eos_token_id": texts[row][8 + 3 * row], "pad_token_id": 0}
            assert torch.equal(engine.generate(**batch, **options), model.generate(**batch, **options))
            seen.add(tuple(len(row.new_tokens) for row in engine.last_rows))
            assert why_on_the_host(engine, batch, **options) is None
        assert any(len(set(lengths)) > 1 for lengths in seen)
        assert len(engine.scheduler.rounds) > 20 and any(engine.scheduler.rounds) == (strategy != "none")


@pytest.mark.parametrize("depth", [None, 0])
def test_the_time_of_rounds_is_given_to_the_prompt_and_to_the_deep_layers(depth, ids):
    """The host does not see what lies between, so a round's time is all of one kind."""
    with in_rounds(build("llama"), depth) as engine:
        engine.generate(ids, **OPTIONS)
        seconds = engine.last_stats.seconds
    assert engine.scheduler.rounds
    assert min(seconds.prompt, seconds.deep) > 0
    assert seconds.prompt + seconds.deep <= seconds.whole


def test_criteria_of_the_users_own_end_rounds(ids):
    class Two(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return (ids[:, -1:] == ids[:, :-1]).sum(-1) > 1

    model = build("llama")
    with in_rounds(model, 0, script=[4] * 20, max_pending=7) as engine:
        options = dict(stopping_criteria=[Two()])
        assert torch.equal(engine.generate(ids, **OPTIONS, **options), model.generate(ids, **OPTIONS, **options))
        assert engine.scheduler.rounds


def test_streams_that_are_left_give_their_slots_back(ids):
    model = build("llama")
    with in_rounds(model) as engine:
        engine.generate(ids, **OPTIONS)
        for _ in range(3):
            next(engine.stream(ids, **OPTIONS))
        assert len(engine.runner.pool.free_slots) == 1
        assert engine.runner.pool.store(None).free == engine.runner.pool.store(None).blocks - 1


def test_weights_that_are_exchanged_are_noticed(ids):
    """A graph would go on reading where the old ones were."""
    model = build("llama")
    parts = ModelSnapshot(model)
    for weight in (model.model.layers[1].mlp.up_proj.weight, model.lm_head.weight):
        held, weight.data = weight.data, weight.data.clone()
        assert not parts.matches(model)
        weight.data = held
        assert parts.matches(model)


def test_logits_that_are_nan_are_an_error_and_the_engine_stays_usable(ids, monkeypatch):
    model = build("llama")
    with in_rounds(model) as engine:
        best = reference.best_tokens
        monkeypatch.setattr(reference, "best_tokens", lambda x, *rest: best(x * float("nan"), *rest))
        with pytest.raises(FloatingPointError, match="NaN"):
            engine.generate(ids, **OPTIONS)
        monkeypatch.setattr(reference, "best_tokens", best)
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
