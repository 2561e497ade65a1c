"""Rounds, which decode on a GPU without the host between, write the text of `model.generate`.

Here they run on a CPU, with the references in place of the kernels: the same rounds on the same slots, without graphs.
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
from runners import Recording, on_modules, on_references
from TIDE.config import TIDEConfig
from TIDE.engine.round.device_drafter import DeviceDrafter
from TIDE.engine.round.device_stage import DeviceStage
from TIDE.engine.round.prefill import LONGEST, MIN_PREFILL, padded_length
from TIDE.engine.row import RoundResult
from TIDE.engine.runners.snapshot import ModelSnapshot
from TIDE.engine.runners.static_modules import StaticModuleRunner
from TIDE.engine.schedule.acceptance import FIRST_REST, LONGEST_REST
from TIDE.engine.schedule.costs import Costs
from TIDE.engine.schedule.draft_length import DraftLength
from TIDE.kernels import reference

OPTIONS = dict(max_new_tokens=24, do_sample=False, eos_token_id=None)


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0))


def an_engine(model, depth=None, place=on_references, script=(), then=None, **config):
    """An engine with rounds as on a GPU, and at a depth a random memory head; drafts by a script, if there is one."""
    policy = None
    with TIDE.TIDE(model) as engine:
        if depth is not None:
            policy = a_file(model, "memory", (depth,), 0.0).policy(engine.adapter)
    engine = place(TIDE.TIDE(model, policy, TIDEConfig(**config)))
    engine.scheduler = Recording(script, then)
    return engine


ROUNDS = ["llama", "mistral", "qwen2", "qwen3", "phi", "phi3", "gemma", "gemma2", "gemma3", "granite", "smollm3"]
ROUNDS += ["olmo2", "olmo3", "starcoder2"]


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("depth", [None, 0, 2])
def test_the_text_is_the_models(name, depth, ids):
    model = build(name)
    expected = model.generate(ids, **OPTIONS)
    with an_engine(model, depth) as engine:
        for _ in range(2):  # the second request works on the slots of the first
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
            assert engine.last_stats.total_tokens == OPTIONS["max_new_tokens"]
        assert engine.runner.name == "triton"
        assert len(engine.scheduler.rounds) > 4
        assert any(engine.scheduler.rounds) == (depth is not None)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "opt", "phi", "falcon", "olmo2", "gemma2", "cohere", "mixtral"])
@pytest.mark.parametrize("depth", [None, 2])
def test_families_without_fused_layers_run_their_own(name, depth, ids):
    model = build(name)
    expected = model.generate(ids, **OPTIONS)
    with an_engine(model, depth, place=on_modules) as engine:
        for _ in range(2):
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert isinstance(engine.runner, StaticModuleRunner)
        assert len(engine.scheduler.rounds) > 4 and any(engine.scheduler.rounds) == (depth is not None)


def test_a_model_that_does_not_work_on_a_static_cache_runs_as_it_is(ids, caplog):
    model = build("gpt_neo")  # its attention counts the columns it is handed
    with an_engine(model, place=on_modules) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.runner.name == "modules" and "with a static cache its states are" in engine.backend
    assert "runs as it is, without compiled layers or graphs" in caplog.text


@pytest.mark.parametrize("tokens", [1, 33, 64, 65, 200])
@pytest.mark.parametrize("depth", [0, 2])
def test_prompts_are_padded_and_nothing_sees_it(tokens, depth):
    ids = torch.randint(3, 100, (1, tokens), generator=torch.Generator().manual_seed(tokens))
    other = torch.randint(3, 100, (1, 90), generator=torch.Generator().manual_seed(7))
    model = build("llama")
    with an_engine(model, depth) as engine:
        for text in (other, ids):  # what the slots still hold of the first is nothing to the second
            assert torch.equal(engine.generate(text, **OPTIONS), model.generate(text, **OPTIONS))


def test_there_are_four_lengths_to_each_doubling():
    asked = (1, MIN_PREFILL, 33, 64, 65, 80, 81, 1025, LONGEST)
    assert [padded_length(n) for n in asked] == [32, 32, 40, 64, 80, 80, 96, 1280, LONGEST]
    assert padded_length(LONGEST + 1) == LONGEST + 1
    assert all(n <= padded_length(n) <= max(MIN_PREFILL, 1.25 * n) for n in range(1, LONGEST))


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
    text = [*expected[0].tolist(), *range(40)]

    def draft(self, step, most):
        if self.depth:
            self.shallow(step, most)
        at = int(self.slots.starts[step, 0]) + 1
        self.slots.tokens[step + 1] = text[at] + (at in wrong)

    with pytest.MonkeyPatch.context() as patch, an_engine(model, depth, script=lengths, then=4, max_pending=7) as engine:
        patch.setattr(DeviceDrafter, "draft", draft)
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        stats = engine.last_stats
        assert stats.accepted + stats.remaining_tokens == stats.total_tokens == OPTIONS["max_new_tokens"]
        assert stats.accepted or not any(lengths) or wrong


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("lengths", [[0] * 40, [0] * 20 + [4] * 9, [2, 0, 0, 7, *[0] * 17, 2], [4, 0] * 9])
def test_a_memory_head_is_fed_every_token_once_it_is_asked_again(lengths, depth):
    """Whatever rounds there were: what it keeps is what a prefill of the same text leaves."""
    model = build("llama")
    ids = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1))

    def kept(ids, script, **options):
        with an_engine(model, depth, script=script, then=2) as engine:
            text = engine.generate(ids, do_sample=False, eos_token_id=None, **options)
            memory = engine.runner.pool._free[0].memory
        return text, memory, int(memory.fed)

    text, memory, fed = kept(ids, lengths, max_new_tokens=30)
    assert fed >= 9 + 16
    _, expected, length = kept(text[:, :fed], [], max_new_tokens=2)  # rounds begin after the first
    assert length >= fed
    torch.testing.assert_close(memory.before[: fed + 1], expected.before[: fed + 1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(memory.keys[:, :, :fed], expected.keys[:, :, :fed], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(memory.values[:, :, :fed], expected.values[:, :, :fed], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 0.7), (0.0, 0.3), (0.5, 0.7)])
@pytest.mark.parametrize(
    ("strategy", "depth", "vocabulary"),
    [
        ("memory", 0, None),
        ("memory", 2, None),
        ("identity", 2, None),
        ("lens", 2, None),
        ("memory", 0, torch.arange(0, 96, 3)),
    ],
    ids=["memory at 0", "memory at 2", "identity", "lens", "draft vocabulary"],
)
def test_mode_fast_writes_what_it_writes_without_rounds(strategy, depth, vocabulary, threshold, share, ids, monkeypatch):
    """The exit sees the same in both: guesses while drafting, finished states after each round, with drafts or without."""
    monkeypatch.setenv("TIDE_BACKEND", "modules")  # on a CPU they are in 8 bits
    model, config = build("llama"), TIDEConfig(mode="fast", exit_threshold=threshold, max_pending=3, max_exit_share=share)
    with TIDE.TIDE(model) as engine:
        policy = a_file(model, strategy, (depth,), 0.0, vocabulary).policy(engine.adapter)
        policy.exits[depth].router.temperature.fill_(0.02)  # so that scores differ
    texts = []
    for place in (lambda engine: engine, on_references):
        with place(TIDE.TIDE(model, policy, config)) as engine:
            engine.scheduler = Recording()
            texts.append((engine.generate(ids, **OPTIONS)[0].tolist(), engine.last_stats.drafted_by_step))
            rounds = engine.scheduler.rounds
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
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    for place in (lambda engine: engine, on_references):
        with place(TIDE.TIDE(model, policy, config)) as engine:
            texts.append(engine.generate(ids, **OPTIONS)[0].tolist())
    assert texts[0] == texts[1] and set(filled) == {2}


def test_a_threshold_in_mode_exact_decides_what_is_drafted(ids):
    model = build("llama")
    with an_engine(model, 0, exit_threshold=1.0) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.last_stats.accepted == 0


def test_what_rounds_cannot_do_is_done_on_the_host(ids):
    model = build("llama")
    with an_engine(model) as engine:
        engine.generate(ids, **OPTIONS)
        engine.scheduler.rounds.clear()
        options = dict(repetition_penalty=1.3)
        assert torch.equal(engine.generate(ids, **OPTIONS, **options), model.generate(ids, **OPTIONS, **options))
        assert not engine.scheduler.rounds


def test_criteria_of_the_users_own_end_rounds(ids):
    class Two(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return (ids[:, -1:] == ids[:, :-1]).sum(-1) > 1

    model = build("llama")
    with an_engine(model, 0, script=[4] * 20, max_pending=7) as engine:
        options = dict(stopping_criteria=[Two()])
        assert torch.equal(engine.generate(ids, **OPTIONS, **options), model.generate(ids, **OPTIONS, **options))
        assert engine.scheduler.rounds


@pytest.mark.parametrize("depth", [None, 0, 2])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_where_a_round_fails_the_text_goes_on_by_steps(depth, good, ids, monkeypatch, caplog):
    model, run, ran = build("llama"), DeviceStage.deep_pass, []

    def fails(self, drafted):
        ran.append(drafted)
        if len(ran) > good:
            raise RuntimeError("the card refuses")
        run(self, drafted)

    monkeypatch.setattr(DeviceStage, "deep_pass", fails)
    with an_engine(model, depth) as engine:
        for _ in range(2):
            assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.runner.why_not(engine.last_rows[0]) == "a round failed: RuntimeError: the card refuses"
        assert "the card refuses" in engine.backend
    assert len(ran) == good + 1
    assert "is not decoded in rounds: RuntimeError: the card refuses" in caplog.text


@pytest.mark.parametrize("good", [1, 3])
def test_max_exit_share_holds_when_a_round_fails(good, ids, monkeypatch):
    """Exits before the failure count: the row takes them along to the host."""
    model, run, ran = build("llama"), DeviceStage.deep_pass, []

    def fails(self, drafted):
        ran.append(drafted)
        if len(ran) > good:
            raise RuntimeError("the card refuses")
        run(self, drafted)

    monkeypatch.setattr(DeviceStage, "deep_pass", fails)
    with an_engine(model, 2, mode="fast", exit_threshold=0.0, max_exit_share=0.3, max_pending=3) as engine:
        engine.generate(ids, **OPTIONS)
        (row,) = engine.last_rows
    assert len(ran) == good + 1 and row.stats.exited_tokens > 1
    early = 0
    for number, decided in enumerate(row.decided, 1):
        early += decided.depth < 4
        assert early <= 0.3 * number + 1e-9, number


def test_streams_that_are_left_give_their_slots_back(ids):
    model = build("llama")
    with an_engine(model) as engine:
        engine.generate(ids, **OPTIONS)
        for _ in range(3):
            next(engine.stream(ids, **OPTIONS))
        assert len(engine.runner.pool._free) == 1


def test_a_text_ends_where_the_models_does(ids):
    model = build("llama")
    text = model.generate(ids, **OPTIONS)[0].tolist()
    end = text[len(ids[0]) + 10]
    options = {**OPTIONS, "eos_token_id": end, "pad_token_id": end}
    with an_engine(model, 0) as engine:
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))
        assert list(engine.stream(ids, **options)) == model.generate(ids, **options)[0, len(ids[0]) :].tolist()
        assert engine.scheduler.rounds


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


def record(length, drafts, accepted, seconds):
    length.saw(drafts, RoundResult([], drafts, min(drafts, accepted)), seconds)


def lengths_after(accepted, seconds, rounds=60):
    length = DraftLength(Costs())
    for _ in range(rounds):
        drafts = length.choose(7)
        record(length, drafts, accepted, seconds(drafts))
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


def test_draft_length_adapts_quickly_to_a_new_prompt():
    length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    length.begin()
    chosen = []
    for _ in range(3 * FIRST_REST):
        chosen.append(length.choose(7))
        record(length, chosen[-1], chosen[-1], 1 + chosen[-1] / 10)
    assert min(chosen[-FIRST_REST:]) > 2
