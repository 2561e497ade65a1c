"""The first answer on a GPU: what it launches was compiled before, many kernels at a time, not one by one."""

from __future__ import annotations

import gc

import pytest
import torch

import TIDE
from families import build
from router_files import a_file
from TIDE.engine import batch
from TIDE.routing.policies import policy_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("strategy", ["memory", "lens", None])
def test_kernels_of_a_first_answer_were_compiled_together(strategy, options, monkeypatch):
    triton = pytest.importorskip("triton")
    for function in [found for found in gc.get_objects() if isinstance(found, triton.runtime.jit.JITFunction)]:
        function.device_caches.clear()
    missing = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **found: missing.append(found["repr"]) and False)
    own, together = batch.compile_first, []

    def compile_first(*given):
        own(*given)
        together.extend(missing)
        missing.clear()

    monkeypatch.setattr(batch, "compile_first", compile_first)
    model = build("llama").to("cuda", torch.bfloat16)
    with TIDE.TIDE(model) as engine:
        policy = strategy and policy_for(a_file(model, strategy, (1,), 0.0), engine.adapter)
    with TIDE.TIDE(model, policy) as engine:
        ids = torch.arange(3, 20, device="cuda")[None]
        engine.generate(ids, max_new_tokens=40, eos_token_id=None, **{"do_sample": False, **options})
        assert "Triton" in engine.backend
    assert together
    assert missing == []
