"""Noise keyed by seed, position and token: its values, its distribution, and that keys do not show in it."""

from __future__ import annotations

import math

import pytest
import torch

from TIDE.kernels.reference.noise import MOST, UNIT, WORD, _gumbel, noise, row_seed

EULER = 0.5772156649015329
ENDS = torch.tensor([0, 2**31 - 1, 2**31, WORD])


def words(count):
    """Words at random, and those near the ends of both halves."""
    generator = torch.Generator().manual_seed(0)
    near = torch.cat([torch.arange(20_000), 2 ** torch.arange(32), 2 ** torch.arange(1, 33) - 1])
    every = torch.cat(
        [torch.randint(0, 2**32, (count,), generator=generator), near, WORD - near, 2**31 - 1 - near, 2**31 + near]
    )
    return every[(every >= 0) & (every <= WORD)]


def exact(words):
    """-ln(-ln u) in float64."""
    upper = torch.log(-torch.log1p(-(words + 1).double() / 2**32))
    lower = torch.log(-torch.log((2**32 - words).double() / 2**32))
    return -torch.where(words < 2**31, upper, lower)


def of(seeds, positions, ids):
    return noise(*torch.broadcast_tensors(*map(torch.as_tensor, (seeds, positions, ids))))


def chi_square(found, shares):
    """The sum of squared differences between counts and what shares lead to expect."""
    expected = shares.double() * found.sum()
    return float(((found - expected) ** 2 / expected).sum())


def chi_square_limit(freedom):
    """More than chance gives once in 30,000 times: the approximation of Wilson and Hilferty, four standard deviations up."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 4 * math.sqrt(part)) ** 3


def test_noise_is_little_off_the_logarithms():
    own = words(1_000_000)
    assert (_gumbel(own) * UNIT - exact(own)).abs().max() < 4e-6


def test_noise_is_finite_at_both_ends_and_meets_in_the_middle():
    first, before, after, last = (_gumbel(ENDS) * UNIT).tolist()
    assert first == pytest.approx(32 * math.log(2), abs=1e-5) and first < MOST
    assert last == pytest.approx(-math.log(32 * math.log(2)), abs=1e-5)
    assert before == pytest.approx(after, abs=1e-5) == -math.log(math.log(2))


@pytest.mark.parametrize("half", [0, 2**31])
def test_noise_falls_within_a_half(half):
    """By one unit it may rise where it is rounded, and by 1e-6 where a logarithm passes a power of two."""
    own = words(1_000_000).unique()
    rises = _gumbel(own[(own >= half) & (own < half + 2**31)]).diff()
    assert (rises > 1).sum() <= 40 and rises.max() * UNIT < 1e-6


def test_noise_has_the_mean_and_variance_of_gumbel():
    found = of(3, torch.arange(1000)[:, None], torch.arange(2000)).double()
    assert float(found.mean()) == pytest.approx(EULER, abs=4e-3)
    assert float(found.var()) == pytest.approx(math.pi**2 / 6, abs=1.2e-2)


def test_the_best_of_scores_and_noise_draws_their_softmax():
    """And the test would notice a temperature that is 3 % off."""
    scores = 1.5 * torch.randn(16, generator=torch.Generator().manual_seed(1))
    drawn = (scores + of(7, torch.arange(150_000)[:, None], torch.arange(16))).argmax(-1).bincount(minlength=16)
    limit = chi_square_limit(15)
    assert chi_square(drawn, scores.softmax(-1)) < limit
    for temperature in (0.97, 1.03):
        assert chi_square(drawn, (scores / temperature).softmax(-1)) > limit


@pytest.mark.parametrize("apart", [1, 2, 256, 65536])
@pytest.mark.parametrize("key", ["seed", "high word of the seed", "position", "id"])
def test_neighbours_are_independent(key, apart):
    count = 100_000
    keys = torch.full((3, count), 11)
    keys[2 if key != "id" else 1] = torch.arange(count)
    other = keys.clone()
    place, step = {"seed": (0, apart), "high word of the seed": (0, apart << 32), "position": (1, apart), "id": (2, apart)}[key]
    other[place] += step
    pair = torch.stack([of(*keys), of(*other)])
    assert abs(float(pair.corrcoef()[0, 1])) < 4.5 / math.sqrt(count)
    upper = pair > pair.median(-1, keepdim=True).values  # and which half they are in
    assert abs(float(upper.double().corrcoef()[0, 1])) < 4.5 / math.sqrt(count)


def test_all_64_bits_of_a_seed_matter():
    seeds = torch.cat([torch.zeros(1, dtype=torch.long), 2 ** torch.arange(63), torch.tensor([-(2**63), -1])])
    found = of(seeds[:, None], 5, torch.arange(8))
    assert len({tuple(row) for row in found.tolist()}) == len(seeds)


def test_the_first_row_of_a_batch_has_its_seed_and_others_have_their_own():
    for seed in (0, 1, 2**64 - 1, -1, 123456789):
        found = [row_seed(seed, row) for row in range(5000)]
        assert found[0] == seed % 2**64
        assert len(set(found)) == len(found) and all(0 <= own < 2**64 for own in found)
    assert {row_seed(1, row) for row in range(1000)}.isdisjoint(row_seed(2, row) for row in range(1000))
