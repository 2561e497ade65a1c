"""Long passes on a GPU: prompts some of whose tokens stop. And what calibration takes a step to cost there."""

from __future__ import annotations

import pytest
import torch

import TIDE
from families import build
from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration import timing
from TIDE.kernels.layer import Attention, Norm, Pass, no_norm
from TIDE.kernels.weights import Dense
from TIDE.prompt_exits.maps import PromptExit

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

OPTIONS = dict(max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)


class EveryThird(PromptExit):
    depth = 2

    def stops(self, states, positions):
        return torch.tensor([position % 3 == 1 for position in positions], device=states.device)

    def predict(self, depth, states):
        return states * (1 + 0.1 * (depth - self.depth))


class Stops(TIDE.ExitPolicy):
    """No exits but in the prompt."""

    checkpoints = ()

    def __init__(self) -> None:
        self.prompt_exit = EveryThird()

    def score(self, candidates):
        raise AssertionError("there is no checkpoint")


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("tokens", [20, 100, 700])
def test_queries_of_some_tokens_have_the_bits_of_all(tokens, norms, dim):
    ops = pytest.importorskip("TIDE.kernels.triton.ops")
    generator = torch.Generator().manual_seed(1)

    def some(*size):
        return (torch.randn(size, generator=generator) / size[-1] ** 0.5).bfloat16().cuda()

    none, hidden = no_norm(some(0)), 256
    own = Norm(some(dim), 1e-6, 0.0, False, some(0)) if norms else none
    shapes = (4 * dim, hidden), (2 * dim, hidden), (2 * dim, hidden), (hidden, 4 * dim)
    weights = [Dense(some(*shape)) for shape in shapes]
    attention = Attention(*weights, *(some(0) for _ in range(4)), own, own, dim, dim**-0.5)
    at = torch.arange(tokens, dtype=torch.int32).cuda()
    tables = torch.arange(12, dtype=torch.int32).cuda()[None]
    pass_ = Pass(some(tokens, hidden), some(tokens, dim), some(tokens, dim), at * 0, at, at, at, tables)

    def found(asking):
        cache = torch.zeros(2, 12, 2, 64, dim, dtype=torch.bfloat16, device="cuda")
        return ops.project(attention, pass_._replace(asking=asking), pass_.x, cache[0], cache[1]), cache

    queries, cache = found(None)
    for asking in (0, 1, 65, tokens - 1):
        own_queries, own_cache = found(asking)
        assert torch.equal(own_queries, queries[:asking]) and torch.equal(own_cache, cache)


@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_of_prompts_stop_as_on_the_models_own_modules(rows, monkeypatch):
    model = build("llama", max_position_embeddings=2048).cuda()
    ids = torch.randint(3, 128, (rows, 700), generator=torch.Generator().manual_seed(2)).cuda()
    config = TIDE.TIDEConfig(mode="fast", prefill_exits=True)
    with monkeypatch.context() as patched:
        patched.setenv("TIDE_BACKEND", "modules")
        with TIDE.TIDE(model, Stops(), config) as engine:
            expected = engine.generate(ids, **OPTIONS)
            assert engine.runner.name != "triton" and engine.last_stats.settled_tokens == rows * 233
    with TIDE.TIDE(model, Stops(), config) as engine:
        for _ in range(3):  # the first prompt runs twice, and kernels are compared
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
            assert engine.last_stats.settled_tokens == rows * 233
        assert engine.runner.name == "triton"


def test_calibration_times_the_work_of_the_device():
    """By the clock a step of a tiny model takes milliseconds, all of them Python's."""
    adapter = ModelAdapter(build("llama").cuda())
    seconds = timing.timed(adapter, lambda: adapter.head(timing._states(adapter, 1)))
    by_the_clock = min(timing._by_the_clock(adapter.device, lambda: adapter.head(timing._states(adapter, 1))) for _ in range(9))
    adapter.close()
    assert 0 < seconds < by_the_clock / 2
