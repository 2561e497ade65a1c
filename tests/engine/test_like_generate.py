"""`engine.generate` takes prompts in every way `model.generate` does, and answers in every form it does."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import BatchEncoding, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation import GenerateDecoderOnlyOutput, RepetitionPenaltyLogitsProcessor

from families import CONTEXT, build
from policies import Everyone, Knowing, texts_of
from runners import as_it_is, on_references
from TIDE import TIDE, Conversation, TIDEConfig

GREEDY = dict(do_sample=False, max_new_tokens=12)
ENDLESS = dict(GREEDY, eos_token_id=None, pad_token_id=0)


@pytest.fixture
def expected(llama, prompts):
    ids, mask = prompts
    return llama.generate(ids, attention_mask=mask, **GREEDY)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_may_be_passed_in_every_way(llama, prompts, expected):
    """By any name, as a tokenizer gives them, or not at all: then the text begins with the model's first token."""
    (ids, mask), encoding = prompts, BatchEncoding(dict(zip(("input_ids", "attention_mask"), prompts, strict=True)))
    with TIDE(llama, Everyone(2)) as engine:
        for given in (dict(inputs=ids, attention_mask=mask), dict(encoding), dict(inputs=encoding)):
            assert torch.equal(engine.generate(**given, **GREEDY), expected)
        assert list(engine.stream(inputs=ids[2:], **GREEDY)) == expected[2, ids.shape[1] :].tolist()
        assert torch.equal(engine.generate(**GREEDY), llama.generate(**GREEDY))
        with pytest.raises(TypeError, match=r"found \['input_ids'\] twice"):
            engine.generate(ids, input_ids=ids, **GREEDY)


def test_prompts_may_be_embeddings(each_kind, prompts):
    ids, mask = prompts
    embeds, options = each_kind.get_input_embeddings()(ids).detach(), dict(ENDLESS, attention_mask=mask)
    if each_kind.config.model_type.startswith("gemma4"):
        with TIDE(each_kind) as engine, pytest.raises(ValueError, match="looks up token ids in every layer"):
            engine.generate(inputs_embeds=embeds, **options)
        return
    options["max_new_tokens"] = 6
    expected = each_kind.generate(inputs_embeds=embeds, **options)
    for policy in (None, Everyone(0, 2)):
        with TIDE(each_kind, policy) as engine:
            assert torch.equal(engine.generate(inputs_embeds=embeds, **options), expected)
    with TIDE(each_kind, Everyone(1, 3)) as engine:
        assert torch.equal(engine.generate(ids, inputs_embeds=embeds, **options), torch.cat([ids, expected], 1))


def test_processors_and_criteria_do_not_see_prompts_that_are_embeddings(llama, prompts):
    ids, mask = prompts
    embeds = llama.get_input_embeddings()(ids).detach() * 1.1
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=16, no_repeat_ngram_size=2, eos_token_id=[40, 41, 42])
    for more in ({}, dict(repetition_penalty=1.3), dict(min_new_tokens=9), dict(max_new_tokens=None, max_length=20)):
        expected = llama.generate(inputs_embeds=embeds, **options | more)
        with TIDE(llama, Everyone(0, 2)) as engine:
            assert torch.equal(engine.generate(inputs_embeds=embeds, **options | more), expected)


def test_embeddings_are_not_taken_for_another_text_of_a_conversation(llama, prompts):
    ids = prompts[0][2:]
    embeds = llama.get_input_embeddings()(ids).detach()
    with TIDE(llama) as engine:
        conversation = Conversation(engine)
        for scale in (1.0, -1.0):
            expected = llama.generate(inputs_embeds=scale * embeds, **ENDLESS)
            assert list(conversation.stream(inputs_embeds=scale * embeds, **ENDLESS)) == expected[0].tolist()


@pytest.mark.parametrize(
    ("embeds", "ids", "message"),
    [
        (torch.zeros(1, 4, 7), None, r"expected inputs_embeds of shape \(rows, tokens, 64\), found \(1, 4, 7\)"),
        ([1, 2], None, "expected inputs_embeds of shape .* found list"),
        (torch.zeros(1, 4, 64), torch.ones(1, 3, dtype=torch.long), r"of the same prompts, \(1, 4\), found \(1, 3\)"),
    ],
)
def test_embeddings_that_cannot_work_are_refused(llama, embeds, ids, message):
    with TIDE(llama) as engine, pytest.raises(ValueError, match=message):
        engine.generate(ids, inputs_embeds=embeds, **GREEDY)


def test_a_mask_with_a_hole_is_called_one(llama):
    ids, mask = torch.ones(2, 5, dtype=torch.long), torch.tensor([[0, 1, 1, 1, 1], [0, 1, 0, 1, 1]])
    with TIDE(llama) as engine:
        for call in (engine.generate, engine):
            with pytest.raises(ValueError, match="has a hole: row 1 is masked at column 2.*leave those tokens out"):
                call(ids, attention_mask=mask)


def test_padding_tokens_inside_a_prompt_need_a_mask(llama):
    ids = torch.tensor([[5, 6, 0, 7]])
    with TIDE(llama) as engine:
        with pytest.raises(ValueError, match="row 0 is masked at column 2.*pass torch.ones_like"):
            engine.generate(ids, **GREEDY)
        options = dict(GREEDY, attention_mask=torch.ones_like(ids))
        assert torch.equal(engine.generate(ids, **options), llama.generate(ids, **options))


def test_max_new_tokens_may_be_a_float(llama, prompts):
    ids, mask = prompts
    for asked in (8.0, 7.5):
        expected = llama.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=asked)
        with TIDE(llama, Everyone(2)) as engine:
            assert torch.equal(engine.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=asked), expected)


def test_rows_that_cannot_end_need_no_padding_token(llama, prompts):
    ids, mask = prompts
    llama.generation_config.pad_token_id = llama.generation_config.eos_token_id = None
    options = dict(GREEDY, attention_mask=mask)
    expected = llama.generate(ids, **options)
    with TIDE(llama, Everyone(2)) as engine:
        assert torch.equal(engine.generate(ids, **options), expected)


# ---- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [("scores",), ("logits",), ("scores", "logits"), ()])
def test_answers_may_come_with_scores_and_logits(llama, prompts, asked):
    ids, mask = prompts
    options = dict(GREEDY, attention_mask=mask, return_dict_in_generate=True, repetition_penalty=1.4)
    options |= {f"output_{name}": True for name in asked}
    expected = llama.generate(ids, **options)
    knowing = Knowing(texts_of(expected.sequences, mask), (0, 2), seed=0, leaves=0.8, right=0.7)
    for policy in (None, Everyone(1, 3), knowing):
        with TIDE(llama, policy) as engine:
            found = engine.generate(ids, **options)
        assert isinstance(found, GenerateDecoderOnlyOutput)
        assert torch.equal(found.sequences, expected.sequences)
        for name in ("scores", "logits"):
            theirs, ours = getattr(expected, name), getattr(found, name)
            assert (ours is None) == (theirs is None) == (name not in asked)
            if name in asked:
                assert len(ours) == len(theirs)
                for one, other in zip(ours, theirs, strict=True):
                    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_scores_of_rows_that_have_ended_are_zeros(llama, prompts):
    ids, mask = prompts
    options = dict(GREEDY, attention_mask=mask, eos_token_id=list(range(40, 60)), pad_token_id=0)
    options |= dict(return_dict_in_generate=True, output_scores=True)
    expected = llama.generate(ids, **options)
    with TIDE(llama, Everyone(2)) as engine:
        found = engine.generate(ids, **options)
    assert torch.equal(found.sequences, expected.sequences)
    new = found.sequences[:, ids.shape[1] :]
    assert bool((new == 0).any())
    for step, scores in enumerate(found.scores):
        for row in range(len(ids)):
            if new[row, step]:
                torch.testing.assert_close(scores[row], expected.scores[step][row], atol=1e-4, rtol=1e-4)
            else:
                assert not scores[row].any()


def test_in_mode_fast_the_logits_are_those_a_token_was_chosen_from(llama, prompts):
    ids = prompts[0][2:]
    options = dict(ENDLESS, return_dict_in_generate=True, output_logits=True)
    with TIDE(llama, Everyone(2), TIDEConfig(mode="fast")) as engine:
        found = engine.generate(ids, **options)
        assert engine.last_stats.exit_rate > 0.5
    chosen = torch.stack([logits[0].argmax() for logits in found.logits])
    assert torch.equal(chosen, found.sequences[0, ids.shape[1] :])


def test_sampled_tokens_come_with_the_scores_they_were_drawn_from(llama, prompts):
    ids = prompts[0][2:]
    options = dict(do_sample=True, temperature=0.5, top_k=5, max_new_tokens=8, return_dict_in_generate=True)
    with TIDE(llama, Everyone(2)) as engine:
        found = engine.generate(ids, **options, output_scores=True, output_logits=True)
    warped = LogitsProcessorList([TemperatureLogitsWarper(0.5)])
    for step, (scores, logits) in enumerate(zip(found.scores, found.logits, strict=True)):
        kept = scores[0].isfinite()
        assert int(kept.sum()) == 5
        torch.testing.assert_close(scores[0][kept], warped(None, logits)[0][kept])
        assert kept[found.sequences[0, ids.shape[1] + step]]


def test_scores_are_dropped_where_no_dict_is_asked_for(llama, prompts, expected):
    ids, mask = prompts
    with TIDE(llama, Everyone(2)) as engine:
        assert torch.equal(engine.generate(ids, attention_mask=mask, **GREEDY, output_scores=True), expected)


@pytest.mark.parametrize("asked", ["output_attentions", "output_hidden_states"])
def test_what_skipped_layers_never_made_is_refused(llama, prompts, asked):
    with TIDE(llama) as engine, pytest.raises(ValueError, match=f"does not pass .'{asked}'. on to the model; use"):
        engine.generate(prompts[0], return_dict_in_generate=True, **{asked: True})


# ---- past the context ------------------------------------------------------------------------------------------------

TABLES = ("gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "opt")  # families whose positions are a table


def test_texts_go_on_past_the_context_where_the_model_can(each_kind, caplog):
    """As far as `model.generate` goes, with a warning; a model that would fail stops, or refuses the prompt."""
    kind = each_kind.config.model_type
    ids = torch.randint(3, 128, (1, CONTEXT - 3), generator=torch.Generator().manual_seed(0))
    options = dict(ENDLESS, max_new_tokens=6)
    with TIDE(each_kind, Everyone(2)) as engine, caplog.at_level(logging.WARNING, logger="TIDE"):
        found = engine.generate(ids, **options)
        if kind in TABLES:
            with pytest.raises((IndexError, RuntimeError)):
                each_kind.generate(ids, **options)
            expected = each_kind.generate(ids, **options | dict(max_new_tokens=3))
            assert f"stopped at the model's context of {CONTEXT} tokens" in caplog.text
            with pytest.raises(ValueError, match=f"the model's context holds {CONTEXT}"):
                engine.generate(found, **options)
        else:
            expected = each_kind.generate(ids, **options)
            warned = [record for record in caplog.records if f"the {CONTEXT} tokens this model was made for" in record.message]
            assert len(warned) == (0 if kind == "bloom" else 1)
            options |= dict(attention_mask=torch.ones_like(found), max_new_tokens=2)
            assert torch.equal(engine.generate(found, **options), each_kind.generate(found, **options))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "linear"])
def test_scaled_ropes_go_on_past_the_context_too(kind):
    model = build("llama", rope_parameters=dict(rope_type=kind, factor=2.0, rope_theta=10000.0))
    ids = torch.randint(3, 128, (1, CONTEXT - 3), generator=torch.Generator().manual_seed(0))
    expected = model.generate(ids, **ENDLESS)
    with TIDE(model, Everyone(2)) as engine:
        assert torch.equal(engine.generate(ids, **ENDLESS), expected)


@pytest.mark.parametrize("place", [as_it_is, on_references])
def test_a_repetition_penalty_counts_padding_as_generate_does(llama, place):
    """Transformers before 5.23 counts it. One row with padding follows one without, whose options are remembered."""
    options = dict(GREEDY, eos_token_id=None, repetition_penalty=30.0)
    pad = int(llama.generate(torch.tensor([[9, 4]]), **options | dict(repetition_penalty=1.0, pad_token_id=0))[0, 2])
    ids, mask = torch.tensor([[pad, pad, 9, 4], [7, 7, 8, 3]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with place(TIDE(llama)) as engine:
        for rows in ([1], [0], [0, 1]):
            asked = dict(options, attention_mask=mask[rows], pad_token_id=pad)
            expected = llama.generate(ids[rows], **asked)
            for _ in range(2):  # the first request begins on the host
                assert torch.equal(engine.generate(ids[rows], **asked), expected)


def test_columns_that_a_penalty_leaves_out_are_those_of_all_rows(llama, prompts):
    """Transformers refuses another number of them, too."""
    ids, mask = prompts
    penalty = RepetitionPenaltyLogitsProcessor(1.3)
    asked = dict(GREEDY, attention_mask=mask, logits_processor=LogitsProcessorList([penalty]))
    with TIDE(llama) as engine:
        expected = engine.generate(ids, **asked)
        for count in (1, len(ids) + 1):
            penalty.prompt_ignore_length = torch.zeros(count, dtype=torch.long)
            with pytest.raises(ValueError, match=rf"prompt_ignore_length of {len(ids)} rows, found {count}"):
                engine.generate(ids, **asked)
        penalty.prompt_ignore_length = torch.zeros(len(ids), dtype=torch.long)
        assert torch.equal(engine.generate(ids, **asked), expected)
