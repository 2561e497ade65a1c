"""Rounds, which decode on a GPU without the host between, write the text of `model.generate`.

Here they run on a CPU, with the references in place of the kernels: the same rounds on the same circuit, without graphs.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import StoppingCriteria

import TIDE
from families import build
from router_files import a_file
from TIDE.config import TIDEConfig
from TIDE.engine.round.prefill import FEWEST, LONGEST, padded
from TIDE.engine.round.rounds import Rounds
from TIDE.engine.runners import select as fused
from TIDE.engine.runners.own_layers import OwnLayers
from TIDE.engine.runners.snapshot import ModelSnapshot
from TIDE.engine.runners.triton_runner import GPULayers
from TIDE.engine.schedule.draft_length import FIRST_REST, LONGEST_REST, DraftLength
from TIDE.kernels import reference

OPTIONS = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def rounds(monkeypatch):
    """The lengths of the rounds that ran."""
    lengths, run = [], Rounds._round
    monkeypatch.setattr(Rounds, "_round", lambda self, drafts, most: (lengths.append(drafts), run(self, drafts, most))[1])
    return lengths


def on_references(engine):
    """The engine with rounds, as on a GPU."""
    layers = fused._features(engine.adapter)
    engine.adapter.fused = GPULayers(engine.adapter, layers, reference, reference, reference.propagate)
    return engine


def on_own_layers(engine):
    engine.adapter.fused = OwnLayers(engine.adapter, reference, reference)
    return engine


def an_engine(model, depth=None, place=on_references, **config):
    policy = None
    with TIDE.TIDE(model) as engine:
        if depth is not None:
            policy = a_file(model, "memory", (depth,), 0.0).policy(engine.adapter)
    return place(TIDE.TIDE(model, policy, TIDEConfig(**config)))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "granite", "smollm3"])
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_the_text_is_the_models(name, depth, ids, rounds):
    model = build(name)
    expected = model.generate(ids, **OPTIONS)
    with an_engine(model, depth) as engine:
        for _ in range(2):  # the second request works on the circuit of the first
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
            assert engine.last_stats.total_tokens == OPTIONS["max_new_tokens"]
        assert engine.adapter.fused is not None
        assert len(rounds) > 4
        assert any(rounds) == (depth is not None)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "phi", "falcon", "olmo2", "gemma2", "cohere", "mixtral"])
@pytest.mark.parametrize("depth", [None, 2])
def test_families_without_fused_layers_run_their_own(name, depth, ids, rounds, monkeypatch):
    monkeypatch.setattr(OwnLayers, "has_rounds", property(lambda self: self.is_checked))  # without graphs they are not worth it
    model = build(name)
    expected = model.generate(ids, **OPTIONS)
    with an_engine(model, depth, place=on_own_layers) as engine:
        for _ in range(2):
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert isinstance(engine.adapter.fused, OwnLayers)
        assert len(rounds) > 4 and any(rounds) == (depth is not None)


def test_a_model_that_does_not_work_on_a_static_cache_runs_as_it_is(ids, rounds, caplog):
    model = build("gpt_neo")  # its attention counts the columns it is handed
    with an_engine(model, place=on_own_layers) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.adapter.fused is None and not rounds
    assert "runs as it is, without compiled layers or graphs" in caplog.text


@pytest.mark.parametrize("tokens", [1, 33, 64, 65, 200])
@pytest.mark.parametrize("depth", [0, 2])
def test_an_opening_pads_texts_and_nothing_sees_it(tokens, depth, rounds):
    ids = torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    other = torch.randint(3, 100, (1, 90), generator=torch.Generator().manual_seed(7))
    model = build("llama")
    with an_engine(model, depth) as engine:
        for text in (other, ids):  # what the circuit still holds of the first is nothing to the second
            assert torch.equal(engine.generate(text, **OPTIONS), model.generate(text, **OPTIONS))


def test_there_are_four_lengths_to_each_doubling():
    assert [padded(n) for n in (1, FEWEST, 33, 64, 65, 80, 81, 1025, LONGEST)] == [32, 32, 40, 64, 80, 80, 96, 1280, LONGEST]
    assert padded(LONGEST + 1) == LONGEST + 1
    assert all(n <= padded(n) <= max(FEWEST, 1.25 * n) for n in range(1, LONGEST))


@settings(deadline=None, max_examples=15)
@given(
    lengths=st.lists(st.sampled_from([0, 2, 4, 7]), min_size=8),
    wrong=st.sets(st.integers(0, 60)),
    depth=st.sampled_from([0, 2]),
)
def test_whatever_is_drafted_right_or_wrong(lengths, wrong, depth):
    model = build("llama")
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, **OPTIONS)
    text, left = [*expected[0].tolist(), *range(40)], list(lengths)

    def draft(self, step, most):
        if self.depth:
            self._shallow(step, most)
        at = int(self.slots.starts[step]) + 1
        self.slots.tokens[step + 1] = text[at] + (at in wrong)

    with pytest.MonkeyPatch.context() as patch, an_engine(model, depth, max_pending=7) as engine:
        patch.setattr(Rounds, "_draft", draft)
        patch.setattr(DraftLength, "choose", lambda self, most: left.pop() if left else 4)
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        stats = engine.last_stats
        assert stats.accepted + stats.remaining_tokens == stats.total_tokens == OPTIONS["max_new_tokens"]
        assert stats.accepted or not any(lengths) or wrong


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("lengths", [[0] * 40, [0] * 20 + [4] * 9, [2, 0, 0, 7, *[0] * 17, 2], [4, 0] * 9])
def test_a_memory_head_is_fed_every_token_once_it_is_asked_again(lengths, depth):
    """Whatever rounds there were: what it keeps is what an opening over the same text leaves."""
    model = build("llama")
    ids, left = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1)), [*reversed(lengths)]

    def kept(ids, **options):
        with an_engine(model, depth) as engine:
            text = engine.generate(ids, do_sample=False, eos_token_id=None, **options)
            memory = engine.adapter.fused.slot_pool._free[0].memory
        return text, memory, int(memory.fed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftLength, "choose", lambda self, most: left.pop() if left else 2)
        text, memory, fed = kept(ids, max_new_tokens=30)
    assert fed >= 9 + 16
    _, expected, length = kept(text[:, :fed], max_new_tokens=2)  # rounds begin after the first
    assert length >= fed
    torch.testing.assert_close(memory.before[: fed + 1], expected.before[: fed + 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(memory.keys[:, :, :fed], expected.keys[:, :, :fed], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(memory.values[:, :, :fed], expected.values[:, :, :fed], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 0.7), (0.0, 0.3), (0.5, 0.7)])
@pytest.mark.parametrize(
    ("strategy", "depth", "vocabulary"),
    [("memory", 0, None), ("memory", 2, None), ("identity", 2, None), ("memory", 0, torch.arange(0, 96, 3))],
    ids=["memory at 0", "memory at 2", "identity", "draft vocabulary"],
)
def test_mode_fast_writes_what_it_writes_without_rounds(
    strategy, depth, vocabulary, threshold, share, ids, rounds, monkeypatch
):
    """The exit sees the same in both: guesses while drafting, finished states after each round, with drafts or without."""
    monkeypatch.setenv("TIDE_NO_KERNELS", "1")  # on a CPU they are in 8 bits
    model, config = build("llama"), TIDEConfig(mode="fast", exit_threshold=threshold, max_pending=3, max_exit_share=share)
    with TIDE.TIDE(model) as engine:
        policy = a_file(model, strategy, (depth,), 0.0, vocabulary).policy(engine.adapter)
        policy.exits[depth].router.temperature.fill_(0.02)  # so that scores differ
    texts = []
    for place in (lambda engine: engine, on_references):
        with place(TIDE.TIDE(model, policy, config)) as engine:
            texts.append((engine.generate(ids, **OPTIONS)[0].tolist(), engine.last_stats.drafted_by_step))
    assert texts[0] == texts[1]
    assert any(rounds) and (texts[1][1] or threshold)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma", "smollm3"])
def test_kv_of_skipped_layers_are_those_the_model_would_make(name, ids, monkeypatch):
    model, config = build(name), TIDEConfig(mode="fast", exit_threshold=0.0, kv_cache_strategy="propagate", max_exit_share=0.7)
    filled, texts = [], []
    with TIDE.TIDE(model) as engine:
        policy = a_file(model, "identity", (2,), 0.0).policy(engine.adapter)
    propagate = reference.propagate
    monkeypatch.setattr(reference, "propagate", lambda *given: (filled.append(len(given[0])), propagate(*given))[1])
    monkeypatch.setenv("TIDE_NO_KERNELS", "1")
    for place in (lambda engine: engine, on_references):
        with place(TIDE.TIDE(model, policy, config)) as engine:
            texts.append(engine.generate(ids, **OPTIONS)[0].tolist())
    assert texts[0] == texts[1] and set(filled) == {2}


def test_a_threshold_in_mode_exact_decides_what_is_drafted(ids):
    model = build("llama")
    with an_engine(model, 0, exit_threshold=1.0) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.last_stats.accepted == 0


def test_what_rounds_cannot_do_is_done_without_them(ids, rounds):
    class Never(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.zeros(len(ids), dtype=torch.bool)

    model = build("llama")
    with an_engine(model) as engine:
        for options in (dict(repetition_penalty=1.3), dict(stopping_criteria=[Never()])):
            assert torch.equal(engine.generate(ids, **OPTIONS, **options), model.generate(ids, **OPTIONS, **options))
        both = torch.cat([ids, ids.flip(1)])
        options = {**OPTIONS, "attention_mask": torch.ones_like(both), "pad_token_id": 0}
        assert torch.equal(engine.generate(both, **options), model.generate(both, **options))
        assert not rounds


@pytest.mark.parametrize("depth", [None, 0, 2])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_where_a_round_fails_the_text_goes_on_by_steps(depth, good, ids, monkeypatch, caplog):
    model, run, ran = build("llama"), Rounds._round, []

    def fails(self, drafts, most):
        ran.append(drafts)
        if len(ran) > good:
            raise RuntimeError("the card refuses")
        run(self, drafts, most)

    monkeypatch.setattr(Rounds, "_round", fails)
    with an_engine(model, depth) as engine:
        for _ in range(2):
            assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.adapter.fused is not None and not engine.adapter.fused.has_rounds
    assert len(ran) == good + 1
    assert "is not decoded in rounds: RuntimeError: the card refuses" in caplog.text


def test_streams_that_are_left_give_their_circuit_back(ids):
    model = build("llama")
    with an_engine(model) as engine:
        engine.generate(ids, **OPTIONS)
        for _ in range(3):
            next(engine.stream(ids, **OPTIONS))
        assert len(engine.adapter.fused.slot_pool._free) == 1


def test_a_text_ends_where_the_models_does(ids, rounds):
    model = build("llama")
    text = model.generate(ids, **OPTIONS)[0].tolist()
    end = text[len(ids[0]) + 10]
    options = {**OPTIONS, "eos_token_id": end, "pad_token_id": end}
    with an_engine(model, 0) as engine:
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))
        assert list(engine.stream(ids, **options)) == model.generate(ids, **options)[0, len(ids[0]) :].tolist()
    assert rounds


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
    with an_engine(model) as engine:
        best = reference.best_tokens
        monkeypatch.setattr(reference, "best_tokens", lambda x, *rest: best(x * float("nan"), *rest))
        with pytest.raises(FloatingPointError, match="NaN"):
            engine.generate(ids, **OPTIONS)
        monkeypatch.setattr(reference, "best_tokens", best)
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))


def lengths_after(stands, seconds, rounds=60):
    length = DraftLength()
    for _ in range(rounds):
        drafts = length.choose(7)
        length.saw(drafts, min(drafts, stands), seconds(drafts))
    return length


def test_the_length_goes_by_what_stands_and_what_it_takes():
    def a_tenth(drafts):
        return 1 + drafts / 10

    assert lengths_after(7, a_tenth).choose(7) == 7
    assert lengths_after(7, a_tenth).choose(4) == 4
    assert lengths_after(2, a_tenth).choose(7) == 2
    assert lengths_after(7, lambda drafts: 1 + 2 * drafts).choose(7) == 0


def test_drafts_that_never_stand_are_tried_ever_more_rarely():
    length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    length.begin()
    tried = [number for number in range(4 * LONGEST_REST) if length.choose(7)]
    assert tried[0] < FIRST_REST
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps) and max(gaps) == LONGEST_REST


def test_another_text_is_soon_known():
    length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    length.begin()
    chosen = []
    for _ in range(3 * FIRST_REST):
        chosen.append(length.choose(7))
        length.saw(chosen[-1], chosen[-1], 1 + chosen[-1] / 10)
    assert min(chosen[-FIRST_REST:]) > 2
