"""Options that were asked for before are not made sense of again, and nothing of what is decoded changes."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

import TIDE
from arrivals import finish
from families import build
from properties import examples
from TIDE.engine.request.options import OptionCache
from TIDE.engine.request.request import prepare

OPTIONS = dict(
    do_sample=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([0.5, 1.0]),
    min_p=st.sampled_from([0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    min_new_tokens=st.integers(1, 4),
    max_new_tokens=st.integers(1, 6),
    eos_token_id=st.sampled_from([None, 3, [3, 5]]),
    presence_penalty=st.sampled_from([0.5]),
    suppress_tokens=st.just([7, 8]),
    begin_suppress_tokens=st.just([9]),
    forced_eos_token_id=st.just(4),
    max_time=st.just(1000.0),
    seed=st.integers(0, 3),
    return_dict_in_generate=st.booleans(),
    output_logits=st.booleans(),
)


@pytest.fixture(scope="module")
def model():
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return build("llama")


def asked(size):
    ids = torch.arange(1, 1 + size)[None]
    return ids, torch.ones_like(ids)


def row_of(model, size, options, remembered):
    ids, mask = asked(size)
    request = prepare(model, ids, None, dict(options, attention_mask=mask), 0, remembered)
    (row,) = request.rows(4, TIDE.engine.request.inputs.Context())
    return row, request


def said(row, request):
    """What decoding takes of a request."""
    stop, own = row.stop, row.sampling
    config = {name: value for name, value in vars(request.config).items() if not name.startswith("_")}  # those are theirs
    kinds = [type(one).__name__ for one in [*request.processors, *request.criteria]]
    seed = own.seed if request.seed is not None else own.seed is None
    found = (row.tokens, stop.end_tokens, stop.max_columns, len(stop.deadlines), len(stop.custom), own.params, own.custom, seed)
    return (*found, own.keeps_scores, request.keeps_scores, request.columns, kinds, config)


@pytest.mark.filterwarnings("ignore")
@examples(60)
@given(
    sets=st.lists(st.fixed_dictionaries({}, optional=OPTIONS), min_size=1, max_size=3),
    asks=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9)), min_size=2, max_size=8),
)
def test_a_request_is_what_transformers_makes_of_it_each_time(model, sets, asks):
    remembered = OptionCache()
    for which, size in asks:
        options = sets[which % len(sets)]
        found = said(*row_of(model, size, options, remembered))
        assert found == said(*row_of(model, size, options, OptionCache()))


def count_calls(model, monkeypatch):
    calls = []
    theirs = model.generate
    monkeypatch.setattr(
        model, "generate", lambda *given, **options: calls.append(1) or theirs(*given, **options), raising=False
    )
    return calls


def test_the_same_options_are_made_sense_of_once(model, monkeypatch):
    calls = count_calls(model, monkeypatch)
    with TIDE.TIDE(model) as engine:
        for size in (3, 8, 5):
            ids, mask = asked(size)
            row = engine.add(dict(input_ids=ids, attention_mask=mask), max_new_tokens=3, do_sample=True, top_k=5, seed=size)
            finish(engine, row)
            assert len(row.new_tokens) == 3
    assert len(calls) == 1


@pytest.fixture
def defaults(model):
    """The model's generation config, which may be changed."""
    held = model.generation_config
    model.generation_config = copy.deepcopy(held)
    yield model.generation_config
    model.generation_config = held


def test_other_defaults_of_the_model_are_seen(model, defaults):
    remembered, options = OptionCache(), dict(max_new_tokens=4, do_sample=True)
    assert row_of(model, 3, options, remembered)[0].sampling.params.temperature == 1.0
    defaults.temperature = 0.25
    assert row_of(model, 3, options, remembered)[0].sampling.params.temperature == 0.25
    defaults.eos_token_id = [3]
    row_of(model, 3, options, remembered)
    defaults.eos_token_id.append(6)  # in place
    assert row_of(model, 3, options, remembered)[0].stop.end_tokens == {3, 6}
    defaults.eos_token_id = torch.tensor([3, 5])
    for _ in range(2):
        assert row_of(model, 3, options, remembered)[0].stop.end_tokens == {3, 5}
    defaults.eos_token_id = 7
    assert row_of(model, 3, options, remembered)[0].stop.end_tokens == {7}


def test_defaults_that_only_look_alike_are_not_mixed_up(model, defaults):
    remembered, options = OptionCache(), dict(max_new_tokens=2, do_sample=True)
    defaults.top_k = 5
    row_of(model, 3, options, remembered)
    defaults.top_k = 5.0
    with pytest.raises(ValueError, match="top_k"):
        row_of(model, 3, options, remembered)


@pytest.mark.parametrize("default", [None, "dynamic"])
def test_nothing_is_said_about_options_that_nobody_gave(model, defaults, caplog, default, monkeypatch):
    (ids, mask), theirs = asked(3), logging.getLogger("transformers")
    defaults.cache_implementation = default
    monkeypatch.setattr(theirs, "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        prepare(model, ids, GenerationConfig(max_new_tokens=2), dict(attention_mask=mask), 0, OptionCache())
        prepare(model, ids, None, dict(attention_mask=mask, max_new_tokens=2), 0, OptionCache())
    assert not [record.getMessage() for record in caplog.records if "cache" in record.getMessage()]


def test_options_that_only_look_alike_are_not_mixed_up(model):
    remembered = OptionCache()
    one = row_of(model, 3, dict(max_new_tokens=2, do_sample=True, top_k=1), remembered)[0].sampling.params
    assert one.top_k == 1
    with pytest.raises(ValueError, match="top_k"):
        row_of(model, 3, dict(max_new_tokens=2, do_sample=True, top_k=1.0), remembered)


def test_what_is_not_plain_is_made_sense_of_each_time(model, monkeypatch):
    calls = count_calls(model, monkeypatch)
    remembered, config = OptionCache(), GenerationConfig(max_new_tokens=2, do_sample=False)
    ids, mask = asked(4)
    for _ in range(2):
        prepare(model, ids, config, dict(attention_mask=mask), 0, remembered)
        prepare(model, ids, None, dict(max_new_tokens=2, max_time=9.0, attention_mask=mask), 0, remembered)
        prepare(model, ids, None, dict(max_new_tokens=2), 0, remembered)  # without a mask padding tokens may be text
    assert len(calls) == 6
