"""The heart: whatever exits say, mode "exact" writes what `model.generate` writes."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from families import VOCAB, build
from policies import ByState, Everyone, Knowing, texts_of
from properties import examples
from TIDE import TIDE, TIDEConfig

NEW = 8


def greedy(model, ids, mask=None, **options):
    return model.generate(ids, attention_mask=mask, **{"max_new_tokens": NEW, "do_sample": False, **options})


written: dict = {}


def by_generate(model, prompts):
    """What `model.generate` writes; each worker asks a model once."""
    if model not in written:
        written[model] = greedy(model, *prompts)
    return written[model]


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2"])
def test_tied_heads_are_no_different(family, prompts):
    ids, mask = prompts
    model = build(family, tie_word_embeddings=True)
    with TIDE(model, Everyone(0, 2)) as engine:
        assert torch.equal(greedy(engine, ids, mask), greedy(model, ids, mask))


@pytest.mark.invariant(1)
def test_exits_off_writes_what_generate_writes(any_model, prompts):
    """And texts are varied: otherwise equal ones would say nothing."""
    (ids, mask), expected = prompts, by_generate(any_model, prompts)
    with TIDE(any_model) as engine:
        assert torch.equal(greedy(engine, ids, mask), expected)
    assert max(len(set(row[ids.shape[1] :].tolist())) for row in expected) >= 5


@pytest.mark.invariant(1)
def test_logits_are_the_models(each_kind, prompts):
    ids, mask = prompts
    alone = [each_kind(input_ids=row[keep.bool()][None]).logits[0] for row, keep in zip(ids, mask, strict=True)]
    with TIDE(each_kind, Everyone(0, 2)) as engine:
        found = engine(ids, attention_mask=mask).logits
    for row, expected in enumerate(alone):
        torch.testing.assert_close(found[row, -len(expected) :], expected, atol=2e-4, rtol=1e-4)
        assert not found[row, : -len(expected)].any()


@pytest.mark.invariant(3)
def test_exits_always_taken_and_checked_write_what_generate_writes(each_kind, prompts):
    ids, mask = prompts
    with TIDE(each_kind, Everyone(0, 1, 3)) as engine:
        assert torch.equal(greedy(engine, ids, mask), by_generate(each_kind, prompts))
        assert engine.last_stats.drafted > 0


@pytest.mark.invariant(3)
def test_random_drafts_right_and_wrong_write_what_generate_writes(any_model, prompts):
    ids, mask = prompts
    policy = Knowing(texts_of(by_generate(any_model, prompts), mask), (1, 2, 3), seed=0, leaves=0.6, right=0.7)
    with TIDE(any_model, policy, TIDEConfig(max_pending=5, compaction_threshold=0.5)) as engine:
        assert torch.equal(greedy(engine, ids, mask), by_generate(any_model, prompts))
        assert 0 < engine.last_stats.accepted < engine.last_stats.drafted


tiny = functools.cache(build)


@functools.cache
def _prompts(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, VOCAB, (rows, 10), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return ids * mask, mask


@functools.cache
def _expected(family: str, rows: int) -> torch.Tensor:
    return greedy(tiny(family), *_prompts(rows))


@pytest.mark.invariant(3)
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bloom", "lfm2", "qwen3_next", "gemma4-shared"])
@examples(6)  # of each of seven families
@given(
    checkpoints=st.sets(st.integers(0, 3), min_size=1).map(lambda found: tuple(sorted(found))),
    rows=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    leaves=st.sampled_from([0.0, 0.2, 0.6, 0.95]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    max_pending=st.integers(1, 12),
    compaction=st.sampled_from([0.0, 0.25, 0.67, 1.0]),
)
def test_any_policy_writes_what_generate_writes(family, checkpoints, rows, seed, leaves, right, max_pending, compaction):
    ids, mask = _prompts(rows)
    expected = _expected(family, rows)
    policy = Knowing(texts_of(expected, mask), checkpoints, seed, leaves, right)
    with TIDE(tiny(family), policy, TIDEConfig(max_pending=max_pending, compaction_threshold=compaction)) as engine:
        assert torch.equal(greedy(engine, ids, mask), expected)
        assert leaves or not engine.last_stats.drafted


@pytest.mark.invariant(5)
def test_a_row_in_a_batch_is_the_row_alone_whatever_its_neighbours_do(each_kind, prompts):
    ids, mask = prompts
    alone = [greedy(each_kind, row[keep.bool()][None], max_new_tokens=6) for row, keep in zip(ids, mask, strict=True)]
    known = [text[0].tolist() for text in alone]
    with TIDE(each_kind, Knowing(known, (0, 2), seed=5, leaves=0.7, right=0.6), TIDEConfig(compaction_threshold=1.0)) as engine:
        together = greedy(engine, ids, mask, max_new_tokens=6)
    for row, text in enumerate(alone):
        own = together[row, int((mask[row] == 0).sum()) :]
        assert own[: text.shape[1]].tolist() == text[0].tolist()


@pytest.mark.invariant(5)
@pytest.mark.parametrize("strategy", ["exact", "propagate", "zero_pad"])
def test_a_row_in_a_batch_is_the_row_alone_in_fast_mode(prompts, strategy):
    """What a row skips must not depend on its neighbours, though which layers run together does."""
    ids, mask = prompts
    model = build("llama")
    config = TIDEConfig(mode="fast", kv_cache_strategy=strategy, max_pending=3)

    def run(ids, mask):
        policy = ByState(1, 3)
        with TIDE(model, policy, config) as engine:
            return greedy(engine, ids, mask, eos_token_id=None, pad_token_id=0), engine.last_stats.exit_rate

    together, rate = run(ids, mask)
    assert 0.1 < rate < 0.9
    for row in range(3):
        own = ids[row][mask[row].bool()][None]
        alone, _ = run(own, torch.ones_like(own))
        assert together[row, int((mask[row] == 0).sum()) :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma4-shared"])
def test_long_texts_roll_over_windows_and_grow_the_cache(family):
    model = build(family, max_position_embeddings=1024)
    ids = torch.randint(3, VOCAB, (2, 240), generator=torch.Generator().manual_seed(0))
    options = dict(max_new_tokens=60, eos_token_id=None, pad_token_id=0)
    expected = greedy(model, ids, torch.ones_like(ids), **options)
    policy = Knowing(expected.tolist(), (1, 2), seed=1, leaves=0.8, right=0.8)
    with TIDE(model, policy, TIDEConfig(compaction_threshold=1.0)) as engine:
        assert torch.equal(greedy(engine, ids, torch.ones_like(ids), **options), expected)


@pytest.mark.parametrize("family", ["phi3", "llama"])
def test_a_rope_that_changes_with_length_is_followed(family):
    """longrope switches its frequencies past the original context; Phi-3 runs the text again there.

    transformers 5.17 runs only the newest token again (5.22 the text), so Phi-3 is compared without a cache, where every
    step runs the whole text.
    """
    factors = dict(short_factor=[1.0] * 8, long_factor=[30.0] * 8)
    rope = dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=24, factor=4.0, **factors)
    own = dict(original_max_position_embeddings=24) if family == "phi3" else {}
    model = build(family, rope_parameters=rope, max_position_embeddings=96, **own)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(2))
    options = dict(max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    expected = greedy(model, ids, use_cache=family != "phi3", **options)
    policy = Knowing(expected.tolist(), (1, 2), seed=1, leaves=0.9, right=0.9)
    with TIDE(model, policy) as engine:
        assert torch.equal(greedy(engine, ids, **options), expected)
        assert engine.last_stats.accepted > 0
    with TIDE(model) as engine:
        assert torch.equal(greedy(engine, ids, **options), expected)
        with pytest.raises(ValueError, match="changes after 24 tokens, for all rows of a batch at once, and up to 52"):
            greedy(engine, ids.expand(2, -1), **options)
        short = dict(options, max_new_tokens=12)
        assert torch.equal(greedy(engine, ids.expand(2, -1), **short), greedy(model, ids.expand(2, -1), **short))
    model(ids, labels=ids).loss.backward()  # the frequencies a forward leaves on the model are still fit for training


@pytest.mark.invariant(3)
@pytest.mark.real
def test_ten_prompts_of_the_embedded_model_are_written_as_generate_writes_them(embedded):
    """With three drafts before every verification, each right nine times in ten."""
    model, tokenizer = embedded
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    expected = greedy(model, ids, mask)
    policy = Knowing(texts_of(expected, mask), (8,), seed=0, leaves=1.0, right=0.9)
    with TIDE(model, policy, TIDEConfig(max_pending=3)) as engine:
        assert torch.equal(greedy(engine, ids, mask), expected)
        assert engine.last_stats.exit_rate > 0.5
        assert engine.last_stats.accepted < engine.last_stats.drafted


PROMPTS = [
    "Why is the sky blue?",
    "What is 17 times 23? Show the steps.",
    "Name five European capitals.",
    "Explain what a mortgage is.",
    "How do I boil an egg?",
    "Who wrote Faust?",
    "What does HTTP status 404 mean?",
    "Write an email asking a colleague to move a meeting.",
    "Explain recursion to a ten-year-old.",
    "Write SQL that counts the orders of each customer.",
]
