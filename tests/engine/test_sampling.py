"""Sampling in mode "exact" draws from the model's distribution, processors included; the same seed gives the same text."""

from __future__ import annotations

import itertools

import pytest
import torch

from families import build
from policies import Everyone
from TIDE import TIDE, TIDEConfig

TOP, NEW, ROWS, CALLS = 3, 4, 500, 3
OPTIONS = dict(do_sample=True, temperature=1.3, top_k=TOP, max_new_tokens=NEW, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def prompt():
    return torch.tensor([[5, 17, 99, 23, 42]])


@pytest.fixture(scope="module")
def expected(model, prompt):
    """Probability of every continuation of NEW tokens: TOP ** NEW of them."""
    texts = {(): 1.0}
    for _ in range(NEW):
        ids = torch.stack([torch.cat([prompt[0], torch.tensor(text, dtype=torch.long)]) for text in texts])
        with torch.no_grad():
            values, tokens = (model(ids).logits[:, -1] / OPTIONS["temperature"]).topk(TOP)
        texts = {
            (*text, int(token)): probability * float(share)
            for (text, probability), row, shares in zip(texts.items(), tokens, values.softmax(-1), strict=True)
            for token, share in zip(row, shares, strict=True)
        }
    assert sum(texts.values()) == pytest.approx(1, abs=1e-5)
    return texts


def chi_square(model, prompt, expected, policy, config, seed: int = 0) -> float:
    """Distance of sampled continuations from the expected ones; about its degrees of freedom if they are the same."""
    torch.manual_seed(seed)
    counts = dict.fromkeys(expected, 0)
    stray = 0
    with TIDE(model, policy, config) as engine:
        for _ in range(CALLS):
            for row in engine.generate(prompt.expand(ROWS, -1), **OPTIONS)[:, prompt.shape[1] :].tolist():
                if tuple(row) in counts:
                    counts[tuple(row)] += 1
                else:
                    stray += 1
    total = ROWS * CALLS
    likely = {text: p * total for text, p in expected.items() if p * total >= 5}
    rest, rest_count = total - sum(likely.values()), total - stray - sum(counts[text] for text in likely)
    distance = sum((counts[text] - mean) ** 2 / mean for text, mean in likely.items())
    distance += (rest_count - rest) ** 2 / max(rest, 1e-9)
    return (float("inf") if stray else distance) / len(likely)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("checkpoints", [(0,), (1, 3)])
def test_drafts_do_not_change_the_distribution(model, prompt, expected, checkpoints):
    """Distance per degree of freedom is near 1; 1.6 would be a chance of less than one in a thousand here."""
    assert chi_square(model, prompt, expected, Everyone(*checkpoints), TIDEConfig()) < 1.6


def test_the_test_would_see_a_wrong_distribution(model, prompt, expected):
    """Fast mode takes the exit's own distribution: the same statistic must notice."""
    assert chi_square(model, prompt, expected, Everyone(2), TIDEConfig(mode="fast")) > 3


@pytest.mark.invariant(9)
def test_the_same_seed_gives_the_same_text(model, prompt):
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        with TIDE(model, Everyone(1, 3)) as engine:
            texts.append(engine.generate(prompt, do_sample=True, max_new_tokens=20, eos_token_id=None).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_all_continuations_are_enumerated(expected):
    assert len(expected) == TOP**NEW
    assert len(set(itertools.chain(*expected))) > TOP
