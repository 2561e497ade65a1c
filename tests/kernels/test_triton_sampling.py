"""Tokens chosen in Triton are those chosen in torch, and noise has the same bits. Without a GPU, in Triton's interpreter."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch

from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import noise, sampling

pytest.importorskip("triton")
from TIDE.kernels.reference.sampling import FORCED_AT, MIN_P, TOP_K, TOP_P, Features, Params, Settings
from TIDE.kernels.result import ACCEPTED, FIELDS, TOKENS
from TIDE.kernels.triton import exits as triton_exits
from TIDE.kernels.triton import noise as triton_noise
from TIDE.kernels.triton import sampling as triton_sampling
from TIDE.kernels.weights import Dense

# the interpreter is numpy, which warns of infinities
pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGE = 1e-5  # sums of probabilities in two orders differ by less
VOCABULARY, STEPS = 90, 4


class Case(NamedTuple):
    """What `sample` takes, less what it writes."""

    logits: torch.Tensor
    vocabulary: torch.Tensor | None
    settings: Settings
    tokens: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    steps: torch.Tensor
    features: Features


def a_case(logits, params, seed=0, vocabulary=None, whole=None):
    """One choice of each row, at some position and after some drafts. `whole` is the size of the model's vocabulary."""
    rng, rows, whole = random.Random(seed), len(params), whole or logits.shape[1]
    settings, features = Settings(rows, whole, DEVICE), Features()
    settings.write([(own, rng.getrandbits(64), [rng.randrange(whole) for _ in range(9)]) for own in params])
    for own in params:
        features |= own.features
    tokens = torch.tensor([[rng.randrange(whole) for _ in range(rows)] for _ in range(STEPS + 1)])
    each = [range(rows), [rng.randrange(30) for _ in range(rows)], [rng.randrange(STEPS + 1) for _ in range(rows)]]
    held = [torch.tensor(list(own), dtype=torch.int32, device=DEVICE) for own in each]
    ids = None if vocabulary is None else vocabulary.to(DEVICE)
    return Case(logits.to(DEVICE), ids, settings, tokens.to(DEVICE), *held, features)


def some_of(case, *places):
    logits, rows, starts, steps = (own[list(places)] for own in (case.logits, case.rows, case.starts, case.steps))
    return case._replace(logits=logits, rows=rows, starts=starts, steps=steps)


def chosen(case, ops=triton_sampling):
    n = len(case.rows)
    token, best = torch.full((n,), -1, device=DEVICE), torch.full((n,), math.nan, device=DEVICE)
    ops.sample(*case, token, best)
    return token.tolist(), best.tolist()


def assert_same(case):
    """Tokens and scores are those of the reference; other tokens only if one of the two stands at the edge of a filter."""
    (tokens, bests), (expected, highest) = chosen(case), chosen(case, sampling)
    ids = range(case.logits.shape[1]) if case.vocabulary is None else case.vocabulary.tolist()
    for place, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        assert token in ids
        if token != other and math.isfinite(highest[place]):
            assert is_at_edge(case, place, ids.index(token)) or is_at_edge(case, place, ids.index(other))
        else:
            assert bests[place] == highest[place]
    return tokens, bests


def is_at_edge(case, place, index):
    """True if the mass above a token is almost what top-p allows, or its score almost the lowest that min-p does."""
    ids = torch.arange(case.logits.shape[1], device=DEVICE) if case.vocabulary is None else case.vocabulary
    rows, positions = case.rows.long(), case.starts.long() + 1
    given = case.logits, ids, case.settings, case.tokens, rows, positions, case.steps, case.features
    scores = sampling.scores_of(*given)[place].double()
    numbers, top_k = case.settings.numbers[rows[place]], int(case.settings.whole[rows[place], TOP_K])
    shares = (scores - scores.max()).exp()
    if 0 < top_k < len(scores):
        shares = shares * (scores >= scores.topk(top_k).values[-1])
    above, total = shares[scores > scores[index]].sum(), shares.sum()
    lead = scores.max() - scores[index] + numbers[MIN_P].log()
    return bool((above / total - numbers[TOP_P]).abs() < EDGE) or bool(lead.abs() < EDGE)


@pytest.fixture
def small(monkeypatch):
    """Blocks and buffers so small that few tokens need many of them, and more than a buffer holds."""
    for name, value in dict(BLOCK=32, FEW=16, WIDE=64).items():
        monkeypatch.setattr(triton_sampling, name, value)


def logits_like(kind, rows, size=VOCABULARY):
    found = torch.randn(rows, size, generator=torch.Generator().manual_seed(3)) * (0 if kind == "flat" else 3)
    if kind == "tied":
        found = found.round()
        found[:, ::3] = -math.inf
    return found


def unmixed(x):
    """Undo the hash of a word."""
    x ^= x >> 16
    x = x * pow(noise.MIX[1], -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(noise.MIX[0], -1, 2**32) % 2**32
    return x ^ x >> 16


def test_noise_has_the_bits_of_the_reference(monkeypatch):
    monkeypatch.setattr(triton_noise, "AT_ONCE", 2**17 if DEVICE == "cpu" else 1024)
    generator, count = torch.Generator().manual_seed(1), 10**6
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (count,), generator=generator)
    ids = torch.randint(0, 262144, (count,), generator=generator)
    seeds[::5], seeds[1::5] = 0, -1
    positions[::3], positions[1::3], positions[2::9] = 0, positions[1::3] % 4096, 2**31 - 1
    ids[::7], ids[1::7] = 0, 262143
    found = triton_noise.noise(seeds.to(DEVICE), positions.to(DEVICE), ids.to(DEVICE))
    assert torch.equal(found.cpu(), noise.noise(seeds, positions, ids))


def test_noise_at_the_ends_of_its_halves():
    words = [0, 1, 2, 2**9 - 1, 2**9, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    words += [2**power + near for power in range(3, 32) for near in (-2, -1, 0, 1)]
    seed, position = torch.tensor([77]), torch.tensor([5])
    first, second = (int(own) for own in noise.keys(seed, position))
    ids = torch.tensor([unmixed((unmixed(word) - second) % 2**32) ^ first for word in words])
    assert noise.hashed(torch.tensor(first), torch.tensor(second), ids).tolist() == words
    found = triton_noise.noise(seed.to(DEVICE), position.to(DEVICE), ids.to(DEVICE)).cpu()
    assert torch.equal(found, noise.noise(seed, position, ids))
    assert found.max() == found[0] and 22 < found[0] < noise.MOST
    assert -3.2 < found.min() < -3


FILTERS = [
    dict(top_k=1),
    dict(top_k=3),
    dict(top_k=80),
    dict(top_k=10**6),
    dict(top_p=0.9),
    dict(top_p=1e-6),
    dict(min_p=0.1),
    dict(min_p=1.0),
    dict(top_k=40, top_p=0.7),
    dict(top_k=2, min_p=0.3),
    dict(top_p=0.6, min_p=0.01),
    dict(top_k=60, top_p=0.95, min_p=0.02),
    dict(noise=False, top_k=4),
]


@pytest.mark.parametrize("kind", ["peaked", "flat", "tied"])
def test_filters_beside_each_other(small, kind):
    params = [Params(**(dict(noise=True, temperature=1.3) | own)) for own in FILTERS]
    assert_same(a_case(logits_like(kind, len(params)), params))


@pytest.mark.parametrize("few", [16, 128])
def test_top_p_is_of_what_top_k_keeps(small, monkeypatch, few):
    """Whether scores are compared in pairs or not, and whatever min-p does not keep of them."""
    monkeypatch.setattr(triton_sampling, "FEW", few)
    params = [Params(noise=True, temperature=4.0, top_k=45, top_p=0.5, min_p=min_p) for min_p in (0.0, 0.4) for _ in range(5)]
    assert_same(a_case(logits_like("peaked", len(params)), params))


def test_filters_with_the_sizes_of_gpus(monkeypatch):
    """A few tokens of thousands, and more than are compared in pairs."""
    params = [Params(noise=True, **own) for own in (dict(top_k=50, top_p=0.9), dict(top_k=1200, top_p=0.9), dict(top_p=0.3))]
    logits = logits_like("peaked", 3, 1500)
    logits[1:] *= 0.1
    case = a_case(logits, params)
    tokens, _ = assert_same(case)
    monkeypatch.setattr(triton_sampling, "MOST_BLOCKS", 2)  # larger blocks
    assert assert_same(case)[0] == tokens


ALONE = dict(
    penalties=dict(repetition=1.3, presence=0.4, frequency=0.3),
    bias=dict(bias=((3, 2.0), (5, -math.inf), (89, 3.0))),
    rules=dict(bans=((4, 0, 100), (7, 8, 12), (89, 0, 3)), forced=(9, 6)),
    filters=dict(noise=True, top_k=10, top_p=0.9, min_p=0.01),
)


@pytest.mark.parametrize("feature", ALONE)
def test_each_feature_alone(small, feature):
    params = [Params(), Params(**ALONE[feature]), Params(**(ALONE[feature] | dict(noise=True, temperature=0.6)))]
    case = a_case(logits_like("peaked", 3), params)
    assert case.features == Features(**{feature: True})
    assert_same(case)


@pytest.mark.parametrize("seed", range(5))
def test_any_settings_beside_each_other(small, seed):
    rng = random.Random(seed)
    params = [
        Params(
            noise=rng.random() < 0.8,
            temperature=rng.choice([0.3, 0.7, 1.7]),
            top_k=rng.choice([0, 1, 3, 60]),
            top_p=rng.choice([1.0, 0.9, 0.01]),
            min_p=rng.choice([0.0, 0.05]),
            repetition=rng.choice([1.0, 1.3, 0.8]),
            presence=rng.choice([0.0, 0.4]),
            frequency=rng.choice([0.0, 0.3]),
            bias=rng.choice([(), ((3, 2.0), (5, -math.inf))]),
            bans=rng.choice([(), ((4, 0, 100), (7, 8, 12))]),
        )
        for _ in range(3)
    ]
    vocabulary = torch.tensor(sorted(rng.sample(range(VOCABULARY), 70))) if seed % 2 else None
    logits = logits_like(rng.choice(["peaked", "tied"]), 3, 70)
    assert_same(
        a_case(logits.to([torch.float32, torch.float16, torch.bfloat16][seed % 3]), params, seed, vocabulary, VOCABULARY)
    )


def test_a_choice_does_not_depend_on_the_choices_beside_it(small):
    params = [Params(noise=True, **own) for own in (dict(top_p=0.9), dict(top_k=2), dict(top_k=60, top_p=0.9))]
    case = a_case(logits_like("peaked", 3), params)
    each = [chosen(some_of(case, place)) for place in range(3)]
    tokens, bests = chosen(some_of(case, 2, 0, 1))
    assert [([token], [best]) for token, best in zip(tokens, bests, strict=True)] == [each[2], each[0], each[1]]


def test_tokens_of_a_draft_vocabulary_keep_their_noise(small):
    vocabulary, logits = torch.arange(0, VOCABULARY, 3), logits_like("peaked", 2)
    others = torch.ones(VOCABULARY, dtype=torch.bool)
    others[vocabulary] = False
    params = [Params(noise=True, **ALONE["penalties"]), Params(noise=True, top_k=8)]
    few = a_case(logits[:, vocabulary].contiguous(), params, vocabulary=vocabulary, whole=VOCABULARY)
    assert assert_same(few) == chosen(a_case(logits.masked_fill(others, -math.inf), params))


def test_the_first_of_equal_tokens_is_chosen(small):
    logits = torch.zeros(2, 70)
    logits[:, [20, 41, 66]] = 5
    assert assert_same(a_case(logits, [Params(), Params()])) == ([20, 20], [5, 5])


def test_logits_that_are_not_numbers_and_rows_without_a_token(small):
    """Each fault alone and beside a sound choice, with filters and without."""
    ban_all = tuple((token, -math.inf) for token in range(40))
    for own in (dict(), dict(noise=True, top_p=0.9)):
        logits = logits_like("peaked", 4, 40)
        logits[1, 37], logits[2] = math.nan, -math.inf
        case = a_case(logits, [Params(**own), Params(**own), Params(**own), Params(**own, bias=ban_all)])
        _, best = assert_same(case)
        assert math.isfinite(best[0]) and best[1:] == [math.inf, -math.inf, -math.inf]


def test_a_forced_token_is_chosen_whatever_its_logit(small):
    logits = logits_like("tied", 2, 40)
    params = [Params(noise=True, top_k=3, forced=(9, 6)), Params(forced=(9, 6), bans=((6, 0, 20),))]
    case = a_case(logits, params)
    case.starts.fill_(8)
    assert assert_same(case)[0] == [6, 6]
    case.settings.whole[:, FORCED_AT] = 8
    assert 6 not in assert_same(case)[0]


def test_only_drafts_before_a_choice_are_text(small):
    logits = torch.zeros(3, 40)
    logits[:, 7], logits[:, 9] = 1.0, 0.5
    case = a_case(logits, [Params(presence=0.8)] * 3)
    case.settings.seen.zero_()
    case.tokens.copy_(torch.tensor([9, 30, 7, 9, 9])[:, None])  # the newest final token is counted by `count`
    case.steps.copy_(torch.tensor([1, 2, 3]))
    assert assert_same(case) == ([7, 9, 7], [1.0, 0.5, pytest.approx(0.2)])


def test_final_tokens_are_counted():
    generator = torch.Generator().manual_seed(2)
    result = torch.randint(0, 40, (5, FIELDS), generator=generator).float()
    result[:, ACCEPTED] = torch.tensor([0, 15, 3, -1, 4])
    result[2, TOKENS : TOKENS + 4] = torch.tensor([6.0, 8.0, 6.0, 6.0])
    active = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32)
    seen = torch.randint(0, 5, (5, 40), generator=generator, dtype=torch.int32)
    expected, found = seen.clone(), seen.clone().to(DEVICE)
    sampling.count(expected, result, active)
    triton_sampling.count(found, result.to(DEVICE), active.to(DEVICE))
    assert torch.equal(found.cpu(), expected)
    assert expected[2, 6] - seen[2, 6] == 6 and torch.equal(expected[3:], seen[3:])


@pytest.mark.parametrize("ops", [triton_exits, reference])
def test_logits_are_written_beside_the_best_token(ops):
    x, weight = (torch.randn(size, 48, generator=torch.Generator().manual_seed(size)).to(DEVICE) for size in (3, 201))
    best, token, signals = torch.zeros(3, device=DEVICE), torch.zeros(3, dtype=torch.long, device=DEVICE), x.new_zeros(3, 4)
    for vocabulary in (None, torch.arange(1, 201, 3, device=DEVICE)):
        expected = x @ (weight if vocabulary is None else weight[vocabulary]).T
        found = torch.full((4, expected.shape[1]), -9.0, device=DEVICE)
        ops.best_tokens(x, Dense(weight), best, token, signals, vocabulary, found[:3])
        torch.testing.assert_close(found[:3], expected, rtol=0, atol=1e-4)
        assert (found[3] == -9).all()
        places = found[:3].argmax(-1)
        assert torch.equal(token, places if vocabulary is None else vocabulary[places])
        assert torch.equal(best, found[:3].amax(-1))
