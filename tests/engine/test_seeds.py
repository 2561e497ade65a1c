"""Seeds: a seed means a text, rows of a batch have their own, and torch's generator gives one where none is given."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessor

from families import build
from policies import Everyone
from runners import on_references
from TIDE import TIDE
from TIDE.kernels.reference.noise import row_seed

pytestmark = pytest.mark.invariant(9)

SAMPLED = dict(do_sample=True, max_new_tokens=6, eos_token_id=None, pad_token_id=0)


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(params=["host", "device"], scope="module")
def engine(request, model):
    with TIDE(model, Everyone(1) if request.param == "host" else None) as made:
        yield on_references(made) if request.param == "device" else made


@pytest.fixture
def ids():
    return torch.randint(3, 128, (3, 6), generator=torch.Generator().manual_seed(1))


def test_a_seed_is_a_text(engine, ids):
    texts = [engine.generate(ids[:1], seed=seed, **SAMPLED).tolist() for seed in (1, 1, 2, 2**64 - 1, 0)]
    assert texts[0] == texts[1]
    assert len({str(text) for text in texts}) == 4


def test_negative_seeds_are_their_64_bits(engine, ids):
    assert torch.equal(engine.generate(ids[:1], seed=-1, **SAMPLED), engine.generate(ids[:1], seed=2**64 - 1, **SAMPLED))


def test_rows_of_a_batch_have_seeds_of_their_own(engine, ids):
    together = engine.generate(ids, seed=9, **SAMPLED)
    seeds = [row.stats.seed for row in engine.last_rows]
    assert seeds == [9, row_seed(9, 1), row_seed(9, 2)] and len(set(seeds)) == 3
    assert torch.equal(engine.generate(ids, seed=seeds, **SAMPLED), together)
    assert torch.equal(engine.generate(ids[:1], seed=9, **SAMPLED), together[:1])
    same = engine.generate(ids[:1].expand(3, -1), seed=[4, 4, 5], **SAMPLED)
    assert torch.equal(same[0], same[1]) and not torch.equal(same[0], same[2])


def test_torchs_generator_gives_a_seed_where_none_is_given(engine, ids):
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts += [engine.generate(ids[:1], **SAMPLED), engine.generate(ids[:1], **SAMPLED)]
    assert torch.equal(texts[0], texts[2]) and torch.equal(texts[1], texts[3]) and not torch.equal(texts[0], texts[1])
    drawn = engine.last_stats.seed
    assert torch.equal(engine.generate(ids[:1], seed=drawn, **SAMPLED), texts[3])
    assert f"Seed: {drawn}" in engine.last_stats.summary()


def test_greedy_rows_leave_torchs_generator_alone(engine, ids):
    state = torch.get_rng_state()
    engine.generate(ids, max_new_tokens=4, do_sample=False)
    engine.generate(ids, seed=3, **SAMPLED)
    assert torch.equal(torch.get_rng_state(), state)
    engine.generate(ids, max_new_tokens=4, do_sample=False)
    assert engine.last_stats.seed is None and "Seed" not in engine.last_stats.summary()


def test_streams_draw_what_generate_draws(engine, ids):
    expected = engine.generate(ids[:1], seed=6, **SAMPLED)[0, 6:].tolist()
    assert list(engine.stream(ids[:1], seed=6, **SAMPLED)) == expected


def test_padding_does_not_move_positions(engine, ids):
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids[:1]], 1)
    mask = (torch.arange(10) >= 4).long()[None]
    found = engine.generate(padded, attention_mask=mask, seed=2, **SAMPLED)
    assert found[0, 10:].tolist() == engine.generate(ids[:1], seed=2, **SAMPLED)[0, 6:].tolist()


class Returns(LogitsProcessor):
    """Returns what a broken processor might."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __call__(self, ids, scores):
        if self.what == "raises":
            raise KeyError("mine")
        broken = {"nan": scores * torch.nan, "-inf": scores - torch.inf, "shape": scores[:, :-1], "none": None}
        return broken[self.what]


BAD = {  # options -> type of the error and what it says
    "a seed past 64 bits": (dict(seed=2**64), ValueError, r"fit into 64 bits.*found 18446744073709551616"),
    "a seed far below zero": (dict(seed=-(2**63) - 1), ValueError, "fit into 64 bits"),
    "a seed in words": (dict(seed="seven"), TypeError, "a seed must be an integer, found str"),
    "a share as a seed": (dict(seed=0.5), TypeError, "a seed must be an integer, found float"),
    "too few seeds": (dict(seed=[1, 2]), ValueError, "one seed for each row, 3, found 2"),
    "temperature 0": (
        dict(temperature=0.0),
        ValueError,
        r"temperature must be a number above 0, found 0.0. Use do_sample=False",
    ),
    "temperature nan": (dict(temperature=float("nan")), ValueError, "temperature must be a number above 0, found nan"),
    "top-p 0": (dict(top_p=0.0), ValueError, "top_p must be a number above 0 and at most 1, found 0.0"),
    "top-p 2": (dict(top_p=2.0), ValueError, "top_p must be a number above 0 and at most 1, found 2.0"),
    "repetition 0": (
        dict(repetition_penalty=0.0),
        ValueError,
        "repetition_penalty must be a number above 0, found 0.0. Use 1.0",
    ),
    "presence nan": (dict(presence_penalty=float("nan")), ValueError, "presence_penalty must be a finite number, found nan"),
    "frequency inf": (dict(frequency_penalty=float("inf")), ValueError, "frequency_penalty must be a finite number"),
    "bias of no token": (dict(logit_bias={128: 1.0}), ValueError, "logit_bias must name token ids from 0 to 127, found 128"),
    "bias nan": (
        dict(logit_bias={1: float("nan")}),
        ValueError,
        "logit_bias must be numbers below infinity, found nan for token 1",
    ),
    "bias as a list": (dict(logit_bias=[1]), TypeError, "logit_bias must map token ids to numbers, found list"),
    "nothing allowed": (dict(suppress_tokens=list(range(128))), ValueError, "no token is allowed: .*Forbid fewer"),
    "a processor's nan": (dict(logits_processor=[Returns("nan")]), ValueError, "logits processor Returns returned NaN"),
    "a processor's -inf": (dict(logits_processor=[Returns("-inf")]), ValueError, "Returns returned -inf for every token"),
    "a processor's shape": (
        dict(logits_processor=[Returns("shape")]),
        ValueError,
        r"Returns returned scores of shape \(1, 127\) for \(1, 128\)",
    ),
    "a processor's nothing": (
        dict(logits_processor=[Returns("none")]),
        ValueError,
        "Returns returned NoneType in place of a tensor",
    ),
    "a processor's own error": (dict(logits_processor=[Returns("raises")]), KeyError, "mine"),
}


@pytest.mark.invariant(10)
@pytest.mark.parametrize("what", BAD)
def test_bad_settings_are_errors_that_name_the_next_step(engine, ids, what):
    asked, kind, message = BAD[what]
    expected = engine.generate(ids, seed=1, **SAMPLED)
    runner = engine.runner
    with pytest.raises(kind, match=message):
        engine.generate(ids, **{"seed": 1, **SAMPLED, **asked})
    assert torch.equal(engine.generate(ids, seed=1, **SAMPLED), expected)
    assert engine.runner is runner and getattr(runner, "failed", None) is None


def test_errors_of_the_users_criteria_are_no_fault_of_the_device(engine, ids):
    def mine(ids, scores, **kwargs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.generate(ids[:1], stopping_criteria=[mine], **SAMPLED)
    assert getattr(engine.runner, "failed", None) is None
