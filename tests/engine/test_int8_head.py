"""The LM head of exits: likely tokens first, the others where these do not settle it."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from TIDE.engine.runners.int8_head import LIKELY, Int8LMHead
from TIDE.kernels.cpu import exits as cpu_exits
from TIDE.kernels.layer import UNLIKELY, Norm
from TIDE.kernels.weights import Dense
from TIDE.routing.router import Router

TOKENS, HIDDEN = 300, 64
FIRST = TOKENS // LIKELY


@pytest.fixture
def weight():
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def router():
    torch.manual_seed(0)
    return Router(HIDDEN, 16, 4)


def head_of(weight, size, vocabulary=None):
    """Its norm scales states to such a size."""
    norm = Norm(torch.full((HIDDEN,), size / HIDDEN**0.5), 0.0, 0.0, False, torch.zeros(0))
    return Int8LMHead(norm, Dense(weight), vocabulary, cpu_exits)


def test_a_likely_best_token_is_found_without_looking_at_the_others(weight, router):
    state = 5 * weight[7:8]
    logits, scores = head_of(weight, 3.0).judge(state, router.arrays())
    expected = 3 * state / state.norm() @ weight[:FIRST].T
    torch.testing.assert_close(logits[:, :FIRST], expected, rtol=0.02, atol=0.2)
    assert expected.softmax(-1).max() > 0.9
    assert (logits[0, FIRST:] == logits[0, :FIRST].min() - UNLIKELY).all()
    torch.testing.assert_close(scores, router(state, expected).detach(), rtol=0.05, atol=0.01)


def test_an_unlikely_one_is_compared_with_all(weight, router):
    state = weight[250:251]  # the best is beyond the likely tokens, which are all alike
    logits, scores = head_of(weight, 1.0).judge(state, router.arrays())
    expected = state / state.norm() @ weight.T
    assert logits.argmax() == 250
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.2)
    torch.testing.assert_close(scores, router(state, expected).detach(), rtol=0.05, atol=0.01)


def test_a_sure_guess_is_judged_the_same_beside_an_unsure_one(weight, router):
    weight[21] = weight[20]  # so neither has more than half of the probability
    head, states = head_of(weight, 3.0), weight[[7, 20, 250, 8]]
    logits, scores = head.judge(states, router.arrays())
    for place in range(len(states)):
        alone, score = head.judge(states[place : place + 1], router.arrays())
        torch.testing.assert_close(logits[place : place + 1], alone)
        torch.testing.assert_close(scores[place : place + 1], score)
    assert (logits[0, FIRST:] == logits[0, :FIRST].min() - UNLIKELY).all()
    torch.testing.assert_close(logits[1], 3 * weight[20] / weight[20].norm() @ weight.T, rtol=0.02, atol=0.2)


def test_a_draft_vocabulary_is_looked_at_as_a_whole(weight, router):
    vocabulary = torch.arange(0, TOKENS, 3)
    state = weight[6:7]
    logits, _ = head_of(weight, 3.0, vocabulary).judge(state, router.arrays())
    torch.testing.assert_close(logits, 3 * state / state.norm() @ weight[vocabulary].T, rtol=0.02, atol=0.2)


def test_scores_are_those_of_the_router_for_the_logits_found(weight, router):
    states = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(1))
    router.temperature.fill_(0.7)
    router.offset.fill_(-0.2)
    logits, scores = head_of(weight, 1.0).judge(states, router.arrays())  # of size 1 none is sure
    with torch.no_grad():
        torch.testing.assert_close(scores, router(states, logits), rtol=1e-3, atol=1e-4)
