"""Shared K/V and long prompts on a GPU: the same bits, however a text came there. Skipped without one."""

from __future__ import annotations

import pytest
import torch
from test_batch_on_gpu import DTYPES, scores  # noqa: F401 (a fixture)
from test_on_gpu import with_exit

import TIDE
from families import VOCAB, build
from TIDE.engine.cache.kv_blocks import BLOCK
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.engine.slots import prefill

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

# Long passes of it have products in parts (`hopper/products.py`), where there are such.
WIDE = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
OPTIONS = dict(max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)


def prompt(tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(tokens)).cuda()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("strategy", "sizes"), [(None, {}), ("memory", {}), (None, WIDE)], ids=str)
def test_bits_are_the_same_cold_and_warm_and_however_a_prompt_is_cut(dtype, strategy, sizes, scores, monkeypatch):  # noqa: F811
    model = build("llama", max_position_embeddings=2048, **sizes).to("cuda", dtype)
    ids = prompt(1000)
    with TIDE.TIDE(model, None if strategy is None else with_exit(model, 0, strategy)) as engine:
        engine.generate(prompt(9), **OPTIONS)
        found = []
        for chunk, salt in ((2048, "a"), (2048, "a"), (100, new_salt()), (300, new_salt()), (64, new_salt())):
            monkeypatch.setattr(prefill, "CHUNK", chunk)
            scores.clear()
            text = engine.generate(ids, cache_salt=salt, **OPTIONS)
            found.append((text.tolist(), dict(scores[tuple(ids[0].tolist()), None])))
            assert engine.last_stats.reused_tokens == (999 // BLOCK * BLOCK if len(found) == 2 else 0)
        for text, bits in found[1:]:
            assert text == found[0][0]
            assert all(found[0][1].get(position, score) == score for position, score in bits.items())


def test_nothing_is_captured_after_a_warm_up():
    model = build("llama").cuda()
    with TIDE.TIDE(model, with_exit(model, 0, "memory")) as engine:
        engine.warm_up(rows=4, progress=False)
        before = engine.capture_seconds
        assert before > 0
        for tokens in range(5, 250, 12):
            ids = prompt(tokens)
            assert engine.generate(ids, **OPTIONS).shape[1] == tokens + 40
        assert engine.capture_seconds == before and engine.last_stats.reused_tokens == 0


def test_kernels_that_are_compiled_ahead_do_not_run():
    from TIDE.kernels.triton import products as triton_products
    from TIDE.kernels.triton.compile_ahead import compiled_ahead
    from TIDE.kernels.weights import Dense

    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).cuda() for shape in ((3, 48), (80, 48)))
    with compiled_ahead(shows=False):
        assert torch.isfinite(triton_products.linear(x, Dense(torch.zeros_like(weight)))).shape == (3, 80)
        base = torch.full((3, 80), 5.0, device="cuda")
        triton_products._launch_linear(x, Dense(weight), triton_products.EMPTY, base)
    assert (base == 5).all()
    triton_products._launch_linear(x, Dense(weight), triton_products.EMPTY, base)
    torch.testing.assert_close(base, x @ weight.T, rtol=1e-3, atol=1e-3)
