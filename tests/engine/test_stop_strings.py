"""Stop strings end a text where transformers' own criterion does, which most tokens are not shown to."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteriaList
from transformers.generation import StopStringCriteria

from characters import characters
from families import build
from policies import Everyone
from properties import examples
from TIDE import TIDE
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule

TOKENIZER = characters(None)
SIZE = len(TOKENIZER)


@examples(60)
@given(
    text=st.lists(st.integers(0, SIZE + 2), min_size=2, max_size=20),
    end=st.integers(1, 4),
    padding=st.integers(0, 3),
    other=st.text("abc \n", max_size=3),
)
def test_a_text_ends_where_the_criterion_says_so(text, end, padding, other):
    """Also with tokens that the tokenizer does not have, and with beginnings in the prompt or in padding."""
    string = TOKENIZER.decode(text[-1 - end : -1]) or "ab"
    criterion = StopStringCriteria(TOKENIZER, [string, other])
    shown = [0] * padding + text
    for size in range(1, len(text) + 1):
        row = Row(text[:size], StopRule(StoppingCriteriaList([criterion])), 4, padding=[0] * padding)
        wanted = bool(criterion(torch.tensor([shown[: padding + size]]), None).any())
        assert row.stop.ends(row) == wanted


def test_tokens_that_no_stop_string_ends_in_are_not_shown_to_the_criterion(monkeypatch):
    asked, as_ever = [], StopStringCriteria.__call__
    monkeypatch.setattr(StopStringCriteria, "__call__", lambda self, *given: asked.append(given[0]) or as_ever(self, *given))
    stop = StopRule(StoppingCriteriaList([StopStringCriteria(TOKENIZER, ["abc"])]))
    ids = TOKENIZER("a cab, abc", add_special_tokens=False)["input_ids"]
    found = [stop.ends(Row(ids[:size], stop, 4)) for size in range(1, len(ids) + 1)]
    assert found == [False] * (len(ids) - 1) + [True]
    assert len(asked) == 2 and all(own.shape[1] <= 3 for own in asked)  # two letters c, and as many tokens as it may have


@pytest.mark.parametrize("exits", [False, True])
def test_rows_end_as_with_model_generate(exits):
    model = build("llama", vocab_size=SIZE)
    ids = torch.tensor([[0, 0, 5, 9, 17], [21, 4, 6, 11, 2]])
    options = dict(attention_mask=(ids != 0).long(), do_sample=False, max_new_tokens=24, pad_token_id=0, eos_token_id=1)
    free = model.generate(ids, **options)
    stops = dict(stop_strings=[TOKENIZER.decode(row[9:11]) for row in free], tokenizer=TOKENIZER)
    expected = model.generate(ids, **options, **stops)
    assert expected.shape[1] < free.shape[1]
    with TIDE(model, Everyone(2) if exits else None) as engine:
        assert torch.equal(engine.generate(ids, **options, **stops), expected)
