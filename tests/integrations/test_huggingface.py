"""TIDE inside Hugging Face code: `model.generate` with our decoding, its streamers, and pipelines."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import TextIteratorStreamer, pipeline

import TIDE
from families import build
from policies import Everyone

OPTIONS = dict(max_new_tokens=20, do_sample=False)


@pytest.fixture
def engine(llama):
    with TIDE.TIDE(llama, Everyone(2)) as engine:
        yield engine


def test_generate_decodes_with_the_engine(engine, prompts):
    ids, mask = prompts
    expected = engine.model.generate(ids, attention_mask=mask, **OPTIONS)
    asked = dict(attention_mask=mask, custom_generate=TIDE.custom_generate, tide=engine)
    assert torch.equal(engine.model.generate(ids, **asked, **OPTIONS), expected)
    assert engine.last_stats.drafted > 0


def test_generate_samples_with_the_engines_seed(engine, prompts):
    ids, options = prompts[0][2:], dict(max_new_tokens=12, do_sample=True, top_k=5)
    asked = dict(custom_generate=TIDE.custom_generate, tide=engine)
    expected = engine.generate(ids, seed=3, **options)
    assert torch.equal(engine.model.generate(ids, seed=3, **asked, **options), expected)
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(engine.model.generate(ids, **asked, **options))
    assert torch.equal(*drawn)


def test_generate_takes_the_salt_of_shared_prompts(engine):
    ids, asked = torch.tensor([[5, 6, 7]]), dict(custom_generate=TIDE.custom_generate, tide=engine, **OPTIONS)
    engine.model.generate(ids, cache_salt="alice", **asked)
    assert engine.last_rows[0].salt == "alice"
    engine.model.generate(ids, **asked)
    assert engine.last_rows[0].salt is None
    with pytest.raises(ValueError, match="cache_salt must be a string, found 7"):
        engine.model.generate(ids, cache_salt=7, **asked)


def test_settings_without_a_token_to_draw_are_refused_here_too(engine, prompts):
    asked = dict(custom_generate=TIDE.custom_generate, tide=engine, max_new_tokens=4, do_sample=True, top_p=0.0)
    with pytest.raises(ValueError, match="top_p must be a number above 0 and at most 1, found 0.0"):
        engine.model.generate(prompts[0][2:], **asked)


def test_streamers_get_every_token_and_the_end(engine, plain):
    inputs = plain("hello there", return_tensors="pt")
    texts = []
    for asked in ({}, dict(custom_generate=TIDE.custom_generate, tide=engine)):
        streamer = TextIteratorStreamer(plain, timeout=240)
        options = dict(input_ids=inputs["input_ids"], streamer=streamer, **asked, **OPTIONS)
        worker = threading.Thread(target=engine.model.generate, kwargs=options)
        worker.start()
        texts.append("".join(streamer))
        worker.join()
    assert texts[0] == texts[1] and len(texts[0]) > len("hello there")


def test_engines_of_another_model_and_beam_search_are_refused(engine, llama):
    ids = torch.tensor([[5, 6, 7]])
    with pytest.raises(TypeError, match="custom_generate needs an engine: .* found NoneType for tide"):
        llama.generate(ids, custom_generate=TIDE.custom_generate, **OPTIONS)
    with pytest.raises(ValueError, match="the engine belongs to another LlamaForCausalLM"):
        build("llama").generate(ids, custom_generate=TIDE.custom_generate, tide=engine, **OPTIONS)
    with pytest.raises(ValueError, match="does not do beam search"):
        llama.generate(ids, custom_generate=TIDE.custom_generate, tide=engine, num_beams=2, max_new_tokens=4)
    assert llama.generate(ids, custom_generate=TIDE.custom_generate, tide=engine, **OPTIONS).shape == (1, 23)


def test_a_pipeline_writes_what_transformers_own_writes(engine, chatty):
    ours = TIDE.pipeline(engine, chatty)
    theirs = pipeline("text-generation", model=engine.model, tokenizer=chatty)
    for asked in ("some text", [{"role": "user", "content": "hi"}]):
        expected = theirs(asked, max_new_tokens=10, do_sample=False)
        engine.last_stats.drafted_by_step.clear()
        assert ours(asked, max_new_tokens=10, do_sample=False) == expected
        assert engine.last_stats.drafted > 0
