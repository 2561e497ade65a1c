"""Bad input loses nothing: a clear error that names the next step, and an engine that goes on."""

from __future__ import annotations

import inspect
import logging
import re

import pytest
import torch
from transformers import GenerationConfig

from families import CONTEXT, build
from policies import Everyone, Knowing
from TIDE import TIDE, TIDEConfig
from TIDE.engine.request.options import ELSEWHERE, OWN

pytestmark = pytest.mark.invariant(10)

OPTIONS = dict(do_sample=False, max_new_tokens=6)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 8), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def engine(llama, ids):
    """An engine that must still write the right text when the test is over."""
    expected = llama.generate(ids, **OPTIONS)
    with TIDE(llama, Everyone(1, 3)) as engine:
        yield engine
        llama.eval()
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
    assert torch.equal(llama.generate(ids, **OPTIONS), expected)


BAD_IDS = {
    "the prompt is empty": torch.zeros(1, 0, dtype=torch.long),
    r"Use input_ids\[None\] for one prompt": torch.tensor([1, 2, 3]),
    "expected input_ids as a tensor of token ids, found str": "Hello",
    r"expected input_ids as a tensor of token ids, found torch.float32": torch.zeros(1, 3),
    "token ids must be from 0 to 127 for this model, found 5 to 128": torch.tensor([[5, 128]]),
    "found -1 to 5": torch.tensor([[5, -1]]),
}


@pytest.mark.parametrize("message", BAD_IDS)
def test_prompts_that_cannot_work_are_refused(engine, message):
    for call in (engine.generate, engine.stream, engine):
        with pytest.raises((ValueError, TypeError), match=message):
            call(BAD_IDS[message])


def test_a_prompt_beyond_a_table_of_positions_is_refused():
    with TIDE(build("gpt2"), Everyone(2)) as engine:
        for call in (engine.generate, engine.stream, engine):
            with pytest.raises(ValueError, match=f"the prompt has 300 tokens and the model's context holds {CONTEXT}. Shorten"):
                call(torch.ones(1, 300, dtype=torch.long))
        full = torch.ones(1, CONTEXT, dtype=torch.long)
        with pytest.raises(ValueError, match="Shorten the prompt"):
            engine.generate(full)
        assert engine(full).logits.shape == (1, CONTEXT, 128)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_generation_stops_cleanly_at_the_end_of_the_context(family, caplog):
    model = build(family)
    ids = torch.randint(3, 128, (2, CONTEXT - 10), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0)
    with TIDE(model, Everyone(2)) as engine, caplog.at_level(logging.WARNING, logger="TIDE"):
        found = engine.generate(ids, do_sample=False, max_new_tokens=50, eos_token_id=None, pad_token_id=0)
    assert torch.equal(found, expected)
    assert f"stopped at the model's context of {CONTEXT} tokens in rows [0, 1]" in caplog.text


def test_a_wrong_draft_at_the_end_of_the_context_is_no_end(caplog):
    """A draft fills the context and is rejected; the token in its place ends the text by itself."""
    model = build("gpt2")
    ids = torch.randint(3, 128, (1, CONTEXT - 3), generator=torch.Generator().manual_seed(0))
    text = model.generate(ids, do_sample=False, max_new_tokens=3, eos_token_id=None, pad_token_id=0)
    end = int(text[0, -2])
    options = dict(do_sample=False, max_new_tokens=50, eos_token_id=end, pad_token_id=0)
    wrong = Knowing([[]], (1,), seed=0, leaves=1.0, right=0.0)
    with TIDE(model, wrong) as engine, caplog.at_level(logging.WARNING, logger="TIDE"):
        assert engine.generate(ids, **options)[0].tolist() == text[0, :-1].tolist()
        assert engine.last_stats.drafted > 0
    assert "stopped at the model's context" not in caplog.text


def test_right_padding_is_refused(engine):
    ids = torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with pytest.raises(ValueError, match="padding_side = 'left'"):
        engine.generate(ids, attention_mask=mask)
    with pytest.raises(ValueError, match="padding_side = 'left'"):
        engine(ids, attention_mask=mask)


def test_an_empty_row_is_refused(engine):
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
    with pytest.raises(ValueError, match="a prompt is empty"):
        engine.generate(torch.ones(2, 4, dtype=torch.long), attention_mask=mask)


def test_a_mask_of_another_shape_is_refused(engine):
    with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
        engine(torch.ones(2, 4, dtype=torch.long), attention_mask=torch.ones(2, 3))


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_are_an_error_not_a_token(engine, llama, ids, do_sample):
    weight = llama.model.norm.weight.data.clone()
    llama.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"logits are NaN.*torch.float32"):
        engine.generate(ids, do_sample=do_sample, max_new_tokens=4)
    llama.model.norm.weight.data.copy_(weight)


def test_a_model_put_into_train_mode_later_is_refused(engine, llama, ids):
    llama.train()
    for call in (engine.generate, engine.stream, engine):
        with pytest.raises(ValueError, match=r"Call model.eval\(\)"):
            call(ids)


def test_an_interruption_inside_a_layer_leaves_engine_and_model_usable(engine, llama, ids):
    """The fixture checks the rest."""

    def interrupt(module, args):
        raise KeyboardInterrupt

    hook = llama.model.layers[2].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(ids, **OPTIONS)
    hook.remove()
    llama.generate(ids, **OPTIONS)


def test_a_stream_that_is_dropped_half_way_does_no_harm(engine, ids):
    stream = engine.stream(ids, do_sample=False, max_new_tokens=40)
    next(stream), next(stream)
    stream.close()


def test_stream_takes_one_prompt(engine):
    with pytest.raises(ValueError, match=r"stream takes one prompt, found 2. Use generate\(..., streamer=...\)"):
        engine.stream(torch.ones(2, 4, dtype=torch.long))


def test_a_closed_engine_says_so(llama, ids):
    engine = TIDE(llama)
    engine.close()
    engine.close()
    for call in (engine.generate, engine.stream, engine):
        with pytest.raises(RuntimeError, match="this engine is closed. Make a new one"):
            call(ids)


@pytest.mark.parametrize("checkpoints", [(4,), (2, 1), (1, 1), (-1,), (1.5,)])
def test_impossible_checkpoints_are_refused(llama, ids, checkpoints):
    with pytest.raises(ValueError, match=r"rising depths from 0 to 3 .* found"):
        TIDE(llama, Everyone(*checkpoints))
    TIDE(llama).close()  # the refused one left no doors behind


def test_a_score_of_the_wrong_shape_is_refused(llama, ids):
    class Odd(Everyone):
        def score(self, candidates):
            return torch.ones(len(candidates.rows), 2)

    with TIDE(llama, Odd(1)) as engine, pytest.raises(ValueError, match=r"expected \(1,\), found \(1, 2\)"):
        engine.generate(ids, **OPTIONS)


def test_what_is_no_exit_policy_is_refused(llama):
    with pytest.raises(TypeError, match="router must be a path, a RouterFile, an ExitPolicy, or None"):
        TIDE(llama, 3)


def test_what_is_no_config_is_refused(llama):
    with pytest.raises(TypeError, match=r"config must be a TIDEConfig, found dict. Use TIDEConfig\(mode='fast'\)"):
        TIDE(llama, None, {"mode": "fast"})


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
def test_filling_in_is_refused_where_a_layer_keeps_a_running_state(family, strategy):
    model = build(family)
    with pytest.raises(
        ValueError, match=r"layers \[0, 2\] of this model keep a running state .* Use kv_cache_strategy='exact'"
    ):
        TIDE(model, Everyone(1), TIDEConfig(mode="fast", kv_cache_strategy=strategy))
    TIDE(model).close()


def test_rows_without_a_padding_token_are_refused(ids):
    model = build("llama")
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    model.config.pad_token_id = model.config.eos_token_id = None
    with TIDE(model) as engine:
        with pytest.raises(ValueError, match="Pass pad_token_id=..., or one row per call"):
            engine.generate(ids.expand(2, -1), max_new_tokens=3, max_time=60.0)
        assert engine.generate(ids, max_new_tokens=3).shape == (1, 11)


WRONG_OPTIONS = {
    "max_new_tokens must be a whole number of tokens, found 'ten'. Use max_new_tokens=64.": dict(max_new_tokens="ten"),
    "max_new_tokens must be a whole number of tokens, found [4]. Use": dict(max_new_tokens=[4]),
    "max_new_tokens must be a whole number of tokens, found True. Use": dict(max_new_tokens=True),
    "max_length must be a whole number of tokens, found '9'. Use max_length=64.": dict(max_length="9"),
    "stopping_criteria must be a list of callables, found function. Use stopping_criteria=[...]": dict(
        stopping_criteria=lambda ids, scores: True
    ),
    "logits_processor must be a list of callables, found function. Use logits_processor=[...]": dict(
        logits_processor=lambda ids, scores: scores
    ),
    "logits_processor must be a list of callables, found ['x']. Use": dict(logits_processor=["x"]),
    "there is no option max_tokens here: use max_new_tokens.": dict(max_tokens=4),
    "there is no option n here: use num_return_sequences.": dict(n=2),
    "there is no option stop here: use stop_strings, with tokenizer=...": dict(stop=["."]),
    "there is no option repeat_penalty here: use repetition_penalty.": dict(repeat_penalty=1.1),
}


@pytest.mark.parametrize("message", WRONG_OPTIONS)
def test_options_that_cannot_work_are_refused_before_anything_runs(engine, ids, message):
    config = GenerationConfig()
    with pytest.raises(TypeError, match=re.escape(message)):
        engine.generate(ids, **WRONG_OPTIONS[message])
    for name, value in WRONG_OPTIONS[message].items():
        if hasattr(config, name):
            setattr(config, name, value)
            with pytest.raises(TypeError, match=re.escape(message)):
                engine.generate(ids, config)


def test_options_of_other_servers_lead_to_those_of_generate(llama):
    """A name that transformers takes must not be in the table."""
    known = {*vars(GenerationConfig()), *inspect.signature(llama.generate).parameters, *OWN}
    assert not known & {*ELSEWHERE}
    assert {re.split(r"\W", instead)[0] for instead in ELSEWHERE.values()} <= known | {"inputs", "engine"}


@pytest.mark.parametrize("streamer", [print, [], torch])
def test_what_is_no_streamer_is_refused_before_anything_runs(engine, ids, streamer):
    with pytest.raises(TypeError, match=r"a streamer has the methods put and end, found \w+. Use transformers.TextStreamer"):
        engine.generate(ids, streamer=streamer, **OPTIONS)


def test_a_model_or_a_prompt_without_values_is_refused(ids, llama):
    with torch.device("meta"):
        empty = build("llama")
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has no weights: .* device meta. Load it with"):
        TIDE(empty)
    with TIDE(llama) as engine, pytest.raises(TypeError, match="found some on the device meta, which have no values"):
        engine.generate(ids.to("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits_on_a_cpu_is_told_about_the_fast_path_once_per_engine(dtype, llama, ids, caplog):
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING), TIDE(llama.to(dtype)) as engine:
            engine.generate(ids, **OPTIONS)
        (record,) = caplog.records
        name, said = str(dtype).removeprefix("torch."), record.getMessage()
        assert said.startswith(f"no compiled layers: compiled layers on cpu are for float32, and the model is {name}, so")
        assert "model.float()" in said and "dtype=torch.float32" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING), TIDE(llama.float()) as engine:
        engine.generate(ids, **OPTIONS)
    assert not caplog.records


def test_a_backend_that_was_chosen_needs_no_word_about_the_fast_path(llama, caplog, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    with caplog.at_level(logging.WARNING):
        TIDE(llama.bfloat16()).close()
    assert not caplog.records
