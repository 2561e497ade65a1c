"""Layers that are skipped do not run: counted on the real modules, not inferred."""

from __future__ import annotations

import pytest
import torch

from counting import Count
from families import LAYERS
from policies import Everyone, Knowing, Where
from TIDE import TIDE, TIDEConfig

pytestmark = pytest.mark.invariant(4)

PROMPT, NEW = 6, 11


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def options(new: int = NEW) -> dict:
    return dict(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.mark.parametrize("strategy", ["exact", "propagate", "zero_pad"])
@pytest.mark.parametrize("rows", [1, 3])
def test_stats_say_what_hooks_count_in_fast_mode(llama, strategy, rows):
    counted = Count(llama)
    ids = torch.randint(3, 128, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    policy = Where(lambda depth, row, position: (position + row) % 3 > 0, 1, 3)
    with TIDE(llama, policy, TIDEConfig(mode="fast", kv_cache_strategy=strategy)) as engine:
        engine.generate(ids, **options())
    assert engine.last_stats.layers_run == counted.pairs
    assert engine.last_stats.exits_per_layer[0] > 0


@pytest.mark.parametrize("rows", [1, 3])
def test_stats_say_what_hooks_count_in_exact_mode(llama, rows):
    ids = torch.randint(3, 128, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    texts = llama.generate(ids, **options()).tolist()
    counted = Count(llama)
    with TIDE(llama, Knowing(texts, (0, 1, 3), seed=0, leaves=0.7, right=0.7)) as engine:
        engine.generate(ids, **options())
    assert engine.last_stats.layers_run == counted.pairs


@pytest.mark.parametrize("depth", range(LAYERS))
def test_an_exit_at_a_depth_costs_that_many_layers(llama, ids, depth):
    """Until it is caught up: here never, since every later token leaves too."""
    counted = Count(llama)
    with TIDE(llama, Everyone(depth), TIDEConfig(mode="fast", max_pending=100, max_exit_share=1.0)) as engine:
        engine.generate(ids, **options())
    assert counted.pairs == LAYERS * PROMPT + depth * (NEW - 1)
    assert engine.last_stats.exits_per_layer == {depth - 1: NEW - 1}
    assert engine.last_stats.mean_depth == pytest.approx((LAYERS + depth * (NEW - 1)) / NEW)


@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
def test_filled_in_layers_are_not_run_then_or_later(llama, ids, strategy):
    counted = Count(llama)
    last_goes_deep = Where(lambda depth, row, position: position < PROMPT + NEW - 3, 2)
    with TIDE(llama, last_goes_deep, TIDEConfig(mode="fast", max_pending=100, kv_cache_strategy=strategy)) as engine:
        engine.generate(ids, **options())
    deep = engine.last_stats.remaining_tokens - 1  # the first one came with the prompt
    assert deep == 2
    assert counted.pairs == LAYERS * PROMPT + 2 * (NEW - 1) + (LAYERS - 2) * deep


def test_caught_up_tokens_run_the_rest_once(llama, ids):
    """Three of four tokens leave at depth 1; the fourth carries them."""
    counted = Count(llama)
    policy = Where(lambda depth, row, position: (position - PROMPT) % 4 != 3, 1)
    with TIDE(llama, policy, TIDEConfig(mode="fast")) as engine:
        engine.generate(ids, **options(13))
    assert counted.pairs == LAYERS * (PROMPT + 12)
    assert engine.last_stats.exits_per_layer == {0: 9}


def test_max_pending_bounds_how_long_catch_up_waits(llama, ids):
    with TIDE(llama, Everyone(1), TIDEConfig(mode="fast", max_pending=3)) as engine:
        engine.generate(ids, **options(13))
    assert engine.last_stats.exits_per_layer == {0: 9}
    assert engine.last_stats.remaining_tokens == 4


def test_min_layers_takes_shallow_checkpoints_away(llama, ids):
    with TIDE(llama, Everyone(0, 1, 3), TIDEConfig(mode="fast", min_layers=2)) as engine:
        engine.generate(ids, **options())
    assert set(engine.last_stats.exits_per_layer) == {2}


def test_the_threshold_decides_who_leaves(llama, ids):
    class Sure(Everyone):
        def score(self, candidates):
            return torch.full((len(candidates.rows),), 0.8)

    rates = {}
    for threshold in (0.7, 0.8, 0.9):
        with TIDE(llama, Sure(1), TIDEConfig(mode="fast", exit_threshold=threshold)) as engine:
            engine.generate(ids, **options())
            rates[threshold] = engine.last_stats.exit_rate
    assert rates[0.7] == rates[0.8] > 0
    assert rates[0.9] == 0


def test_compaction_decides_whether_rows_ride_along(llama, monkeypatch):
    """One row of four needs the deep layers: alone at a threshold of 0.25, with the others below it."""
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    ids = torch.randint(3, 128, (4, PROMPT), generator=torch.Generator().manual_seed(0))
    policy = Where(lambda depth, row, position: row != 0, 1)
    runs = {}
    for threshold in (0.25, 0.2):
        config = TIDEConfig(mode="fast", compaction_threshold=threshold, max_pending=100, max_exit_share=1.0)
        with TIDE(llama, policy, config) as engine:
            runs[threshold] = engine.generate(ids, **options()), engine.last_stats.layers_run
    assert torch.equal(runs[0.25][0], runs[0.2][0])
    prefill = 4 * PROMPT * LAYERS
    assert runs[0.25][1] == prefill + (NEW - 1) * (4 + (LAYERS - 1))
    assert runs[0.2][1] == prefill + (NEW - 1) * 4 * LAYERS
