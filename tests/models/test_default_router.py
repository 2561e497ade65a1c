"""The router file that comes with the package, on the model it was made for."""

from __future__ import annotations

import pytest
import torch

import TIDE
from runners import Recording
from TIDE.calibration.self_texts import builtin_prompts
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.kernels.reference.noise import noise

PROMPTS = ["Why is the sea salty?", "Write a short email to a friend about a bicycle.", "What is 17 + 25?"]


def asked(tokenizer, texts: list[str]):
    """Questions side by side, after fewer words of the system than the template has: half of the time is theirs."""
    chats = [[{"role": "system", "content": "Help."}, {"role": "user", "content": text}] for text in texts]
    return tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True)


def test_it_is_small_whole_and_says_how_it_was_made():
    path = TIDE.default_router()
    assert path.stat().st_size <= 12_000_000
    file = TIDE.RouterFile.load(path)
    assert file.strategy == "memory"
    assert list(file.exits) == [0]
    assert file.fingerprint is not None
    assert file.fingerprint.name == "SmolLM2-135M-Instruct"
    assert file.facts["texts"] == 4 * file.config["calibration_samples"]


@pytest.fixture(scope="module")
def opened(embedded):
    """The engine of all tests here: opening it takes a second."""
    with TIDE.TIDE(embedded.model, TIDE.default_router()) as engine:
        yield engine


@pytest.fixture
def engine(opened):
    """The engine, knowing nothing yet of what drafts cost on this machine."""
    opened.scheduler = Scheduler()
    return opened


def answer_alike(engine, tokenizer, texts: list[str], new_tokens: int) -> tuple[int, int]:
    """Have questions answered one by one; the model answers them side by side, which is quicker. (drafted, accepted)."""
    inputs = asked(tokenizer, texts)
    options = dict(max_new_tokens=new_tokens, do_sample=False)
    expected, drafted, accepted = engine.model.generate(**inputs, **options), 0, 0
    for text, ids, mask, own in zip(texts, inputs["input_ids"], inputs["attention_mask"], expected, strict=True):
        found = engine.generate(ids[mask.bool()][None], **options)[0]
        written = own[mask.argmax() :]
        assert torch.equal(found, written[: len(found)]), text
        assert set(written[len(found) :].tolist()) <= {tokenizer.pad_token_id}
        drafted += engine.last_stats.drafted
        accepted += engine.last_stats.accepted
    return drafted, accepted


@pytest.mark.real
def test_its_exits_are_right_more_often_than_not_and_the_text_stays_the_models(engine, embedded, monkeypatch):
    monkeypatch.setattr(DraftPlanner, "_exit_pays", lambda *_: True)  # no rests, however busy the machine is
    with engine.using(TIDE.TIDEConfig(exit_threshold=0.5, max_pending=3)):
        drafted, accepted = answer_alike(engine, embedded.tokenizer, PROMPTS, 32)
    assert drafted > 20
    assert accepted > drafted / 2


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize("part", range(4))
def test_forty_prompts_are_answered_as_the_model_answers_them(engine, embedded, part):
    """Of all kinds, drafting as it pays on this machine. Parts, for the sake of several workers."""
    texts = [text for own in builtin_prompts().values() for text in own if "{text}" not in text][part * 13 :: 53][:10]
    assert len(texts) == 10
    drafted, _ = answer_alike(engine, embedded.tokenizer, texts, 9)
    assert drafted > 0


@pytest.mark.real
def test_another_model_is_refused_by_name(llama):
    with pytest.raises(ValueError, match=r"was made for SmolLM2-135M-Instruct .* this model is .*LlamaForCausalLM"):
        TIDE.TIDE(llama, TIDE.default_router())


@pytest.mark.full
@pytest.mark.real
@pytest.mark.invariant(9)
@pytest.mark.parametrize("temperature", [0.4, 0.7, 1.0])
def test_twenty_prompts_are_sampled_alike_with_exits_and_without(engine, embedded, temperature):
    """At 0.7 those with exits are alone, which takes longer. Near-ties may then fall either way: they are counted and shown."""
    texts = [text for own in builtin_prompts().values() for text in own if "{text}" not in text][7::25][:20]
    inputs = asked(embedded.tokenizer, texts)
    options = dict(do_sample=True, temperature=temperature, top_p=0.9, top_k=0, max_new_tokens=8)
    ties, accepted = 0, 0
    with engine.using(engine.config, exits=False):
        engine.generate(**inputs, seed=list(range(20)), **options)
    expected, found = engine.last_rows, []
    engine.scheduler = Recording(then=1)  # whether drafts pay on this machine or not
    if temperature == 0.7:
        for seed, row in enumerate(expected):
            engine.generate(torch.tensor([row.tokens[: row.prompt]]), seed=seed, **options)
            found += engine.last_rows
    else:
        engine.generate(**inputs, seed=list(range(20)), **options)
        found = engine.last_rows
    for seed, (row, other) in enumerate(zip(expected, found, strict=True)):
        accepted += other.stats.accepted
        if other.new_tokens != row.new_tokens:
            ties += 1
            apart = gap(engine, row.tokens, other.tokens, seed, options)
            print(f"{texts[seed]!r}: scores {apart} apart")
            assert apart < 1e-4
    assert accepted > 10 and ties <= 1


def gap(engine, one: list[int], other: list[int], seed: int, options: dict) -> float:
    """How far apart the scores of two tokens are, noise included, where texts part."""
    at = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    asked = {**options, "max_new_tokens": 1, "return_dict_in_generate": True, "output_scores": True}
    with engine.using(engine.config, exits=False):
        scores = engine.generate(torch.tensor([one[:at]]), seed=seed, **asked).scores[0][0]
    tokens = torch.tensor([one[at], other[at]])
    noised = scores[tokens] + noise(torch.tensor(seed), torch.tensor(at), tokens)
    return float((noised[0] - noised[1]).abs())
