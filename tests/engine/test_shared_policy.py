"""One policy, or one router file, for several engines: each engine writes as it does with one of its own."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch

from families import build
from router_files import a_file, original_file
from TIDE import TIDE, TIDEConfig
from TIDE.routing.policies import policy_for
from TIDE.routing.router_file import RouterFile

FAST = TIDEConfig(mode="fast", exit_threshold=0.4, min_layers=0)
OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=16)
STRATEGIES = ["identity", "lens", "memory"]


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(0))


def with_another_head():
    model = build("llama")
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(7))
    return model


def file_for(model, strategy) -> RouterFile:
    file = a_file(model, strategy, (1, 2), 0.4)
    file.fingerprint = None  # of one model, and it is for two
    return file


def made_for(model, strategy):
    with TIDE(model) as engine:
        return policy_for(file_for(model, strategy), engine.adapter, engine.runner.head)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_engines_that_decode_in_turn_share_a_policy(strategy, llama, ids):
    models = [llama, with_another_head()]
    alone = []
    for model in models:
        with TIDE(model, made_for(model, strategy), FAST) as engine:
            alone.append(engine.generate(ids, **OPTIONS)[0, 9:].tolist())
            assert engine.last_stats.exited_tokens > 0
    assert alone[0] != alone[1]
    policy = made_for(llama, strategy)
    with TIDE(models[0], policy, FAST) as first, TIDE(models[1], policy, FAST) as second:
        pairs = list(zip_longest(first.stream(ids, **OPTIONS), second.stream(ids, **OPTIONS)))
    assert [list(text) for text in zip(*pairs, strict=True)] == alone


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_request_writes_nothing_on_a_policy(strategy, llama, ids):
    policy = made_for(llama, strategy)
    before = dict(vars(policy))
    with TIDE(llama, policy, FAST) as engine:
        engine.generate(ids, **OPTIONS)
    assert vars(policy).keys() == before.keys()
    assert all(value is before[name] for name, value in vars(policy).items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_file_serves_engines_of_several_models_and_dtypes(strategy, llama, ids):
    shared, models = file_for(llama, strategy), [llama, build("llama").bfloat16(), build("llama")]
    for model in models:
        texts = []
        for file in (file_for(llama, strategy), shared):
            with TIDE(model, file, FAST) as engine:
                assert engine.file is file
                texts.append(engine.generate(ids, **OPTIONS))
        assert torch.equal(*texts)


@pytest.mark.parametrize("kind", [*STRATEGIES, "original"])
def test_making_a_policy_leaves_the_file_as_it_was(kind, llama, tmp_path):
    file = RouterFile.load(original_file(tmp_path / "router.pt")) if kind == "original" else file_for(llama, kind)
    tensors = {id(part): part.dtype for at in file.exits.values() for part in (*at.head.parameters(), *at.router.parameters())}
    with TIDE(llama.bfloat16()) as engine:
        policy = policy_for(file, engine.adapter)
    after = {id(part): part.dtype for at in file.exits.values() for part in (*at.head.parameters(), *at.router.parameters())}
    assert after == tensors
    routers = policy.routers if kind == "original" else {depth: at.router for depth, at in policy.exits.items()}
    assert all(router is not file.exits[depth].router for depth, router in routers.items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_policy_of_another_dtype_is_refused_by_name(strategy, llama):
    policy = made_for(llama, strategy)
    complaint = r"exits were made for a model in float32 on cpu; this one is in bfloat16 on cpu\. .*router file"
    with pytest.raises(ValueError, match=complaint):
        TIDE(llama.bfloat16(), policy)
    TIDE(llama).close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("backend", ["numba", "modules"])
def test_routers_may_be_stored_in_any_dtype(dtype, backend, llama, ids, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    texts = []
    for last in (dtype, torch.float32):
        file = file_for(llama, "lens")
        for at in file.exits.values():
            at.router.to(dtype).to(last)
        with TIDE(llama) as engine:
            policy = policy_for(file, engine.adapter, engine.runner.head)
        with TIDE(llama, policy, FAST) as engine:
            texts.append(engine.generate(ids, **OPTIONS))
    assert torch.equal(*texts)
