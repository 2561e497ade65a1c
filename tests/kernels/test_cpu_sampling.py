"""The choice of tokens in compiled CPU code is that of the reference, and the noise has the same bits."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from TIDE.kernels.reference import noise as reference_noise
from TIDE.kernels.reference import sampling
from TIDE.kernels.reference.sampling import NEW, NOWHERE, Features, Params, Settings

pytest.importorskip("numba")
from TIDE.kernels.cpu import noise as cpu_noise
from TIDE.kernels.cpu import sampling as cpu_sampling

pytestmark = pytest.mark.invariant(7)

PROMPT = [1, 2, 2, 5]
WRITTEN = [2, 3, 3, 7]
SAMPLED = Params(noise=True, temperature=0.7)
KINDS = ["spread", "ties", "flat", "almost flat", "peak", "holes"]
CHOICES = {
    "greedy": Params(),
    "greedy, divided": Params(temperature=0.7),
    "temperature": SAMPLED,
    "top-k": SAMPLED._replace(top_k=50),
    "top-p": SAMPLED._replace(top_p=0.9),
    "min-p": SAMPLED._replace(min_p=0.05),
    "top-k and top-p": SAMPLED._replace(top_k=50, top_p=0.9),
    "repetition": Params(repetition=1.1),
    "presence": SAMPLED._replace(presence=0.5),
    "frequency": SAMPLED._replace(frequency=-0.3),
    "bias": SAMPLED._replace(bias=((3, 2.5), (4, -torch.inf))),
    "bans": SAMPLED._replace(bans=((0, 0, 100), (6, 50, 60))),
    "forced": SAMPLED._replace(forced=(8, 5)),
    "all": Params(True, 0.8, 40, 0.95, 0.01, 1.2, 0.3, 0.1, ((3, 2.0),), ((1, 0, 9),), (12, 3)),
}


class Batch(NamedTuple):
    """Rows with their settings, and what is chosen for them."""

    rows: list[Params]
    logits: torch.Tensor
    places: list[tuple[int, int, int]]  # row, start, steps of each choice
    drafts: list[list[int]]  # of each row
    vocabulary: torch.Tensor | None = None
    size: int = 0  # of the whole vocabulary, where there is a smaller one

    @property
    def ids(self) -> torch.Tensor:
        return torch.arange(self.logits.shape[1]) if self.vocabulary is None else self.vocabulary

    @property
    def features(self) -> Features:
        found = Features()
        for own in self.rows:
            found |= own.features
        return found

    def settings(self) -> Settings:
        size = self.size or self.logits.shape[1]
        found = Settings(len(self.rows), size, "cpu")
        found.write([(own, 2**63 + 12345 * row, [t for t in PROMPT if t < size]) for row, own in enumerate(self.rows)])
        if found.seen.shape[1]:
            for token in WRITTEN:
                found.seen[:, token % size] += NEW
        return found

    def tokens(self) -> torch.Tensor:
        """A token that is final, and the drafts of each row."""
        found = torch.zeros(1 + max(map(len, self.drafts)), len(self.rows), dtype=torch.long)
        for row, own in enumerate(self.drafts):
            found[1 : 1 + len(own), row] = torch.tensor(own, dtype=torch.long)
        return found

    def chosen_by(self, module) -> tuple[torch.Tensor, torch.Tensor]:
        rows, starts, steps = (torch.tensor(part, dtype=torch.int32) for part in zip(*self.places, strict=True))
        token, best = torch.full((len(rows),), -7), torch.zeros(len(rows))
        settings, tokens = self.settings(), self.tokens()
        module.sample(self.logits, self.vocabulary, settings, tokens, rows, starts, steps, self.features, token, best)
        return token, best

    def scores_of(self, choice: int) -> torch.Tensor:
        """The scores before noise, in float64."""
        row, start, steps = (torch.tensor([part]) for part in self.places[choice])
        logits, settings, tokens = self.logits[choice : choice + 1], self.settings(), self.tokens()
        return sampling.scores_of(logits, self.ids, settings, tokens, row, start + 1, steps, self.features)[0].double()


def alone(params, logits, starts=range(4)) -> Batch:
    """A row of its own, and a choice from the same (tokens,) logits after each of some positions."""
    starts = list(starts)
    return Batch([params], logits.expand(len(starts), -1).contiguous(), [(0, start, 0) for start in starts], [[]])


def is_at_an_edge(scores, params, token) -> bool:
    """True if rounding decides whether top-p or min-p keeps a token: its mass is within 1e-5 of the edge."""
    kept = scores >= scores.sort(descending=True).values[min(params.top_k or len(scores), len(scores)) - 1]
    shares = torch.where(kept, scores, -torch.inf).softmax(-1)
    above = float(shares[scores > scores[token]].sum())
    share = float((scores[token] - scores.max()).exp())
    return abs(above - params.top_p) < 1e-5 or abs(share - params.min_p) < 1e-5 * params.min_p


def assert_same(batch: Batch) -> tuple[list[int], list[float]]:
    """Return the choices, after they are compared with the reference's."""
    token, best = batch.chosen_by(cpu_sampling)
    expected, score = batch.chosen_by(sampling)
    for choice, (row, _, _) in enumerate(batch.places):
        if torch.isinf(score[choice]):
            assert best[choice] == score[choice]
        elif (token[choice], best[choice]) != (expected[choice], score[choice]):
            scores, places = batch.scores_of(choice), [int((batch.ids == own[choice]).nonzero()) for own in (token, expected)]
            assert places[0] != places[1]
            assert any(is_at_an_edge(scores, batch.rows[row], place) for place in places)
    return token.tolist(), best.tolist()


def logits_of(kind, size, generator):
    found = torch.randn(size, generator=generator)
    match kind:
        case "spread":
            return 4 * found
        case "ties":
            return found.round()
        case "flat":
            return found * 0 - 2.5
        case "almost flat":
            return 1e-3 * found
        case "peak":
            found[int(found.argmin())] = 40.0
            return found
        case "holes":
            found[torch.rand(size, generator=generator) < 0.4] = -torch.inf
            return 3 * found
    raise AssertionError(kind)


def some_params(size):
    token, position = st.integers(0, size - 1), st.integers(0, 12)
    return st.builds(
        Params,
        noise=st.booleans(),
        temperature=st.sampled_from([1.0, 0.1, 0.7, 3.0]),
        top_k=st.sampled_from([0, 0, 1, 2, 10, 70, 10_000]),
        top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.3, 0.9, 0.999]),
        min_p=st.sampled_from([0.0, 0.0, 0.02, 1.0]),
        repetition=st.sampled_from([1.0, 1.1, 0.5]),
        presence=st.sampled_from([0.0, 0.7, -0.4]),
        frequency=st.sampled_from([0.0, 0.2, -2.0]),
        bias=st.lists(st.tuples(token, st.sampled_from([-3.0, 5.0, -torch.inf])), max_size=3).map(tuple),
        bans=st.lists(st.tuples(token, position, position), max_size=16).map(tuple),
        forced=st.one_of(st.just((NOWHERE, 0)), st.tuples(position, token)),
    )


@st.composite
def batches(draw) -> Batch:
    size = draw(st.sampled_from([1, 2, 63, 64, 65, 700]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rows = draw(st.lists(some_params(size), min_size=1, max_size=3))
    drafts = [draw(st.lists(st.integers(0, size - 1), max_size=3)) for _ in rows]
    row = st.integers(0, len(rows) - 1)
    places = draw(st.lists(row.flatmap(lambda own: st.tuples(st.just(own), st.integers(0, 12), st.integers(0, 3))), min_size=1))
    vocabulary = None
    if draw(st.booleans()):
        vocabulary = torch.randperm(size, generator=generator)[: max(1, size // 2)].sort().values
    tokens = size if vocabulary is None else len(vocabulary)
    logits = torch.stack([logits_of(draw(st.sampled_from(KINDS)), tokens, generator) for _ in places])
    return Batch(rows, logits, places, drafts, vocabulary, size)


def test_noise_has_the_bits_of_the_reference():
    generator = np.random.default_rng(0)
    count = 1_000_000
    seeds = generator.integers(-(2**63), 2**63 - 1, count, endpoint=True)
    positions, ids = generator.integers(0, 10**6, count, endpoint=True), generator.integers(0, 262144, count)
    ends = np.array(np.meshgrid([0, -1, 2**63 - 1, -(2**63), 2**32], [0, 1, 10**6], [0, 1, 262143])).reshape(3, -1)
    seeds, positions, ids = (np.concatenate(pair) for pair in zip((seeds, positions, ids), ends, strict=True))
    expected = reference_noise.noise(*map(torch.from_numpy, (seeds, positions, ids)))
    assert np.array_equal(cpu_noise.noise(seeds, positions, ids).view(np.int32), expected.numpy().view(np.int32))


def test_no_noise_is_above_its_bound():
    """What may not be best with the bound is left out."""
    near = 2 ** np.arange(33)
    words = np.concatenate([near - 1, near[:32], near[1:32] + 1, 2**32 - near[1:], np.arange(0, 2**32, 2**32 // 9973)])
    found = reference_noise._gumbel(torch.from_numpy(words)) * reference_noise.UNIT
    bounds = torch.tensor([float(cpu_noise._most(np.uint32(word))) for word in words])
    assert (bounds > found).all()
    assert (bounds - found)[(words > 100) & (words < 2**28)].max() < 0.1
    assert found.max() < reference_noise.MOST


@examples(100)
@given(batches())
def test_any_settings_of_any_rows(batch):
    assert_same(batch)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [65, 5000, 49152])
def test_filters_keep_the_tokens_that_the_reference_keeps(kind, size):
    generator = torch.Generator().manual_seed(size)
    for top_k, top_p, min_p in itertools.product([0, 1, 50, 3000], [1.0, 0.1, 0.9, 0.9999], [0.0, 0.03]):
        params = Params(True, 1.0, top_k, top_p, min_p)
        scores, numbers = logits_of(kind, size, generator), torch.tensor([params.numbers])
        expected = sampling._kept(scores[None], numbers, torch.tensor([top_k]))[0] & (scores > -torch.inf)
        highs = cpu_sampling._highs(scores.numpy())
        cut = cpu_sampling._cut(scores.numpy(), highs, highs.max(), numbers[0].numpy(), np.int32(top_k))
        differ = (expected != (scores >= cut) & (scores > -torch.inf)).nonzero()[:, 0]
        assert all(is_at_an_edge(scores.double(), params, token) for token in differ)


def test_shares_are_exponentials():
    gaps = -np.linspace(0, 80, 5000, dtype=np.float32)
    found = np.array([cpu_sampling._exp(gap) for gap in gaps])
    np.testing.assert_allclose(found, np.exp(gaps.astype(np.float64)), rtol=2e-7)
    assert cpu_sampling._exp(np.float32(-np.inf)) < 1e-37


def test_noise_that_is_rounded_off_leaves_ties():
    """Scores are 8 apart, and so is what noise adds to them."""
    logits = torch.full((300,), 1e8)
    logits[200] += 8
    tokens, best = assert_same(alone(Params(True), logits, range(60)))
    assert len(set(tokens)) > 20 and {score - 1e8 for score in best} <= {8.0, 16.0, 24.0}


@pytest.mark.parametrize("params", CHOICES.values(), ids=list(CHOICES))
@pytest.mark.parametrize("spread", [3.0, 0.5])
def test_each_setting_over_a_large_vocabulary(params, spread):
    logits = spread * torch.randn(49152, generator=torch.Generator().manual_seed(1))
    assert_same(alone(params, logits, [3, 7, 11]))


@pytest.mark.parametrize("top_k", [1, 767, 768, 769, 20_000])
def test_top_k_around_the_number_of_blocks(top_k):
    logits = (8 * torch.randn(49152, generator=torch.Generator().manual_seed(2))).round() / 4  # many tie
    assert_same(alone(SAMPLED._replace(top_k=top_k), logits))


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 20.0])
def test_top_p_near_and_far_from_the_best_token(top_p, spread):
    logits = spread * torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    assert_same(alone(Params(True, top_p=top_p), logits, range(3)))


def test_greedy_rows_beside_others():
    rows = [Params(), SAMPLED._replace(top_k=20), Params(repetition=1.3), CHOICES["all"]]
    logits = 3 * torch.randn(8, 5000, generator=torch.Generator().manual_seed(4))
    together = Batch(rows, logits, [(row % 4, row, 0) for row in range(8)], [[]] * 4)
    tokens, _ = assert_same(together)
    assert tokens[0] == logits[0].argmax() and tokens[4] == logits[4].argmax()


def test_of_tokens_that_tie_the_first_is_greedy():
    logits = torch.zeros(1000)
    logits[[300, 301, 999]] = 2.0
    assert assert_same(alone(Params(), logits, [0])) == ([300], [2.0])


@pytest.mark.parametrize("params", [Params(True, top_k=1), Params(True, top_p=1e-6), Params(True, top_k=2, top_p=0.3)], ids=str)
def test_all_tokens_that_tie_at_an_edge_are_kept(params):
    logits = torch.zeros(200)
    logits[[3, 70, 199]] = 5.0
    tokens, _ = assert_same(alone(params, logits, range(40)))
    assert set(tokens) == {3, 70, 199}


def test_a_flat_distribution_is_not_cut():
    tokens, _ = assert_same(alone(Params(True, top_k=5, top_p=0.5, min_p=0.5), torch.zeros(100), range(300)))
    assert len(set(tokens)) > 80


def test_one_token_is_left_by_top_k_of_one_and_by_a_tiny_top_p():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(5))
    for params in (Params(True, top_k=1), Params(True, top_p=1e-6), Params(True, min_p=1.0)):
        tokens, _ = assert_same(alone(params, logits, range(20)))
        assert set(tokens) == {int(logits.argmax())}


def test_top_k_beyond_the_vocabulary_leaves_all():
    logits = torch.randn(300, generator=torch.Generator().manual_seed(6))
    assert assert_same(alone(SAMPLED._replace(top_k=301), logits)) == assert_same(alone(SAMPLED, logits))


@pytest.mark.parametrize("params", CHOICES.values(), ids=list(CHOICES))
def test_a_nan_is_reported_and_impossible_tokens_are_not_chosen(params):
    logits = torch.randn(130, generator=torch.Generator().manual_seed(7))
    logits[::2] = -torch.inf
    tokens, best = assert_same(alone(params, logits))
    assert all(token % 2 for token in tokens) and torch.tensor(best).isfinite().all()
    for nan in (torch.nan, -torch.nan):
        logits[129] = nan
        assert assert_same(alone(params, logits))[1] == [torch.inf] * 4


def test_no_token_is_allowed():
    logits = torch.zeros(3)
    for params in (Params(), SAMPLED, SAMPLED._replace(top_k=2, top_p=0.5, min_p=0.1)):
        banned = params._replace(bans=((0, 0, 9), (1, 0, 9), (2, 0, 9)))
        assert assert_same(alone(banned, logits))[1] == [-torch.inf] * 4
        assert assert_same(alone(params, logits - torch.inf))[1] == [-torch.inf] * 4


def test_a_ban_holds_from_its_first_to_its_last_position():
    tokens, _ = assert_same(alone(Params(bans=((1, 2, 4),)), torch.tensor([0.0, 2.0, 1.0]), range(6)))
    assert tokens == [1, 2, 2, 2, 1, 1]


def test_a_forced_token_is_chosen_even_if_banned():
    params = SAMPLED._replace(top_k=3, bans=((5, 0, 9),), forced=(2, 5))
    tokens, _ = assert_same(alone(params, torch.randn(50), range(4)))
    assert tokens[1] == 5 and 5 not in tokens[2:]


def test_a_forced_token_outside_the_vocabulary_of_drafts():
    batch = Batch([Params(forced=(1, 5))], torch.zeros(1, 3), [(0, 0, 0)], [[]], torch.tensor([2, 4, 6]), 10)
    assert assert_same(batch)[1] == [-torch.inf]


def test_infinities_that_meet_count_as_nan():
    logits = torch.zeros(100)
    logits[40] = torch.inf
    _, best = alone(SAMPLED._replace(bias=((40, -torch.inf),)), logits).chosen_by(cpu_sampling)
    assert not ((best > 30) & (best < torch.inf)).any()
    token, best = alone(SAMPLED._replace(top_p=0.5), logits).chosen_by(cpu_sampling)
    assert token.tolist() == [40] * 4 and best.tolist() == [torch.inf] * 4


def test_drafts_count_as_text():
    logits, vocabulary = torch.tensor([[3.0, 2.5, 2.45, 0.0]]), torch.tensor([60, 61, 62, 63])
    for steps, expected in [(0, 60), (1, 61), (2, 61), (3, 62)]:
        batch = Batch([Params(frequency=0.6)], logits, [(0, 20, steps)], [[60, 63, 61]], vocabulary, 100)
        assert assert_same(batch)[0] == [expected]
        assert assert_same(batch._replace(drafts=[[0, 59, 99]]))[0] == [60]  # drafts that have no logit


def test_dtypes_and_strides_of_what_is_passed_do_not_matter():
    """And code is compiled once."""
    batch = alone(CHOICES["all"], torch.randn(90, generator=torch.Generator().manual_seed(8)))
    token, best = batch.chosen_by(cpu_sampling)
    wide, places, out = batch.logits.repeat(1, 2), torch.arange(8)[::2] // 2, torch.zeros(4, 2, dtype=torch.int32)
    scores = torch.zeros(2, 4).T
    cpu_sampling.sample(
        wide[:, :90],
        None,
        batch.settings(),
        torch.zeros(3, 1, dtype=torch.int32),
        places * 0,
        places,
        places * 0,
        batch.features,
        out[:, 1],
        scores[:, 1],
    )
    assert out[:, 1].tolist() == token.tolist() and scores[:, 1].tolist() == best.tolist()
    assert not out[:, 0].any() and not scores[:, 0].any()
    assert len(cpu_sampling._sample.signatures) == 1
