"""Ropes that change with the length of the text: rows that come and go write what `model.generate` writes for each alone."""

from __future__ import annotations

import pytest
import torch

import TIDE
from arrivals import finish
from families import build

LONGEST = 32  # tokens up to which frequencies are constant
ROPES = {
    "longrope": dict(
        rope_type="longrope",
        rope_theta=10000.0,
        factor=4.0,
        short_factor=[1.0] * 8,
        long_factor=[0.3] * 8,
        original_max_position_embeddings=LONGEST,
    ),
    "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
}


@pytest.fixture(params=ROPES)
def model(request):
    positions = LONGEST if request.param == "dynamic" else 4 * LONGEST
    return build("llama", rope_parameters=ROPES[request.param], max_position_embeddings=positions)


def alone(model, ids, new_tokens):
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=1, do_sample=False)  # "dynamic" forgets longer texts then
    return model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False)[0, len(ids) :].tolist()


@pytest.mark.parametrize("backend", ["modules", "numba"])
def test_a_long_row_does_not_change_a_short_one(model, backend, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    prompts = [[5, 6, 7], list(range(3, LONGEST + 10)), [9] * (LONGEST - 4), [8, 3]]
    expected = [alone(model, ids, 12) for ids in prompts]
    with TIDE.TIDE(model) as engine:
        rows = [engine.add(torch.tensor([ids]), max_new_tokens=12, do_sample=False) for ids in prompts[:3]]
        for _ in range(4):
            engine.step()
        rows.append(engine.add(torch.tensor([prompts[3]]), max_new_tokens=12, do_sample=False))
        finish(engine, *rows)
    assert [row.new_tokens for row in rows] == expected
