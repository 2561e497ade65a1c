"""The best token by a screened LM head is that of the full product, whatever 8 bits make of its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from families import build
from policies import Everyone
from TIDE import TIDE

pytest.importorskip("numba")
from TIDE.kernels.cpu import screen as cpu_screen
from TIDE.kernels.weights import Dense

pytestmark = pytest.mark.invariant(7)


def weights(kind: str, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    found = random.standard_normal((rows, columns)).astype(np.float32)
    if kind == "outliers":  # 8 bits keep little of a row
        found[random.integers(0, rows, rows // 3), random.integers(0, columns, rows // 3)] *= 300
    elif kind == "almost the same":
        found = found[:1] + 1e-3 * found
    elif kind == "zeros":
        found[::2] = 0
    elif kind == "the same":
        found[rows // 2 :] = found[: rows - rows // 2]
    return np.ascontiguousarray(found)


@pytest.mark.parametrize("kind", ["plain", "outliers", "almost the same", "zeros", "the same"])
@pytest.mark.parametrize(("rows", "columns"), [(3000, 64), (1037, 100), (17, 40)])
def test_the_best_token_is_that_of_the_full_product(kind, rows, columns):
    random = np.random.default_rng(rows)
    weight = weights(kind, rows, columns, random)
    screen = cpu_screen.screen_of(Dense(weight))
    for count in (1, 2, 5, 16):
        h = random.standard_normal((count, columns)).astype(np.float32) * np.float32(3)
        full, found = h.astype(np.float64) @ weight.T.astype(np.float64), cpu_screen.best_logits(h, Dense(weight), screen)
        for own, exact in zip(found, full, strict=True):
            best = int(own.argmax())
            assert exact[best] >= exact.max() - 1e-5 * np.abs(exact).max()
            assert own[best] == pytest.approx(exact[best], rel=1e-4, abs=1e-4)
            if np.sort(exact)[-2] < exact.max() - 1e-4 * np.abs(exact).max():
                assert best == int(exact.argmax())


def test_few_rows_are_multiplied_twice():
    random = np.random.default_rng(0)
    weight = weights("plain", 20000, 128, random)
    h = random.standard_normal((1, 128)).astype(np.float32)
    found = cpu_screen.best_logits(h, Dense(weight), cpu_screen.screen_of(Dense(weight)))
    exact = np.isclose(found[0], h[0] @ weight.T, rtol=1e-6, atol=1e-6).sum()
    assert 1 <= exact < 2000


def test_nan_stays_nan():
    weight = weights("plain", 50, 64, np.random.default_rng(0))
    h = np.full((2, 64), np.nan, np.float32)
    h[1] = 1
    found = cpu_screen.best_logits(h, Dense(weight), cpu_screen.screen_of(Dense(weight)))
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


@pytest.fixture(scope="module")
def large_head():
    """Nine tenths of it are the LM head."""
    return build("llama", vocab_size=4000)


@pytest.mark.parametrize("policy", [None, Everyone(2)], ids=["exits off", "exact"])
def test_texts_are_the_models_where_the_head_is_screened(large_head, policy, monkeypatch):
    called = []
    best_logits = cpu_screen.best_logits
    monkeypatch.setattr(cpu_screen, "best_logits", lambda *args: (called.append(len(args[0])), best_logits(*args))[1])
    ids = torch.randint(3, 4000, (2, 7), generator=torch.Generator().manual_seed(2))
    options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=20, eos_token_id=None, pad_token_id=0)
    with TIDE(large_head, policy) as engine:
        assert torch.equal(
            engine.generate(ids, do_sample=False, **options), large_head.generate(ids, do_sample=False, **options)
        )
        assert called
        called.clear()
        engine.generate(ids, do_sample=True, seed=1, **options)
        asked = dict(return_dict_in_generate=True, output_logits=True, do_sample=False)
        found = engine.generate(ids, **options, **asked).logits
        expected = large_head.generate(ids, **options, **asked).logits
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(engine(ids).logits, large_head(ids).logits, rtol=1e-4, atol=1e-4)
        assert not called  # sampling and answers with logits need all of them


def test_weights_that_change_are_screened_anew(large_head):
    ids = torch.tensor([[5, 6, 7]])
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    with TIDE(large_head) as engine:
        engine.generate(ids, **options)
        held = large_head.lm_head.weight.data.clone()
        large_head.lm_head.weight.data.copy_(held.flip(0))
        try:
            assert torch.equal(engine.generate(ids, **options), large_head.generate(ids, **options))
        finally:
            large_head.lm_head.weight.data.copy_(held)
