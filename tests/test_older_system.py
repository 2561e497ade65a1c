"""What the older system of this name said and did not do. Each test here fails on it."""

from __future__ import annotations

import pytest
import torch

import TIDE
from families import LAYERS
from policies import Everyone, Where

OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 6), generator=torch.Generator().manual_seed(0))


def test_a_token_that_exits_does_not_run_the_deeper_layers(llama, ids):
    """It reported exits and ran every layer of every token."""
    runs = [0] * LAYERS
    for index, layer in enumerate(llama.model.layers):
        layer.mlp.register_forward_hook(lambda *_, index=index: runs.__setitem__(index, runs[index] + 1))
    with TIDE.TIDE(llama, Everyone(2), TIDE.TIDEConfig(mode="fast", max_pending=100)) as engine:
        engine.generate(ids, max_new_tokens=10, **OPTIONS)
    assert runs == [10, 10, 1, 1]


def test_a_policy_sees_the_states_the_layers_put_out(llama, ids):
    """Its routers were trained on raw states and scored on normed ones."""
    seen = {}

    def note(depth, row, position):
        return False

    class Notes(Where):
        def score(self, candidates):
            for state, position in zip(candidates.states, candidates.positions, strict=True):
                seen[candidates.depth, position] = state.clone()
            return super().score(candidates)

    with TIDE.TIDE(llama, Notes(note, 0, 1, 3)) as engine:
        text = engine.generate(ids, max_new_tokens=8, **OPTIONS)
    states = llama(text, output_hidden_states=True).hidden_states
    assert len(seen) == 3 * 7
    for (depth, position), state in seen.items():
        torch.testing.assert_close(state, states[depth][0, position], atol=1e-4, rtol=1e-4)


def test_the_full_depth_is_no_checkpoint(llama):
    """Its last checkpoint was the last layer, compared with itself."""
    with pytest.raises(ValueError, match="rising depths from 0 to 3"):
        TIDE.TIDE(llama, Everyone(LAYERS))


def test_exits_off_is_the_model_and_not_a_second_norm(llama, ids):
    """It applied the final norm twice: another top-1 on every second token."""
    with TIDE.TIDE(llama) as engine:
        logits = engine(ids).logits
    torch.testing.assert_close(logits, llama(ids).logits, atol=1e-4, rtol=1e-4)


def test_an_exit_applies_the_final_norm_once(llama, ids):
    with TIDE.TIDE(llama, Everyone(3), TIDE.TIDEConfig(mode="fast", max_pending=100)) as engine:
        logits = engine(ids).logits
    state = llama(ids, output_hidden_states=True).hidden_states[3]
    expected = llama.lm_head(llama.model.norm(state))
    torch.testing.assert_close(logits[:, 1:], expected[:, 1:], atol=1e-4, rtol=1e-4)


def test_generation_stops_at_the_models_own_end_token(llama, ids):
    """It stopped at token 2, whatever the model."""
    free = llama.generate(ids, max_new_tokens=12, **OPTIONS)
    end = int(free[0, ids.shape[1] + 4])
    expected = llama.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0)
    assert expected.shape[1] < free.shape[1]
    with TIDE.TIDE(llama, Everyone(1)) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=0), expected)
        past_two = engine.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=127, pad_token_id=0)
    assert past_two.shape[1] == ids.shape[1] + 12


def test_the_attention_mask_is_not_dropped(llama, prompts):
    ids, mask = prompts
    with TIDE.TIDE(llama) as engine:
        with_mask = engine.generate(ids, attention_mask=mask, max_new_tokens=10, **OPTIONS)
        without = engine.generate(ids, attention_mask=torch.ones_like(mask), max_new_tokens=10, **OPTIONS)
    assert torch.equal(with_mask, llama.generate(ids, attention_mask=mask, max_new_tokens=10, **OPTIONS))
    assert not torch.equal(with_mask, without)


def test_a_row_exits_without_waiting_for_the_others(llama, prompts):
    """It let a batch exit only if every row did."""
    ids, mask = prompts
    policy = Where(lambda depth, row, position: row == 1, 1)
    with TIDE.TIDE(llama, policy, TIDE.TIDEConfig(mode="fast", compaction_threshold=1.0, max_pending=100)) as engine:
        engine.generate(ids, attention_mask=mask, max_new_tokens=10, **OPTIONS)
    assert engine.last_stats.exits_per_layer == {0: 9}
    assert engine.last_stats.remaining_tokens == 21


def test_the_kv_cache_strategy_is_read(llama, ids):
    texts = set()
    for strategy in ("exact", "propagate", "zero_pad"):
        policy = Where(lambda depth, row, position: position % 4 != 0, 1)
        with TIDE.TIDE(llama, policy, TIDE.TIDEConfig(mode="fast", kv_cache_strategy=strategy)) as engine:
            texts.add(tuple(engine.generate(ids, max_new_tokens=40, **OPTIONS)[0].tolist()))
    assert len(texts) == 3


def test_the_compaction_threshold_is_read(llama, prompts, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "modules")  # compiled layers copy no rows, so there is nothing to decide
    ids, mask = prompts
    work = []
    for threshold in (0.0, 1.0):
        policy = Where(lambda depth, row, position: row == 1, 1)
        with TIDE.TIDE(llama, policy, TIDE.TIDEConfig(mode="fast", compaction_threshold=threshold, max_pending=100)) as engine:
            engine.generate(ids, attention_mask=mask, max_new_tokens=10, **OPTIONS)
            work.append(engine.last_stats.layers_run)
    assert work[0] > work[1]
