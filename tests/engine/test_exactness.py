"""The heart: whatever exits say, mode "exact" writes what `model.generate` writes (invariants 1, 3, 5, 9)."""

from __future__ import annotations

import pytest
import torch
from families import build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policies import Everyone, Knowing, Nobody

from TIDE import TIDE, TIDEConfig

NEW = 16


def greedy(model, ids, mask=None, **options):
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **options)


def texts_of(output: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """Each row's own tokens, without its left padding."""
    return [row[int((keep == 0).sum()) :].tolist() for row, keep in zip(output, mask, strict=True)]


def test_exits_off_writes_what_generate_writes(any_model, prompts):
    ids, mask = prompts
    expected = greedy(any_model, ids, mask)
    with TIDE(any_model) as engine:
        assert torch.equal(greedy(engine, ids, mask), expected)


def test_logits_are_the_models(any_model, prompts):
    ids, mask = prompts
    alone = [any_model(input_ids=row[keep.bool()][None]).logits[0] for row, keep in zip(ids, mask, strict=True)]
    with TIDE(any_model) as engine:
        found = engine(ids, attention_mask=mask)
    for row, expected in enumerate(alone):
        torch.testing.assert_close(found[row, -len(expected) :], expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpoints", [(0,), (2,), (0, 1, 3)])
def test_exits_always_taken_and_checked_write_what_generate_writes(any_model, prompts, checkpoints):
    ids, mask = prompts
    expected = greedy(any_model, ids, mask)
    with TIDE(any_model, Everyone(*checkpoints)) as engine:
        assert torch.equal(greedy(engine, ids, mask), expected)
        assert engine.last_stats.drafted > 0


def test_random_drafts_right_and_wrong_write_what_generate_writes(any_model, prompts):
    ids, mask = prompts
    expected = greedy(any_model, ids, mask)
    for seed in range(3):
        policy = Knowing(texts_of(expected, mask), (1, 2, 3), seed, leaves=0.6, right=0.7)
        with TIDE(any_model, policy, TIDEConfig(max_pending=5, compaction_threshold=0.5)) as engine:
            assert torch.equal(greedy(engine, ids, mask), expected)
            assert 0 < engine.last_stats.accepted < engine.last_stats.drafted


@settings(max_examples=300, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(["llama", "gemma3", "gpt2", "bloom", "lfm2", "qwen3_next", "gemma4-shared"]),
    checkpoints=st.sets(st.integers(0, 3), min_size=1).map(lambda found: tuple(sorted(found))),
    rows=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    leaves=st.sampled_from([0.2, 0.6, 0.95]),
    right=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    max_pending=st.integers(1, 12),
    compaction=st.sampled_from([0.0, 0.25, 0.67, 1.0]),
)
def test_any_policy_writes_what_generate_writes(family, checkpoints, rows, seed, leaves, right, max_pending, compaction):
    model = _model(family)
    ids, mask = _prompts(rows)
    expected = _expected(family, rows)
    policy = Knowing(texts_of(expected, mask), checkpoints, seed, leaves, right)
    with TIDE(model, policy, TIDEConfig(max_pending=max_pending, compaction_threshold=compaction)) as engine:
        assert torch.equal(greedy(engine, ids, mask), expected)


MODELS: dict = {}
EXPECTED: dict = {}


def _model(family):
    if family not in MODELS:
        MODELS[family] = build(family)
    return MODELS[family]


def _prompts(rows):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(3, 128, (rows, 10), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row] = 0
    return ids * mask, mask


def _expected(family, rows):
    if (family, rows) not in EXPECTED:
        EXPECTED[family, rows] = greedy(_model(family), *_prompts(rows))
    return EXPECTED[family, rows]


def test_nobody_leaving_is_exits_off(llama, prompts):
    ids, mask = prompts
    with TIDE(llama, Nobody(0, 1, 2, 3)) as engine:
        assert torch.equal(greedy(engine, ids, mask), greedy(llama, ids, mask))
        assert engine.last_stats.exit_rate == 0 and engine.last_stats.drafted == 0
