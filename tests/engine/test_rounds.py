"""Rounds, which decode on a GPU without the host between, write the text of `model.generate`.

Here they run on a CPU, with the references in place of the kernels: the same rounds on the same slots, without graphs.
"""

from __future__ import annotations

import functools
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteria

import TIDE
from families import build
from policies import Everyone
from properties import examples
from router_files import a_file
from runners import Recording, on_modules, on_references, why_on_the_host
from TIDE.config import TIDEConfig
from TIDE.engine.cache.slots import Slots
from TIDE.engine.round.device_drafter import DeviceDrafter
from TIDE.engine.round.device_stage import DeviceStage
from TIDE.engine.round.module_prefill import LONGEST, SHORTEST, padded_length
from TIDE.engine.round.round import Launched
from TIDE.engine.round.stop import StopRule
from TIDE.engine.row import RoundResult, Row
from TIDE.engine.runners.snapshot import ModelSnapshot
from TIDE.engine.schedule.acceptance import FIRST_REST, LONGEST_REST
from TIDE.engine.schedule.costs import Costs
from TIDE.engine.schedule.draft_length import DraftLength
from TIDE.kernels import reference

OPTIONS = dict(max_new_tokens=16, do_sample=False, eos_token_id=None)


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0))


def an_engine(model, depth=None, place=on_references, script=(), then=None, strategy="memory", policy=None, **config):
    """An engine with rounds as on a GPU, and at a depth a random head; drafts by a script, if there is one."""
    with TIDE.TIDE(model) as engine:
        if depth is not None:
            policy = a_file(model, strategy, (depth,), 0.0).policy(engine.adapter)
    engine = place(TIDE.TIDE(model, policy, TIDEConfig(**config)))
    engine.scheduler = Recording(script, then)
    return engine


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
    asked = (1, SHORTEST, 33, 64, 65, 80, 81, 1025, LONGEST)
    assert [padded_length(n) for n in asked] == [32, 32, 40, 64, 80, 80, 96, 1280, LONGEST]
    assert padded_length(LONGEST + 1) == LONGEST + 1
    assert all(n <= padded_length(n) <= max(SHORTEST, 1.25 * n) for n in range(1, LONGEST))


@functools.cache
def _known():
    model, ids = build("llama"), torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(1))
    return model, ids, model.generate(ids, **OPTIONS)


@examples(10)
@given(
    lengths=st.lists(st.sampled_from([0, 2, 4, 7]), min_size=8),
    wrong=st.sets(st.integers(0, 60)),
    depth=st.sampled_from([0, 2]),
)
def test_whatever_is_drafted_right_or_wrong(lengths, wrong, depth):
    model, ids, expected = _known()
    text = [*expected[0].tolist(), *range(40)]

    def draft(self, step, most):
        if self.depth:
            self.shallow(slice(step, step + 1), most)
        at = int(self.slots.starts[step, 0]) + 1
        self.slots.tokens[step + 1] = text[at] + (at in wrong)

    with pytest.MonkeyPatch.context() as patch, an_engine(model, depth, script=lengths, then=4, max_pending=7) as engine:
        patch.setattr(DeviceDrafter, "draft", draft)
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        stats = engine.last_stats
        assert stats.accepted + stats.remaining_tokens == stats.total_tokens == OPTIONS["max_new_tokens"]
        assert stats.accepted or not any(lengths) or wrong


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

        with pytest.MonkeyPatch.context() as patch, an_engine(model, depth, script=script, then=2, draft_tree=tree) as engine:
            patch.setattr(Slots, "clear", noting)
            text = engine.generate(ids, do_sample=False, eos_token_id=None, **options)
            (slots,) = engine.runner._free
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


@pytest.fixture
def batch(prompts):
    """Three left-padded prompts."""
    return dict(zip(("input_ids", "attention_mask"), prompts, strict=True))


@pytest.mark.parametrize("strategy", ["none", "lens", "identity", "memory"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_end_at_different_lengths_share_rounds(name, strategy, batch):
    model, width = build(name), batch["input_ids"].shape[1]
    with an_engine(model, None if strategy == "none" else 2, strategy=strategy, then=4, max_pending=7) as engine:
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


def test_rows_that_ended_stand_still(batch):
    """The others go on for as long as they like."""
    model, width = build("llama"), batch["input_ids"].shape[1]
    text = model.generate(**batch, **OPTIONS, pad_token_id=0)[0, width:].tolist()
    options = {**OPTIONS, "max_new_tokens": 80, "eos_token_id": text[0], "pad_token_id": 0}
    with an_engine(model) as engine:
        assert torch.equal(engine.generate(**batch, **options), model.generate(**batch, **options))
        lengths = [len(row.new_tokens) for row in engine.last_rows]
        assert lengths[0] == 1 and max(lengths) > 40
        assert engine.last_stats.total_tokens == sum(lengths)


TOGETHER = {  # what several rows do -> how the engine is made, what is asked for, and why it is done on the host
    "logits": ({}, dict(return_dict_in_generate=True, output_logits=True), "its logits are to be returned"),
    "static modules": (dict(place=on_modules), {}, "its modules run whole rounds for one row at a time"),
}


@pytest.mark.parametrize("what", TOGETHER)
def test_what_rows_cannot_do_in_rounds_is_done_on_the_host_and_said(what, batch):
    model, (made, asked, why) = build("llama"), TOGETHER[what]
    options = {**OPTIONS, "pad_token_id": 0, "max_new_tokens": 8, **asked}
    with an_engine(model, **made) as engine:
        assert why_on_the_host(engine, batch, **options) == why
        torch.manual_seed(0)
        found = engine.generate(**batch, **options)
        assert not engine.scheduler.rounds
        torch.manual_seed(0)
        expected = model.generate(**batch, **options)
        assert torch.equal(getattr(found, "sequences", found), getattr(expected, "sequences", expected))


ALONE = {
    "an ExitPolicy": (dict(policy=Everyone(2)), {}, "its exits are an ExitPolicy of its own"),
    "skipped K/V": (
        dict(depth=2, strategy="identity", mode="fast", kv_cache_strategy="propagate"),
        {},
        "kv_cache_strategy='propagate' writes K/V after every exit",
    ),
    "many exits": (dict(depth=2, mode="fast", max_pending=16), {}, "max_pending=16 is more than a round has room for"),
    "an embedding": (dict(depth=0, strategy="identity"), {}, "its exit predicts from the embedding alone"),
}


@pytest.mark.parametrize("what", ALONE)
def test_what_a_row_cannot_do_in_rounds_is_done_on_the_host_and_said(what, ids):
    made, asked, why = ALONE[what]
    with an_engine(build("llama"), **made) as engine:
        assert why_on_the_host(engine, ids, **{**OPTIONS, **asked}) == why
        engine.generate(ids, **{**OPTIONS, **asked})
        assert not engine.scheduler.rounds
        reasons = {engine.runner.why_not(row) for row in engine.last_rows}
        assert reasons == ({why} if asked else {None})  # what has nothing to do with the row is the plan's


@pytest.mark.parametrize("depth", [None, 0])
def test_the_time_of_rounds_is_given_to_the_prompt_and_to_the_deep_layers(depth, ids):
    """The host does not see what lies between, so a round's time is all of one kind."""
    with an_engine(build("llama"), depth) as engine:
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
    with an_engine(model, 0, script=[4] * 20, max_pending=7) as engine:
        options = dict(stopping_criteria=[Two()])
        assert torch.equal(engine.generate(ids, **OPTIONS, **options), model.generate(ids, **OPTIONS, **options))
        assert engine.scheduler.rounds


def refusing_after(good, monkeypatch):
    """Let the device refuse after so many good rounds; return the drafts of the rounds that were begun."""
    run, ran = DeviceStage.deep_pass, []

    def fails(self, drafted):
        ran.append(drafted)
        if len(ran) > good:
            raise RuntimeError("the card refuses")
        run(self, drafted)

    monkeypatch.setattr(DeviceStage, "deep_pass", fails)
    return ran


@pytest.mark.parametrize("depth", [None, 0, 2])
@pytest.mark.parametrize("good", [0, 1, 5])
def test_where_a_round_fails_the_text_goes_on_by_steps(depth, good, ids, monkeypatch, caplog):
    model, ran = build("llama"), refusing_after(good, monkeypatch)
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
    model, ran = build("llama"), refusing_after(good, monkeypatch)
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
        assert len(engine.runner._free) == 1
        assert engine.runner.store(None).free == engine.runner.store(None).blocks - 1


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


def a_text(length):
    row = Row([1, 2], StopRule(), 4)
    length.begin(row)
    return row


def record(length, row, drafts, accepted, seconds):
    length.saw(row, Launched(list, drafts), RoundResult([], drafts, min(drafts, accepted), made=drafts), seconds)


def lengths_after(accepted, seconds, rounds=60):
    length = DraftLength(Costs())
    row = a_text(length)
    for _ in range(rounds):
        drafts = length.choose([row], 7)
        record(length, row, drafts, accepted, seconds(drafts))
    return lambda most: length.choose([row], most), length


def test_the_length_goes_by_what_stands_and_what_it_takes():
    def a_tenth(drafts):
        return 1 + drafts / 10

    assert lengths_after(7, a_tenth)[0](7) == 7
    assert lengths_after(7, a_tenth)[0](4) == 4
    assert lengths_after(2, a_tenth)[0](7) == 2
    assert lengths_after(7, lambda drafts: 1 + 2 * drafts)[0](7) == 0


def test_drafts_that_never_stand_are_tried_ever_more_rarely():
    _, length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    row = a_text(length)
    tried = [number for number in range(4 * LONGEST_REST) if length.choose([row], 7)]
    assert tried[0] < FIRST_REST
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps == sorted(gaps) and max(gaps) == LONGEST_REST


def test_the_last_rows_of_a_batch_do_not_speak_for_the_next_batch():
    """They are the ones in which drafts were rejected."""
    length = DraftLength(Costs())
    rows = [a_text(length) for _ in range(8)]

    def a_round(own, score):
        drafts = max(1, length.choose(own, 7, 8))
        for row in own:
            length.saw(row, Launched(list, drafts, rows=8), RoundResult([], drafts, 0, scores=[score], made=drafts), 1.0)

    for _ in range(20):
        a_round(rows, 0.9)
    for _ in range(20):
        a_round(rows[-1:], 0.1)
    assert a_text(length).scores[0] > 0.7 > 0.5 > rows[-1].scores[0]


def test_draft_length_adapts_quickly_to_a_new_prompt():
    _, length = lengths_after(0, lambda drafts: 1 + drafts / 10, 200)
    row, chosen = a_text(length), []
    for _ in range(3 * FIRST_REST):
        chosen.append(length.choose([row], 7))
        record(length, row, chosen[-1], chosen[-1], 1 + chosen[-1] / 10)
    assert min(chosen[-FIRST_REST:]) > 2
