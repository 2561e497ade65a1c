"""`generate` takes what people pass to `model.generate` and does the same with it, drafts or not."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

from families import build
from policies import Everyone, Knowing, texts_of
from TIDE import TIDE, TIDEConfig


class No7(LogitsProcessor):
    """Forbids a token, and the token after each even one: depends on the text so far."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 7] = -torch.inf
        scores[input_ids[:, -1] % 2 == 0, :20] = -torch.inf
        return scores


class EndsWith(StoppingCriteria):
    """Stops after a token divisible by a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % self.number == 0


GREEDY = dict(do_sample=False, max_new_tokens=16)
ASKED = {
    "max_new_tokens": GREEDY,
    "max_length": dict(do_sample=False, max_length=20),
    "repetition_penalty": dict(GREEDY, repetition_penalty=1.5),
    "no_repeat_ngram_size": dict(GREEDY, no_repeat_ngram_size=2),
    "eos list": dict(GREEDY, eos_token_id=list(range(40, 60)), pad_token_id=0),
    "min_new_tokens": dict(GREEDY, eos_token_id=list(range(40, 60)), pad_token_id=0, min_new_tokens=8),
    "min_length": dict(GREEDY, eos_token_id=list(range(40, 60)), pad_token_id=0, min_length=18),
    "bad_words_ids": dict(GREEDY, bad_words_ids=[[i] for i in range(30, 70)]),
    "suppress_tokens": dict(GREEDY, suppress_tokens=list(range(64))),
    "forced_eos_token_id": dict(GREEDY, forced_eos_token_id=2),
    "generation_config": dict(
        generation_config=GenerationConfig(max_new_tokens=9, do_sample=False, repetition_penalty=1.2, pad_token_id=0)
    ),
    "logits_processor": dict(GREEDY, logits_processor=LogitsProcessorList([No7()])),
    "stopping_criteria": dict(GREEDY, stopping_criteria=StoppingCriteriaList([EndsWith(5)]), eos_token_id=2, pad_token_id=0),
    "max_new_tokens 1": dict(do_sample=False, max_new_tokens=1),
    "use_cache False": dict(GREEDY, use_cache=False),
}


@pytest.mark.parametrize("asked", ASKED)
def test_greedy_options_do_what_they_do_in_generate(llama, prompts, asked):
    ids, mask = prompts
    expected = llama.generate(ids, attention_mask=mask, **ASKED[asked])
    texts = texts_of(expected, mask)
    for policy in (None, Everyone(1, 3), Knowing(texts, (0, 2), seed=0, leaves=0.8, right=0.8)):
        with TIDE(llama, policy, TIDEConfig(compaction_threshold=1.0)) as engine:
            assert torch.equal(engine.generate(ids, attention_mask=mask, **ASKED[asked]), expected)


def test_the_models_own_generation_config_is_followed(llama, prompts):
    ids, mask = prompts
    llama.generation_config.max_new_tokens = 7
    llama.generation_config.repetition_penalty = 1.7
    expected = llama.generate(ids, attention_mask=mask)
    with TIDE(llama, Everyone(2)) as engine:
        assert torch.equal(engine.generate(ids, attention_mask=mask), expected)


def test_a_missing_attention_mask_is_worked_out_as_generate_does(llama, prompts):
    ids, _ = prompts
    expected = llama.generate(ids, do_sample=False, max_new_tokens=8)
    with TIDE(llama, Everyone(2)) as engine:
        assert torch.equal(engine.generate(ids, do_sample=False, max_new_tokens=8), expected)


def test_rows_are_padded_with_the_end_token_where_there_is_no_other(llama, prompts):
    ids, mask = prompts
    llama.generation_config.pad_token_id = llama.config.pad_token_id = None
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=16, eos_token_id=list(range(40, 60)))
    expected = llama.generate(ids, **options)
    assert 40 in expected[:, 12:]
    with TIDE(llama, Everyone(2)) as engine:
        assert torch.equal(engine.generate(ids, **options), expected)


def test_several_samples_per_prompt(llama, prompts):
    """Row i is drawn with the i-th seed, as it would be alone."""
    ids, mask = prompts
    options = dict(do_sample=True, max_new_tokens=8, top_k=20, eos_token_id=None, pad_token_id=0)
    with TIDE(llama) as engine:
        found = engine.generate(ids, attention_mask=mask, num_return_sequences=2, seed=7, **options)
        assert found.shape == (2 * len(ids), ids.shape[1] + 8)
        seeds = [row.stats.seed for row in engine.last_rows]
        for row, seed in enumerate(seeds):
            prompt = ids[row // 2][mask[row // 2].bool()][None]
            alone = engine.generate(prompt, seed=seed, **options)[0, prompt.shape[1] :]
            assert torch.equal(found[row, ids.shape[1] :], alone)
    assert len({tuple(text) for text in found[:, ids.shape[1] :].tolist()}) == len(found)


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list] = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append(["end"])


@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_what_generate_gives_it(llama, prompts, rows):
    ids, mask = prompts[0][-rows:], prompts[1][-rows:]
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=list(range(40, 60)), pad_token_id=0)
    expected = Recorder()
    texts = llama.generate(ids, streamer=expected, **options)
    known = texts_of(texts, mask)
    for policy in (None, Knowing(known, (1, 2), seed=0, leaves=0.8, right=0.7)):
        found = Recorder()
        with TIDE(llama, policy) as engine:
            engine.generate(ids, streamer=found, **options)
        assert found.got == expected.got


def test_stream_yields_only_verified_tokens_and_each_as_it_is_verified(llama, prompts):
    """Drafts that are always wrong never show; what is out is what the stats count, not more is computed."""
    ids = prompts[0][2:]
    expected = llama.generate(ids, do_sample=False, max_new_tokens=12)[0, 12:].tolist()
    with TIDE(llama, Knowing([[]], (2,), seed=0, leaves=1.0, right=0.0), TIDEConfig(max_pending=3)) as engine:
        for count, token in enumerate(engine.stream(ids, do_sample=False, max_new_tokens=12), start=1):
            assert token == expected[count - 1]
            assert engine.last_stats.total_tokens == count
        assert engine.last_stats.drafted > engine.last_stats.accepted


def test_two_streams_may_take_turns(llama, prompts):
    first, second = prompts[0][2:], prompts[0][2:].flip(1)
    with TIDE(llama, Everyone(1)) as engine:
        expected = [engine.generate(ids, do_sample=False, max_new_tokens=8)[0, 12:].tolist() for ids in (first, second)]
        streams = [engine.stream(ids, do_sample=False, max_new_tokens=8) for ids in (first, second)]
        found = list(zip(*streams, strict=True))
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected


REFUSED = {
    "beam search": dict(num_beams=2),
    "prompt-lookup decoding": dict(prompt_lookup_num_tokens=2),
    "position_ids": dict(position_ids=torch.zeros(1, 2, dtype=torch.long)),
    "past_key_values": dict(past_key_values=object()),
    "assistant_model": dict(assistant_model=object()),
    "output_attentions": dict(output_attentions=True, return_dict_in_generate=True),
    "classifier-free guidance": dict(guidance_scale=2.0),
    "constrained beam search": dict(force_words_ids=[[5]]),
    "token healing": dict(token_healing=True),
    "SynthID": dict(watermarking_config=SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=3)),
}


@pytest.mark.parametrize("asked", REFUSED)
def test_what_is_not_supported_is_refused_with_the_alternative(llama, prompts, asked):
    ids, mask = prompts
    with TIDE(llama) as engine:
        with pytest.raises(ValueError, match="use model.generate for it"):
            engine.generate(ids, attention_mask=mask, max_new_tokens=4, **REFUSED[asked])
        engine.generate(ids, attention_mask=mask, max_new_tokens=2)


def only_odd(row, text):
    return list(range(1, 128, 2))


@pytest.mark.parametrize(
    "option",
    [dict(encoder_no_repeat_ngram_size=2), dict(encoder_repetition_penalty=2.0), dict(prefix_allowed_tokens_fn=only_odd)],
)
def test_what_looks_at_all_rows_together_takes_one_row(llama, prompts, option):
    ids, mask = prompts
    with TIDE(llama, Everyone(2)) as engine:
        with pytest.raises(ValueError, match="Pass one row per call"):
            engine.generate(ids, attention_mask=mask, max_new_tokens=4, **option)
        expected = llama.generate(ids[2:], do_sample=False, max_new_tokens=8, **option)
        assert torch.equal(engine.generate(ids[2:], do_sample=False, max_new_tokens=8, **option), expected)


@pytest.mark.parametrize(("option", "value"), [("penalty_alpha", 0.6), ("dola_layers", "low")])
def test_modes_that_moved_out_of_transformers_are_refused(llama, prompts, option, value):
    with TIDE(llama) as engine, pytest.raises(ValueError, match="use model.generate for it|trust_remote_code"):
        engine.generate(prompts[0], attention_mask=prompts[1], max_new_tokens=4, top_k=4, **{option: value})


def test_an_unknown_option_is_refused(llama, prompts):
    with TIDE(llama) as engine, pytest.raises(ValueError, match="max_new_tokenz"):
        engine.generate(prompts[0], attention_mask=prompts[1], max_new_tokenz=4)


def test_fast_mode_without_exits_is_the_model(prompts):
    ids, mask = prompts
    model = build("gemma2")
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
    with TIDE(model, None, TIDEConfig(mode="fast")) as engine:
        assert torch.equal(engine.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=8), expected)


@pytest.mark.full
@pytest.mark.real
def test_stop_strings_and_text_streamers_work_on_the_embedded_model(embedded):
    model, tokenizer = embedded
    inputs = tokenizer("Apples, pears, plums, and", return_tensors="pt")
    options = dict(inputs, do_sample=False, max_new_tokens=24, stop_strings=[",", "."], tokenizer=tokenizer)
    expected = model.generate(**options)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    with TIDE(model, Everyone(25)) as engine:
        found = engine.generate(**options, streamer=streamer)
    assert torch.equal(found, expected)
    assert "".join(streamer) == tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :])
    with TIDE(model) as engine, pytest.raises(ValueError, match="pass tokenizer="):
        engine.generate(**inputs, stop_strings=["."])
    del options["stop_strings"]
    config = GenerationConfig(stop_strings=[",", "."], max_new_tokens=24, do_sample=False)
    with TIDE(model) as engine:
        assert torch.equal(engine.generate(**options, generation_config=config), expected)
        model.generation_config.stop_strings = [",", "."]
        assert torch.equal(engine.generate(**options), expected)
    assert config.stop_strings == model.generation_config.stop_strings == [",", "."]
    model.generation_config.stop_strings = None
