"""Sampling on a GPU: the same seed, the same text, in every dtype; noise with the same bits as on a CPU. Skipped without one.

PYTHONPATH=src:tests python -m pytest -o addopts="" tests/gpu
"""

from __future__ import annotations

import pytest
import torch
from test_on_gpu import with_exit
from transformers import LogitsProcessor

import TIDE
from families import build
from runners import Recording
from TIDE.kernels.reference.noise import noise

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LENGTH = dict(max_new_tokens=40, eos_token_id=None, pad_token_id=0)


class Odd(LogitsProcessor):
    def __call__(self, ids, scores):
        odd = torch.arange(scores.shape[1], device=scores.device) % 2
        return scores + 1.5 * (ids[:, -1:] % 2 == 0) * odd


ASKED = {
    "temperature": dict(do_sample=True, temperature=0.7, top_k=0),
    "top-k and top-p": dict(do_sample=True, temperature=1.2, top_k=20, top_p=0.9),
    "top-p": dict(do_sample=True, top_k=0, top_p=0.8, min_p=0.02),
    "repetition": dict(do_sample=False, repetition_penalty=1.3),
    "penalties": dict(do_sample=True, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={5: 3.0}, suppress_tokens=[7]),
    "the user's own": dict(do_sample=True, logits_processor=[Odd()]),
}


@pytest.fixture
def ids():
    return torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(0)).cuda()


def asked(what: str, seed: int) -> dict:
    return {**LENGTH, **ASKED[what], **(dict(seed=seed) if ASKED[what]["do_sample"] else {})}


def test_noise_has_the_bits_of_a_cpu():
    triton_noise = pytest.importorskip("TIDE.kernels.triton.noise")
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (10**6,), generator=generator)
    positions = torch.randint(0, 2**20, (10**6,), generator=generator)
    ids = torch.randint(0, 262144, (10**6,), generator=generator)
    expected = noise(seeds, positions, ids)
    assert torch.equal(noise(seeds.cuda(), positions.cuda(), ids.cuda()).cpu(), expected)
    assert torch.equal(triton_noise.noise(seeds.cuda(), positions.cuda(), ids.cuda()).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("what", ASKED)
@pytest.mark.parametrize(("depth", "strategy"), [(0, "memory"), (2, "lens")])
def test_exits_change_nothing(what, dtype, depth, strategy, ids):
    model = build("llama").to("cuda", dtype)
    policy = with_exit(model, depth, strategy)
    with TIDE.TIDE(model) as engine:
        expected = [engine.generate(ids, **asked(what, seed)) for seed in range(4)]
        assert engine.runner.name == "triton" and engine.without_graphs is None
    with TIDE.TIDE(model, policy) as engine:
        for script in ([], [2], [4, 0, 7, 2], [7]):
            engine.scheduler = Recording(script * 20)
            for seed in range(4):
                assert torch.equal(engine.generate(ids, **asked(what, seed)), expected[seed]), (script, seed)
            assert engine.scheduler.rounds


@pytest.mark.parametrize("what", [what for what in ASKED if what != "the user's own"])
def test_a_cpu_draws_the_same_in_fp32(what, ids):
    model = build("llama")
    with TIDE.TIDE(model) as engine:
        expected = [engine.generate(ids.cpu(), **asked(what, seed)) for seed in range(3)]
    with TIDE.TIDE(model.cuda()) as engine:
        for _ in range(3):  # as it is written, captured, replayed
            for seed in range(3):
                assert torch.equal(engine.generate(ids, **asked(what, seed)).cpu(), expected[seed])


@pytest.mark.parametrize("what", ASKED)
def test_families_without_fused_layers_sample_in_rounds_too(what, ids):
    model = build("gpt2").cuda()
    with TIDE.TIDE(model) as engine:
        expected = [engine.generate(ids, **asked(what, seed)) for seed in range(2)]
    with TIDE.TIDE(model, with_exit(model, 2)) as engine:
        for seed in (0, 1, 0, 1):
            assert torch.equal(engine.generate(ids, **asked(what, seed)), expected[seed])


def test_errors_of_a_processor_leave_the_engine_usable(ids):
    class Broken(LogitsProcessor):
        def __call__(self, ids, scores):
            return scores * torch.nan

    model = build("llama").cuda()
    with TIDE.TIDE(model) as engine:
        expected = engine.generate(ids, **asked("temperature", 1))
        with pytest.raises(ValueError, match="the logits processor Broken returned NaN"):
            engine.generate(ids, logits_processor=[Broken()], **LENGTH)
        with pytest.raises(ValueError, match="no token is allowed"):
            engine.generate(ids, suppress_tokens=list(range(128)), **asked("temperature", 1))
        assert torch.equal(engine.generate(ids, **asked("temperature", 1)), expected)
        assert engine.runner.failed is None
