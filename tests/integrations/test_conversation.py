"""A conversation writes what each of its texts would be answered with alone, and runs what is new in it."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import TIDE
from families import build
from policies import Everyone
from properties import examples
from router_files import a_file
from TIDE.routing.policies import policy_for

OPTIONS = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
TEXT = torch.randint(3, 100, (1, 90), generator=torch.Generator().manual_seed(0))


def policies(model):
    with TIDE.TIDE(model) as engine:
        return None, Everyone(2), policy_for(a_file(model, "memory", (2,), 0.0), engine.adapter)


@functools.cache
def known():
    model = build("llama")
    return model, policies(model)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_next"])
def test_turns_are_answered_as_if_they_stood_alone(name):
    model = build(name)
    for policy in policies(model):
        with TIDE.TIDE(model, policy) as engine:
            conversation, ids = TIDE.Conversation(engine), TEXT[:, :20]
            for turn in range(3):
                expected = model.generate(ids, **OPTIONS)
                found = list(conversation.stream(ids, **OPTIONS))
                assert found == expected[0, ids.shape[1] :].tolist()
                assert turn == 0 or engine.last_stats.layers_run < ids.shape[1] * engine.adapter.num_layers
                ids = torch.cat([expected, TEXT[:, 40 + 10 * turn : 50 + 10 * turn]], 1)


@examples(20)
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20)), min_size=2, max_size=5), st.sampled_from([0, 1, 2]))
def test_texts_may_part_anywhere(turns, which):
    model, own = known()
    with TIDE.TIDE(model, own[which]) as engine:
        conversation, before = TIDE.Conversation(engine), TEXT[:, :30]
        for kept, new in turns:
            ids = torch.cat([before[:, :kept], TEXT[:, 60 : 60 + new]], 1)
            options = dict(OPTIONS, attention_mask=torch.ones_like(ids))  # the text may hold what is padding elsewhere
            expected = model.generate(ids, **options)
            assert list(conversation.stream(ids, **options)) == expected[0, ids.shape[1] :].tolist()
            before = expected


def test_other_settings_start_anew():
    model = build("llama")
    with TIDE.TIDE(model, Everyone(2)) as engine:
        conversation, ids = TIDE.Conversation(engine), TEXT[:, :20]
        expected = model.generate(ids, **OPTIONS)[0, 20:].tolist()
        assert list(conversation.stream(ids, **OPTIONS)) == expected
        with engine.using(engine.config, exits=False):
            assert list(conversation.stream(ids, **OPTIONS)) == expected
