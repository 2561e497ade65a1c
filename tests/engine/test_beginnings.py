"""Rows on the host that begin alike run their common beginning once, and write what they would write alone."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import TIDE
from arrivals import finish
from families import build
from policies import Everyone
from properties import examples
from router_files import exits_of
from TIDE.engine.cache.prefix_store import LEAST, Copied, Texts, default_gib

NEW = 6
OPTIONS = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
TEXT = torch.randint(3, 100, (1, 200), generator=torch.Generator().manual_seed(1))


@functools.cache
def known(name="llama"):
    model = build(name)
    return model, (None, Everyone(2), exits_of(model, "memory", 2))


def alone(model, ids):
    return model.generate(ids, **OPTIONS, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("which", [0, 1, 2])
def test_eight_answers_to_one_prompt_run_it_once(which):
    model, own = known()
    ids = TEXT[:, :120]
    with TIDE.TIDE(model, own[which]) as engine:
        rows = [engine.add(ids, **OPTIONS) for _ in range(8)]
        finish(engine, *rows)
        assert all(row.new_tokens == alone(model, ids) for row in rows)
        assert [row.stats.reused_tokens for row in rows] == [0] + [119] * 7
        most = engine.adapter.num_layers * (120 + 8 * (NEW * (1 + engine.plan.max_pending)))
        assert sum(row.stats.layers_run for row in rows) < most


def test_a_batch_with_one_prompt_runs_it_once():
    model, _ = known()
    with TIDE.TIDE(model) as engine:
        found = engine.generate(TEXT[:, :100], **OPTIONS, num_return_sequences=1).tolist()
        assert engine.generate(TEXT[:, :100].expand(4, -1), **OPTIONS).tolist() == found * 4
        assert engine.last_stats.reused_tokens == 4 * 99
        sampled = dict(OPTIONS, do_sample=True, seed=3, num_return_sequences=4)
        answers = engine.generate(TEXT[:, :80], **sampled).tolist()
    with TIDE.TIDE(model) as engine:
        assert engine.generate(TEXT[:, :80], **sampled, cache_salt="other").tolist() == answers


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next", "gemma3"])
def test_a_text_that_has_ended_is_gone_on_with(name):
    model, own = known(name)
    for policy in own:
        with TIDE.TIDE(model, policy) as engine:
            first = engine.add(TEXT[:, :60], **OPTIONS)
            finish(engine, first)
            longer = torch.tensor([[*first.tokens, *TEXT[0, :20].tolist()]])
            second = engine.add(longer, **OPTIONS)
            finish(engine, second)
            assert second.new_tokens == alone(model, longer)
            assert 60 <= second.stats.reused_tokens <= 60 + NEW
            assert engine.generate(longer, **OPTIONS)[0, 86:].tolist() == second.new_tokens


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 90), st.integers(0, 12), st.integers(0, 3)), max_size=8), st.data())
def test_whatever_begins_alike_the_text_is_that_of_a_row_alone(asked, data):
    """Rows from a tree of texts, that come at any time; some budgets keep nothing, some a text or two."""
    model, own = known()
    with TIDE.TIDE(model, own[data.draw(st.sampled_from([0, 1, 2]))]) as engine:
        engine.texts.most = data.draw(st.sampled_from([0, 100_000, 2**30]))
        rows, prompts = [], []
        for parent, kept, new, steps in asked:
            before = [TEXT[0, :90].tolist(), *(row.tokens for row in rows)][-parent % (len(rows) + 1)]
            ids = torch.tensor([[*before[:kept], *TEXT[0, 100 + new : 100 + 2 * new].tolist()]])
            prompts.append(ids)
            rows.append(engine.add(ids, **OPTIONS, attention_mask=torch.ones_like(ids)))
            for _ in range(steps):
                engine.step()
        finish(engine, *rows)
        for row, ids in zip(rows, prompts, strict=True):
            assert row.error is None and row.new_tokens == alone(model, ids)
        assert engine.texts.bytes <= engine.texts.most


def test_mode_fast_writes_the_same_cold_and_warm():
    model, own = known()
    ids = TEXT[:, :80]
    with TIDE.TIDE(model, own[2], TIDE.TIDEConfig(mode="fast", exit_threshold=0.4)) as engine:
        cold = engine.generate(ids, **OPTIONS).tolist()
        assert (engine.last_stats.reused_tokens, sum(engine.last_stats.exits_per_layer.values()) > 0) == (0, True)
        assert engine.generate(ids, **OPTIONS).tolist() == cold
        assert engine.last_stats.reused_tokens == 79
        longer = torch.tensor([[*cold[0], *TEXT[0, :20].tolist()]])
        warm = engine.generate(longer, **OPTIONS).tolist()
        assert engine.last_stats.reused_tokens >= 80
        assert engine.generate(longer, **OPTIONS, cache_salt="cold").tolist() == warm
        assert engine.last_stats.reused_tokens == 0


def test_weights_that_change_make_all_texts_others():
    model = build("llama")
    with TIDE.TIDE(model) as engine:
        engine.generate(TEXT[:, :60], **OPTIONS)
        running = engine.add(TEXT[:, :50], **OPTIONS)
        engine.step()
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(-3)
        found = engine.generate(TEXT[:, :60], **OPTIONS)
        assert engine.last_stats.reused_tokens == 0
        assert found[0, 60:].tolist() == alone(model, TEXT[:, :60])
        finish(engine, running)  # began before: not for others
        assert engine.generate(TEXT[:, :55], **OPTIONS)[0, 55:].tolist() == alone(model, TEXT[:, :55])
        assert engine.last_stats.reused_tokens == 54


def test_other_salts_are_never_found():
    model, _ = known()
    with TIDE.TIDE(model) as engine:
        for salt in ("a", "b", None):
            engine.generate(TEXT[:, :60], **OPTIONS, cache_salt=salt)
            assert engine.last_stats.reused_tokens == 0
        engine.generate(TEXT[:, :60], **OPTIONS, cache_salt="a")
        assert engine.last_stats.reused_tokens == 59
        assert engine.texts.bytes
    assert not engine.texts.bytes


def test_16_bits_share_in_a_conversation_only():
    model = build("llama").to(torch.bfloat16)
    with TIDE.TIDE(model) as engine:
        for salt in (None, None, "mine", "mine"):
            engine.generate(TEXT[:, :40], **OPTIONS, cache_salt=salt)
            assert engine.last_stats.reused_tokens == 0
        for reused in (0, 39):
            list(TIDE.Conversation(engine).stream(TEXT[:, :40], **OPTIONS))
            assert engine.last_stats.reused_tokens == reused


def test_a_model_with_hooks_shares_nothing():
    """Another hook in the same place is another model, and one that looks wants to see every token."""
    model = build("llama")
    for change in (1.0, -1.0):
        seen = []

        def steer(module, inputs, output, seen=seen, change=change):
            seen.append(output.shape[-2])
            return output + change

        hook = model.model.layers[1].mlp.register_forward_hook(steer)
        with TIDE.TIDE(model) as engine:
            for _ in range(2):
                seen.clear()
                assert engine.generate(TEXT[:, :60], **OPTIONS)[0, 60:].tolist() == alone(model, TEXT[:, :60])
                assert engine.last_stats.reused_tokens == 0 and max(seen) == 60
        hook.remove()


@pytest.mark.parametrize(("name", "rounds"), [("llama", NEW + 1), ("qwen3_next", NEW)])
def test_rows_with_one_prompt_come_together(name, rounds):
    """All but the first a round later, with a copy; where a running state is no use for others, all at once."""
    model, _ = known(name)
    with TIDE.TIDE(model) as engine:
        rows = [engine.add(TEXT[:, :100], **OPTIONS) for _ in range(6)]
        for _ in range(rounds):
            assert not all(row.finished for row in rows)
            engine.step()
        assert all(row.new_tokens == alone(model, TEXT[:, :100]) for row in rows)


def test_a_policy_that_cannot_copy_its_state_shares_nothing():
    class Watching(Everyone):
        watches = (2,)

    model = build("llama")
    with TIDE.TIDE(model, Watching(2)) as engine:
        for _ in range(2):
            assert engine.generate(TEXT[:, :60], **OPTIONS)[0, 60:].tolist() == alone(model, TEXT[:, :60])
            assert engine.last_stats.reused_tokens == 0


@examples(100)
@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=40), st.integers(0, 60)), max_size=12), st.integers(0, 100))
def test_texts_stay_within_their_bytes_and_the_longest_is_found(kept, most):
    texts, model = Texts(1.0), torch.nn.Linear(1, 1)
    texts.most, epoch, there = most, texts.follow(model), []
    for tokens, size in kept:
        texts.keep("mine", epoch, tokens, Copied([torch.zeros(size, dtype=torch.uint8)], None))
        assert texts.bytes <= most
        there = [text.tokens.tolist() for text in texts._texts]
        assert size > most or there[-1] == tokens
    found = texts.find("mine", np.array(wanted := [0, 1] * 20))
    longest = max((next(n for n in range(min(len(text), 40), -1, -1) if text[:n] == wanted[:n]) for text in there), default=0)
    assert (found[1] if found else 0) == (longest if longest >= LEAST else 0)
    with torch.no_grad():
        model.weight.add_(1)
    assert texts.follow(model) != epoch and texts.find("mine", np.array(wanted)) is None
    texts.keep("mine", epoch, wanted, Copied([], None))
    assert texts._texts == []


@pytest.mark.parametrize(("gib", "room"), [(0.01, 0.125), (1.5, 0.5), (8, 1.0)])
def test_texts_have_a_third_of_what_the_weights_take_within_limits(gib, room):
    with torch.device("meta"):
        model = torch.nn.Linear(2**20, int(gib * 2**30 / 4) // 2**20, bias=False)
    assert default_gib(model) == pytest.approx(room, rel=0.01)
