"""Rotary tables have the bits of the model's own rotary embedding, grow, and follow ropes that change with length."""

from __future__ import annotations

import pytest
import torch

from families import build
from TIDE.adapters.layer_parts import layer_parts
from TIDE.adapters.rotary_table import RotaryTable

LONGROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    original_max_position_embeddings=16,
)


def given(model, positions, **kind):
    """What the model's own rotary embedding gives."""
    like = torch.zeros(1, 1, 1, dtype=model.dtype)
    return [part[0] for part in model.get_decoder().rotary_emb(like, positions[None], **kind)]


@pytest.mark.parametrize("name", ["llama", "phi", "phi3", "olmo", "smollm3", "gemma2"])
def test_a_table_is_the_models(name):
    model = build(name)
    rotary = RotaryTable(model)
    assert rotary.kinds == ("",) and rotary.is_constant and rotary.exists
    positions = torch.arange(40)
    for ours, theirs in zip(rotary.tables("", 40), given(model, positions), strict=True):
        assert torch.equal(ours[:40], theirs)


@pytest.mark.parametrize("name", ["gemma3", "olmo3"])
def test_each_kind_of_layer_has_its_table(name):
    thetas = {"sliding_attention": 100.0, "full_attention": 100000.0}
    parameters = {kind: dict(rope_type="default", rope_theta=theta) for kind, theta in thetas.items()}
    model = build(name, rope_parameters=parameters)
    rotary, config = RotaryTable(model), model.config
    assert set(rotary.kinds) == set(thetas)
    for kind in thetas:
        for ours, theirs in zip(rotary.tables(kind, 9), given(model, torch.arange(9), layer_type=kind), strict=True):
            assert torch.equal(ours[:9], theirs)
    assert [layer_parts(layer, config).rope for layer in model.model.layers] == config.layer_types


def test_tables_grow_and_those_given_out_stay():
    rotary = RotaryTable(build("llama"))
    first = rotary.tables("", 5)
    kept = first.cos.clone()
    assert rotary.tables("", len(first.cos)) is first
    longer = rotary.tables("", len(first.cos) + 1)
    assert len(longer.cos) >= 2 * len(first.cos)
    assert torch.equal(first.cos, kept) and torch.equal(longer.cos[: len(kept)], kept)


def test_a_rope_that_changes_with_length_is_computed_for_each_pass():
    model = build("llama", rope_parameters=LONGROPE)
    rotary = RotaryTable(model)
    assert not rotary.is_constant
    short, long = torch.tensor([3, 4]), torch.tensor([3, 40])
    found = [rotary.at(positions) for positions in (short, long, short)]
    for ours, positions in zip(found, (short, long, short), strict=True):
        for own, theirs in zip(ours, given(model, positions), strict=True):
            assert torch.equal(own, theirs)
    assert torch.equal(found[0].cos, found[2].cos)
    assert not torch.equal(found[0].cos[0], found[1].cos[0]), "one position has other angles in a longer text"
    with pytest.raises(AssertionError, match="use `at`"):
        rotary.tables()
