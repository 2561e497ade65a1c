"""Rounds, which decode on a GPU without the host between, write the text of `model.generate`.

Here they run on a CPU, with the references in place of the kernels: the same rounds on the same circuit, without graphs.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_calibrated import a_file
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

import TIDE
from families import build
from TIDE.config import TIDEConfig
from TIDE.engine import fused
from TIDE.engine.batch import Batch
from TIDE.engine.draft_length import TRY_AGAIN, DraftLength
from TIDE.engine.gpu_layers import GPULayers
from TIDE.engine.rounds import Rounds
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
    layers = fused._features(engine.window)
    engine.window.fused = GPULayers(engine.window, layers, reference, reference)
    engine.window.fused.addresses = fused._addresses(engine.window, layers)
    return engine


def an_engine(model, depth=None, **config):
    policy = None
    with TIDE.TIDE(model) as engine:
        if depth is not None:
            policy = a_file(model, "memory", (depth,), 0.0).policy(engine.window)
    return on_references(TIDE.TIDE(model, policy, TIDEConfig(**config)))


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "granite", "smollm3"])
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_the_text_is_the_models(name, depth, ids, rounds):
    model = build(name)
    expected = model.generate(ids, **OPTIONS)
    with an_engine(model, depth) as engine:
        for _ in range(2):  # the second request works on the circuit of the first
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
            assert engine.last_stats.total_tokens == OPTIONS["max_new_tokens"]
        assert engine.window.fused is not None
        if engine.window.fused.has_rounds:  # granite scales its logits: it has fused layers and no rounds
            assert len(rounds) > 4
            assert any(rounds) == (depth is not None)


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
        at = int(self.circuit.starts[step]) + 1
        self.circuit.tokens[step + 1] = text[at] + (at in wrong)

    with pytest.MonkeyPatch.context() as patch, an_engine(model, depth, max_pending=7) as engine:
        patch.setattr(Rounds, "_draft", draft)
        patch.setattr(DraftLength, "choose", lambda self, most: left.pop() if left else 4)
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        stats = engine.last_stats
        assert stats.accepted + stats.remaining_tokens == stats.total_tokens == OPTIONS["max_new_tokens"]
        assert stats.accepted or not any(lengths) or wrong


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize(("strategy", "depth"), [("memory", 0), ("memory", 2), ("identity", 2)])
def test_mode_fast_writes_what_it_writes_without_rounds(strategy, depth, threshold, ids, rounds, monkeypatch):
    """The exit sees the same in both: guesses while drafting, finished states after each round."""
    monkeypatch.setenv("TIDE_NO_KERNELS", "1")  # on a CPU they are in 8 bits
    model, config = build("llama"), TIDEConfig(mode="fast", exit_threshold=threshold, max_pending=3, max_exit_share=0.7)
    with TIDE.TIDE(model) as engine:
        policy = a_file(model, strategy, (depth,), 0.0).policy(engine.window)
        policy.exits[depth].router.temperature.fill_(0.02)  # so that scores differ
    texts = []
    for place in (lambda engine: engine, on_references):
        with place(TIDE.TIDE(model, policy, config)) as engine:
            texts.append((engine.generate(ids, **OPTIONS)[0].tolist(), engine.last_stats.drafted_by_step))
    assert texts[0] == texts[1]
    assert any(rounds) and (texts[1][1] or threshold)


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


def test_a_text_ends_where_the_models_does(ids, rounds):
    model = build("llama")
    text = model.generate(ids, **OPTIONS)[0].tolist()
    end = text[len(ids[0]) + 10]
    options = {**OPTIONS, "eos_token_id": end, "pad_token_id": end}
    with an_engine(model, 0) as engine:
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))
        assert list(engine.stream(ids, **options)) == model.generate(ids, **options)[0, len(ids[0]) :].tolist()
    assert rounds


@pytest.mark.parametrize("ends", [[7], [7, 9]])
@pytest.mark.parametrize("seconds", [100.0, -1.0])
def test_a_row_stops_quickly_where_it_stops(ends, seconds):
    criteria = StoppingCriteriaList([EosTokenCriteria(ends), MaxLengthCriteria(8), MaxTimeCriteria(seconds)])
    for limit in (None, 5, 30):
        for token in (3, 7, 9):
            for columns in range(2, 10):
                batch = Batch(torch.full((1, columns), token), [1], criteria, limit)
                assert batch.stops_quickly(token) == bool(batch.stops([0]))
                quick = batch.cut_short[0]
                assert quick == (limit == 5 and columns >= 6 and token not in ends and columns < 8 and seconds > 0)


def test_weights_that_are_exchanged_are_noticed(ids):
    """A graph would go on reading where the old ones were."""
    model = build("llama")
    with an_engine(model) as engine:
        assert fused.still_fused(engine.window)
        for weight in (model.model.layers[1].mlp.up_proj.weight, model.lm_head.weight):
            held, weight.data = weight.data, weight.data.clone()
            assert not fused.still_fused(engine.window)
            weight.data = held
        assert fused.still_fused(engine.window)


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


def test_drafts_that_never_stand_are_tried_once_in_a_while():
    length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    chosen = [length.choose(7) for _ in range(2 * TRY_AGAIN)]
    assert 0 < len([drafts for drafts in chosen if drafts]) <= 2
