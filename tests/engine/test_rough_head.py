"""The LM head of exits: likely tokens first, the others where these do not settle it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from TIDE.engine.rough_head import LIKELY, RoughHead
from TIDE.kernels import cpu_exits

TOKENS, HIDDEN = 300, 64


@pytest.fixture
def weight():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))


def test_a_likely_best_token_is_found_without_looking_at_the_others(weight):
    state = weight[7:8] / weight[7].norm() * 3
    found = RoughHead(weight, None, cpu_exits)(state.numpy())
    assert found.shape == (1, TOKENS // LIKELY)
    torch.testing.assert_close(found, state @ weight[: TOKENS // LIKELY].T, rtol=0.02, atol=0.2)
    assert found.softmax(-1).max() > 0.9


def test_an_unlikely_one_is_compared_with_all(weight):
    state = weight[250:251] / weight[250].norm()  # the best is beyond the likely tokens, which are all alike
    found = RoughHead(weight, None, cpu_exits)(state.numpy())
    assert found.shape == (1, TOKENS)
    assert found.argmax() == 250
    torch.testing.assert_close(found, state @ weight.T, rtol=0.02, atol=0.2)


def test_one_unsure_row_is_enough_to_look_at_all(weight):
    states = torch.stack([weight[7] / weight[7].norm() * 3, weight[250] / weight[250].norm()])
    assert RoughHead(weight, None, cpu_exits)(states.numpy()).shape == (2, TOKENS)


def test_a_draft_vocabulary_is_looked_at_as_a_whole(weight):
    vocabulary = torch.arange(0, TOKENS, 3)
    state = weight[6:7] / weight[6].norm() * 3
    found = RoughHead(weight, vocabulary, cpu_exits)(state.numpy())
    torch.testing.assert_close(found, state @ weight[vocabulary].T, rtol=0.02, atol=0.2)
