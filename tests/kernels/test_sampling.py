"""The choice of tokens in numba and in Triton (without a GPU, in its interpreter) is that of the reference."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from levels import daily
from properties import examples
from TIDE.kernels.reference import noise as reference_noise
from TIDE.kernels.reference import sampling
from TIDE.kernels.reference.sampling import NEW, NOWHERE, Features, Params, Settings
from TIDE.kernels.result import ACCEPTED, FIELDS, TOKENS

# the interpreter is numpy, which warns of infinities
pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

CUDA = "cuda" if torch.cuda.is_available() else "cpu"
PLACES = {"numba": ("cpu", "cpu"), "triton": ("triton", CUDA)}  # of a kernel: its package and its device
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
settings_alone = pytest.mark.parametrize("params", CHOICES.values(), ids=list(CHOICES))


def module_of(name: str, module: str):
    pytest.importorskip(name)
    return importlib.import_module(f"TIDE.kernels.{PLACES[name][0]}.{module}")


@pytest.fixture(params=PLACES)
def kernel(request, monkeypatch):
    """Triton's blocks and buffers are so small that few tokens need many of them, and more than a buffer holds."""
    if request.param == "triton":
        make_small(monkeypatch)
    return request.param


def make_small(patch) -> None:
    for name, value in dict(BLOCK=32, FEW=16, WIDE=64).items():
        patch.setattr(module_of("triton", "sampling"), name, value)


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

    def settings(self, device: str = "cpu") -> Settings:
        size = self.size or self.logits.shape[1]
        found = Settings(len(self.rows), size, device)
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

    def chosen_by(self, module, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        places = (torch.tensor(part, dtype=torch.int32, device=device) for part in zip(*self.places, strict=True))
        token, best = torch.full((len(self.places),), -7, device=device), torch.zeros(len(self.places), device=device)
        vocabulary = None if self.vocabulary is None else self.vocabulary.to(device)
        given = self.logits.to(device), vocabulary, self.settings(device), self.tokens().to(device)
        module.sample(*given, *places, self.features, token, best)
        return token.cpu(), best.cpu()

    def scores_of(self, choice: int) -> torch.Tensor:
        """The scores before noise, in float64."""
        row, start, steps = (torch.tensor([part]) for part in self.places[choice])
        logits, settings, tokens = self.logits[choice : choice + 1], self.settings(), self.tokens()
        return sampling.scores_of(logits, self.ids, settings, tokens, row, start + 1, steps, self.features)[0].double()


def alone(params, logits, starts=range(4)) -> Batch:
    """A row of its own, and a choice from the same (tokens,) logits after each of some positions."""
    starts = list(starts)
    return Batch([params], logits.expand(len(starts), -1).contiguous(), [(0, start, 0) for start in starts], [[]])


def beside(rows: list[Params], logits) -> Batch:
    """A choice of each row, at a position of its own."""
    return Batch(rows, logits, [(row, 3 * row, 0) for row in range(len(rows))], [[]] * len(rows))


def is_at_an_edge(scores, params, token) -> bool:
    """True if rounding decides whether top-p or min-p keeps a token: its mass is within 1e-5 of the edge."""
    kept = scores >= scores.sort(descending=True).values[min(params.top_k or len(scores), len(scores)) - 1]
    shares = torch.where(kept, scores, -torch.inf).softmax(-1)
    above = float(shares[scores > scores[token]].sum())
    share = float((scores[token] - scores.max()).exp())
    return abs(above - params.top_p) < 1e-5 or abs(share - params.min_p) < 1e-5 * params.min_p


def assert_same(batch: Batch, kernel: str) -> tuple[list[int], list[float]]:
    """Return the choices, after they are compared with the reference's."""
    device = PLACES[kernel][1]
    token, best = batch.chosen_by(module_of(kernel, "sampling"), device)
    expected, score = batch.chosen_by(sampling, device)
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


def normal(*size, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


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
def batches(draw, sizes=(1, 2, 63, 64, 65, 700), most=100) -> Batch:
    size = draw(st.sampled_from(sizes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    rows = draw(st.lists(some_params(size), min_size=1, max_size=3))
    drafts = [draw(st.lists(st.integers(0, size - 1), max_size=3)) for _ in rows]
    place = st.integers(0, len(rows) - 1).flatmap(lambda own: st.tuples(st.just(own), st.integers(0, 12), st.integers(0, 3)))
    places = draw(st.lists(place, min_size=1, max_size=most))
    vocabulary = None
    if draw(st.booleans()):
        vocabulary = torch.randperm(size, generator=generator)[: max(1, size // 2)].sort().values
    tokens = size if vocabulary is None else len(vocabulary)
    logits = torch.stack([logits_of(draw(st.sampled_from(KINDS)), tokens, generator) for _ in places])
    return Batch(rows, logits, places, drafts, vocabulary, size)


# ---- noise -------------------------------------------------------------------------------------------------------------------


def noise_by(kernel, *keys):
    module = module_of(kernel, "noise")
    if kernel == "numba":
        return torch.from_numpy(module.noise(*(own.numpy() for own in keys)))
    return module.noise(*(own.to(CUDA) for own in keys)).cpu()


def test_noise_has_the_bits_of_the_reference(kernel, monkeypatch):
    if kernel == "triton":
        monkeypatch.setattr(module_of("triton", "noise"), "AT_ONCE", 2**17 if CUDA == "cpu" else 1024)
    generator, count = torch.Generator().manual_seed(1), 10**6
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
    positions = torch.randint(0, 2**31 - 1, (count,), generator=generator)
    ids = torch.randint(0, 262144, (count,), generator=generator)
    seeds[::5], seeds[1::5], seeds[2::25], seeds[3::25], seeds[4::25] = 0, -1, 2**63 - 1, -(2**63), 2**32
    positions[::3], positions[1::3], positions[2::9] = 0, positions[1::3] % 4096, 2**31 - 1
    ids[::7], ids[1::7] = 0, 262143
    found, expected = noise_by(kernel, seeds, positions, ids), reference_noise.noise(seeds, positions, ids)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def unmixed(x):
    """Undo the hash of a word."""
    x ^= x >> 16
    x = x * pow(reference_noise.MIX[1], -1, 2**32) % 2**32
    x ^= x >> 15 ^ x >> 30
    x = x * pow(reference_noise.MIX[0], -1, 2**32) % 2**32
    return x ^ x >> 16


def test_noise_at_the_ends_of_its_halves(kernel):
    words = [0, 1, 2, 2**9 - 1, 2**9, 2**30, 2**31 - 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1]
    words += [2**power + near for power in range(3, 32) for near in (-2, -1, 0, 1)]
    seed, position = torch.tensor([77]), torch.tensor([5])
    first, second = (int(own) for own in reference_noise.keys(seed, position))
    ids = torch.tensor([unmixed((unmixed(word) - second) % 2**32) ^ first for word in words])
    assert reference_noise.hashed(torch.tensor(first), torch.tensor(second), ids).tolist() == words
    found = noise_by(kernel, seed.expand(len(ids)).contiguous(), position.expand(len(ids)).contiguous(), ids)
    assert torch.equal(found, reference_noise.noise(seed, position, ids))
    assert found.max() == found[0] and 22 < found[0] < reference_noise.MOST
    assert -3.2 < found.min() < -3


def test_no_noise_is_above_its_bound():
    """What may not be best with the bound is left out."""
    cpu_noise = module_of("numba", "noise")
    near = 2 ** np.arange(33)
    words = np.concatenate([near - 1, near[:32], near[1:32] + 1, 2**32 - near[1:], np.arange(0, 2**32, 2**32 // 9973)])
    found = reference_noise._gumbel(torch.from_numpy(words)) * reference_noise.UNIT
    bounds = torch.tensor([float(cpu_noise._most(np.uint32(word))) for word in words])
    assert (bounds > found).all()
    assert (bounds - found)[(words > 100) & (words < 2**28)].max() < 0.1
    assert found.max() < reference_noise.MOST


# ---- settings ----------------------------------------------------------------------------------------------------------------


@examples(100)
@given(batches())
def test_any_settings_of_any_rows_in_numba(batch):
    assert_same(batch, "numba")


@examples(6)
@given(batches((2, 64, 90), most=4), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_any_settings_of_any_rows_in_triton(batch, dtype):
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        assert_same(batch._replace(logits=batch.logits.to(dtype)), "triton")


@settings_alone
@pytest.mark.parametrize("spread", [3.0, 0.5])
def test_each_setting_alone(params, spread, kernel):
    size, starts = (49152, [3, 7, 11]) if kernel == "numba" else (90, [7, 11])
    assert_same(alone(params, spread * normal(size, seed=1), starts), kernel)


FILTERS = [*itertools.product([1.3], [0, 3, 40, 10**6], [1.0, 0.7], [0.0, 0.02]), (1.0, 0, 1e-6, 0.0), (4.0, 45, 0.5, 0.4)]


@pytest.mark.parametrize("kind", daily(["spread", "flat", "ties"], ["ties"]))
def test_filters_beside_each_other(kind, kernel):
    rows = [Params(True, *own) for own in FILTERS]
    assert_same(beside(rows, torch.stack([logits_of(kind, 90, torch.Generator().manual_seed(3))] * len(rows))), kernel)


@pytest.mark.parametrize("few", [16, 128])
def test_top_p_is_of_what_top_k_keeps(few, monkeypatch):
    """Whether scores are compared in pairs or not, and whatever min-p does not keep of them."""
    make_small(monkeypatch)
    monkeypatch.setattr(module_of("triton", "sampling"), "FEW", few)
    rows = [Params(True, 4.0, 45, 0.5, min_p) for min_p in (0.0, 0.4) for _ in range(5)]
    assert_same(beside(rows, 3 * normal(len(rows), 90, seed=3)), "triton")


def test_filters_with_the_sizes_of_gpus(monkeypatch):
    """A few tokens of thousands, and more than are compared in pairs."""
    rows = [Params(noise=True, **own) for own in (dict(top_k=50, top_p=0.9), dict(top_k=1200, top_p=0.9), dict(top_p=0.3))]
    batch = beside(rows, normal(3, 1500, seed=3) * torch.tensor([[3.0], [0.3], [0.3]]))
    tokens, _ = assert_same(batch, "triton")
    monkeypatch.setattr(module_of("triton", "sampling"), "MOST_BLOCKS", 2)  # larger blocks
    assert assert_same(batch, "triton")[0] == tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [65, 5000, 49152])
def test_filters_keep_the_tokens_that_the_reference_keeps(kind, size):
    cpu_sampling, generator = module_of("numba", "sampling"), torch.Generator().manual_seed(size)
    for top_k, top_p, min_p in itertools.product([0, 1, 50, 3000], [1.0, 0.1, 0.9, 0.9999], [0.0, 0.03]):
        params = Params(True, 1.0, top_k, top_p, min_p)
        scores, numbers = logits_of(kind, size, generator), torch.tensor([params.numbers])
        expected = sampling._kept(scores[None], numbers, torch.tensor([top_k]))[0] & (scores > -torch.inf)
        highs = cpu_sampling._highs(scores.numpy())
        cut = cpu_sampling._cut(scores.numpy(), highs, highs.max(), numbers[0].numpy(), np.int32(top_k))
        differ = (expected != (scores >= cut) & (scores > -torch.inf)).nonzero()[:, 0]
        assert all(is_at_an_edge(scores.double(), params, token) for token in differ)


def test_shares_are_exponentials():
    cpu_sampling, gaps = module_of("numba", "sampling"), -np.linspace(0, 80, 5000, dtype=np.float32)
    found = np.array([cpu_sampling._exp(gap) for gap in gaps])
    np.testing.assert_allclose(found, np.exp(gaps.astype(np.float64)), rtol=2e-7)
    assert cpu_sampling._exp(np.float32(-np.inf)) < 1e-37


def test_noise_that_is_rounded_off_leaves_ties():
    """Scores are 8 apart, and so is what noise adds to them."""
    logits = torch.full((300,), 1e8)
    logits[200] += 8
    tokens, best = assert_same(alone(Params(True), logits, range(60)), "numba")
    assert len(set(tokens)) > 20 and {score - 1e8 for score in best} <= {8.0, 16.0, 24.0}


@pytest.mark.parametrize("top_k", [1, 767, 768, 769, 20_000])
def test_top_k_around_the_number_of_blocks(top_k):
    logits = (8 * normal(49152, seed=2)).round() / 4  # many tie
    assert_same(alone(SAMPLED._replace(top_k=top_k), logits), "numba")


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.99, 0.9999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 20.0])
def test_top_p_near_and_far_from_the_best_token(top_p, spread):
    assert_same(alone(Params(True, top_p=top_p), spread * normal(20_000, seed=3), range(3)), "numba")


# ---- which token, whatever the kernel ----------------------------------------------------------------------------------------


def test_a_choice_does_not_depend_on_the_choices_beside_it(kernel):
    rows = [Params(), SAMPLED._replace(top_k=20), SAMPLED._replace(top_k=60, top_p=0.9), CHOICES["all"]]
    batch = beside(rows, 3 * normal(4, 90, seed=4))
    tokens, best = assert_same(batch, kernel)
    assert tokens[0] == batch.logits[0].argmax()
    for order in ([2], [3, 1, 2, 0]):
        some = batch._replace(logits=batch.logits[order], places=[batch.places[place] for place in order])
        assert assert_same(some, kernel) == ([tokens[place] for place in order], [best[place] for place in order])


def test_of_tokens_that_tie_the_first_is_greedy(kernel):
    logits = torch.zeros(100)
    logits[[30, 31, 99]] = 2.0
    assert assert_same(alone(Params(), logits, [0]), kernel) == ([30], [2.0])


@pytest.mark.parametrize("params", [Params(True, top_k=1), Params(True, top_p=1e-6), Params(True, top_k=2, top_p=0.3)], ids=str)
def test_all_tokens_that_tie_at_an_edge_are_kept(params, kernel):
    logits = torch.zeros(90)
    logits[[3, 70, 89]] = 5.0
    found = {*assert_same(alone(params, logits, range(20 if kernel == "numba" else 4)), kernel)[0]}
    assert found <= {3, 70, 89} and (len(found) == 3 or kernel == "triton")


def test_a_flat_distribution_is_not_cut():
    tokens, _ = assert_same(alone(Params(True, top_k=5, top_p=0.5, min_p=0.5), torch.zeros(100), range(300)), "numba")
    assert len(set(tokens)) > 80


@pytest.mark.parametrize("params", [Params(True, top_k=1), Params(True, top_p=1e-6), Params(True, min_p=1.0)], ids=str)
def test_filters_that_leave_one_token(params, kernel):
    logits = normal(90, seed=5)
    assert {*assert_same(alone(params, logits), kernel)[0]} == {int(logits.argmax())}


def test_top_k_beyond_the_vocabulary_leaves_all(kernel):
    logits = normal(90, seed=6)
    assert assert_same(alone(SAMPLED._replace(top_k=91), logits), kernel) == assert_same(alone(SAMPLED, logits), kernel)


@settings_alone
def test_a_nan_is_reported_and_impossible_tokens_are_not_chosen(params, kernel):
    logits = normal(90, seed=7)
    logits[::2] = -torch.inf
    starts = range(4 if kernel == "numba" else 1)  # the interpreter takes its time
    tokens, best = assert_same(alone(params, logits, starts), kernel)
    assert all(token % 2 for token in tokens) and torch.tensor(best).isfinite().all()
    for nan in (torch.nan, -torch.nan):
        logits[89] = nan
        assert assert_same(alone(params, logits, starts), kernel)[1] == [torch.inf] * len(starts)


@pytest.mark.parametrize("params", [Params(), SAMPLED, SAMPLED._replace(top_k=2, top_p=0.5, min_p=0.1)], ids=str)
def test_no_token_is_allowed(params, kernel):
    logits, banned = torch.zeros(3), tuple((token, 0, 9) for token in range(3))
    biased = tuple((token, -math.inf) for token in range(3))
    for own in (params._replace(bans=banned), params._replace(bias=biased)):
        assert assert_same(alone(own, logits), kernel)[1] == [-torch.inf] * 4
    assert assert_same(alone(params, logits - torch.inf), kernel)[1] == [-torch.inf] * 4


def test_a_ban_holds_from_its_first_to_its_last_position(kernel):
    tokens, _ = assert_same(alone(Params(bans=((1, 2, 4),)), torch.tensor([0.0, 2.0, 1.0]), range(6)), kernel)
    assert tokens == [1, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("params", [Params(), SAMPLED._replace(top_k=3)], ids=str)
def test_a_forced_token_is_chosen_even_if_banned(params, kernel):
    tokens, _ = assert_same(alone(params._replace(bans=((5, 0, 9),), forced=(2, 5)), normal(50), range(4)), kernel)
    assert tokens[1] == 5 and 5 not in tokens[2:]


def test_a_forced_token_outside_the_vocabulary_of_drafts(kernel):
    batch = Batch([Params(forced=(1, 5))], torch.zeros(1, 3), [(0, 0, 0)], [[]], torch.tensor([2, 4, 6]), 10)
    assert assert_same(batch, kernel)[1] == [-torch.inf]


def test_infinities_that_meet_count_as_nan():
    logits, cpu_sampling = torch.zeros(100), module_of("numba", "sampling")
    logits[40] = torch.inf
    _, best = alone(SAMPLED._replace(bias=((40, -torch.inf),)), logits).chosen_by(cpu_sampling)
    assert not ((best > 30) & (best < torch.inf)).any()
    token, best = alone(SAMPLED._replace(top_p=0.5), logits).chosen_by(cpu_sampling)
    assert token.tolist() == [40] * 4 and best.tolist() == [torch.inf] * 4


def test_drafts_before_a_choice_count_as_text(kernel):
    logits, vocabulary = torch.tensor([[3.0, 2.5, 2.45, 0.0]]), torch.tensor([60, 61, 62, 63])
    for steps, expected in [(0, 60), (1, 61), (2, 61), (3, 62)]:
        batch = Batch([Params(frequency=0.6)], logits, [(0, 20, steps)], [[60, 63, 61]], vocabulary, 100)
        assert assert_same(batch, kernel)[0] == [expected]
        assert assert_same(batch._replace(drafts=[[0, 59, 99]]), kernel)[0] == [60]  # drafts that have no logit


def test_tokens_of_a_draft_vocabulary_keep_their_noise(kernel):
    vocabulary, logits = torch.arange(0, 90, 3), 3 * normal(2, 90, seed=3)
    others = torch.ones(90, dtype=torch.bool)
    others[vocabulary] = False
    rows = [SAMPLED._replace(repetition=1.3, presence=0.4, frequency=0.3), SAMPLED._replace(top_k=8)]
    few = beside(rows, logits[:, vocabulary].contiguous())._replace(vocabulary=vocabulary, size=90)
    assert assert_same(few, kernel) == assert_same(beside(rows, logits.masked_fill(others, -math.inf)), kernel)


def test_dtypes_and_strides_of_what_is_passed_do_not_matter():
    """And code is compiled once."""
    cpu_sampling, batch = module_of("numba", "sampling"), alone(CHOICES["all"], normal(90, seed=8))
    token, best = batch.chosen_by(cpu_sampling)
    wide, places, out = batch.logits.repeat(1, 2), torch.arange(8)[::2] // 2, torch.zeros(4, 2, dtype=torch.int32)
    scores, drafts, zeros = torch.zeros(2, 4).T, torch.zeros(3, 1, dtype=torch.int32), places * 0
    given = wide[:, :90], None, batch.settings(), drafts, zeros, places, zeros, batch.features
    cpu_sampling.sample(*given, out[:, 1], scores[:, 1])
    assert out[:, 1].tolist() == token.tolist() and scores[:, 1].tolist() == best.tolist()
    assert not out[:, 0].any() and not scores[:, 0].any()
    assert len(cpu_sampling._sample.signatures) == 1


def test_final_tokens_are_counted():
    generator = torch.Generator().manual_seed(2)
    result = torch.randint(0, 40, (5, FIELDS), generator=generator).float()
    result[:, ACCEPTED] = torch.tensor([0, 15, 3, -1, 4])
    result[2, TOKENS : TOKENS + 4] = torch.tensor([6.0, 8.0, 6.0, 6.0])
    active = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32)
    seen = torch.randint(0, 5, (5, 40), generator=generator, dtype=torch.int32)
    expected, found = seen.clone(), seen.clone().to(CUDA)
    sampling.count(expected, result, active)
    module_of("triton", "sampling").count(found, result.to(CUDA), active.to(CUDA))
    assert torch.equal(found.cpu(), expected)
    assert expected[2, 6] - seen[2, 6] == 6 and torch.equal(expected[3:], seen[3:])
