"""Mode "fast": tokens leave unverified, and the skipped layers' K/V are caught up, propagated or zero."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from arrivals import finish
from decoding import decode
from families import LAYERS, build
from policies import ByState, Everyone, Where
from router_files import a_file
from TIDE import TIDE, TIDEConfig
from TIDE.adapters.probe import Store, layer_stores
from TIDE.engine.request.plan import make_plan
from TIDE.routing.policies import policy_for

NEW = 24
OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
EXIT = 2


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(0))


def forced(model, stage, fill: str):
    """The same text token by token, by hand: layer outputs and K/V as the strategy defines them."""
    ids = torch.tensor([stage.rows[0].tokens])
    cache = DynamicCache()
    model(ids[:, :7], past_key_values=cache, use_cache=True)
    for position in range(7, ids.shape[1] - 1):
        before = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        seen = {}
        hooks = [
            layer.register_forward_pre_hook(lambda m, a, i=i, seen=seen: seen.__setitem__(i, a[0]))
            for i, layer in enumerate(model.model.layers)
        ]
        model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
        for hook in hooks:
            hook.remove()
        if position % 2 == 0:
            for index in range(EXIT, LAYERS):
                keys, values = before[index]
                attention = model.model.layers[index].self_attn
                normed = model.model.layers[index].input_layernorm(seen[EXIT])
                heads = (1, 1, -1, attention.head_dim)
                key, value = (p(normed).view(heads).transpose(1, 2) for p in (attention.k_proj, attention.v_proj))
                cos, sin = model.model.rotary_emb(normed, torch.tensor([[position]]))
                half = key.shape[-1] // 2
                key = key * cos[:, None] + torch.cat([-key[..., half:], key[..., :half]], -1) * sin[:, None]
                if fill == "zero_pad":
                    key, value = torch.zeros_like(key), torch.zeros_like(value)
                cache.layers[index].keys = torch.cat([keys, key], 2)
                cache.layers[index].values = torch.cat([values, value], 2)
    return cache


@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
@torch.no_grad()
def test_filled_in_kv_are_what_the_strategy_says(llama, ids, strategy):
    even = Where(lambda depth, row, position: position % 2 == 0, EXIT)
    stage = decode(llama, even, ids, 8, mode="fast", kv_cache_strategy=strategy)
    expected = forced(llama, stage, strategy)
    for layer in range(LAYERS):
        keys, values = stage.segments.cache.kv(layer, 0)
        assert keys.shape[1] == 14
        torch.testing.assert_close(keys, expected.layers[layer].keys[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, expected.layers[layer].values[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
def test_every_family_fills_in_the_layers_it_skips(each_kind, ids, strategy):
    """After tokens that all left, the deeper layers have K/V of their own for each, and have run for none."""
    if Store.STATE in layer_stores(each_kind):
        pytest.skip("refused for layers with a running state: see test_bad_input")
    stage = decode(each_kind, Everyone(1), ids, 6, mode="fast", kv_cache_strategy=strategy)
    depth = each_kind.config.num_hidden_layers
    assert stage.rows[0].stats.exits_per_layer == {0: 5}
    assert stage.rows[0].stats.layers_run == depth * ids.shape[1] + 5
    assert stage.segments.cache.lengths(0) == [12, 12]
    for layer in range(1, depth):
        if stage.runner.adapter.stores[layer] is Store.KV:
            keys, values = stage.segments.cache.kv(layer, 0)
            filled = [bool(states[:, ids.shape[1] :].any()) for states in (keys, values)]
            assert filled == [strategy == "propagate"] * 2
            assert keys[:, : ids.shape[1]].any()


@pytest.mark.invariant(2)
def test_caught_up_layers_change_no_later_token(each_kind, ids):
    """With exits at odd positions only, the full-depth tokens are those of the model given the same text."""
    policy = Where(lambda depth, row, position: position % 2 == 1, 2)
    with TIDE(each_kind, policy, TIDEConfig(mode="fast")) as engine:
        text = engine.generate(ids, max_new_tokens=12, **OPTIONS)
        assert 0 < engine.last_stats.exit_rate < 1
    best = each_kind(text).logits[0].argmax(-1)
    for position in range(ids.shape[1] - 1, text.shape[1] - 1):
        if position % 2 == 0 or position == ids.shape[1] - 1:
            assert text[0, position + 1] == best[position]


@pytest.mark.parametrize("strategy", ["exact", "propagate", "zero_pad"])
def test_calling_the_engine_gives_the_logits_the_stage_chooses_from(llama, prompts, strategy):
    ids, mask = prompts
    policy = Where(lambda depth, row, position: (position + depth) % 3 == 0, 1, 3)
    with TIDE(llama, policy, TIDEConfig(mode="fast", kv_cache_strategy=strategy, max_pending=2)) as engine:
        text = engine.generate(ids[2:], max_new_tokens=10, **OPTIONS)
        exits = engine.last_stats.exits_per_layer
        logits = engine(text).logits
        assert logits.shape == (1, 22, 128)
        assert sum(exits.values()) > 0
        # the prompt ran all layers in generate; here only its first token does, so compare from a prompt of one
        text = engine.generate(ids[2:, :1], max_new_tokens=20, **OPTIONS)
        logits = engine(text[:, :-1]).logits
        assert logits[0].argmax(-1).tolist() == text[0, 1:].tolist()
        batch = engine(ids, attention_mask=mask).logits
        for row in range(3):
            own = ids[row][mask[row].bool()]
            torch.testing.assert_close(batch[row, -len(own) :], engine(own[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_logits_of_a_call_can_be_used_in_training(llama, ids):
    with TIDE(llama) as engine:
        logits = engine(ids).logits
    weight = torch.ones(128, requires_grad=True)
    (logits * weight).sum().backward()
    assert weight.grad is not None


def test_exits_of_shared_kv_layers_lose_nothing():
    """Layers that only read another's K/V can be skipped for good: later tokens find all they need."""
    model = build("gemma4-shared")
    ids = torch.randint(3, 128, (2, 6), generator=torch.Generator().manual_seed(0))
    policy = Where(lambda depth, row, position: position % 2 == 0, 4)
    texts = {}
    for strategy in ("exact", "propagate", "zero_pad"):
        with TIDE(model, policy, TIDEConfig(mode="fast", kv_cache_strategy=strategy)) as engine:
            texts[strategy] = engine.generate(ids, max_new_tokens=12, **OPTIONS).tolist()
    assert texts["exact"] == texts["propagate"] == texts["zero_pad"]


class Noting(Everyone):
    """Notes which tokens left: (row, number of the new token, from 1)."""

    def __init__(self, prompt: int, *checkpoints: int) -> None:
        super().__init__(*checkpoints)
        self.prompt, self.left = prompt, set()

    def predict(self, candidates, head):
        self.left |= {(row, at - self.prompt + 2) for row, at in zip(candidates.rows, candidates.positions, strict=True)}
        return super().predict(candidates, head)


@pytest.mark.parametrize("share", [0.0, 0.29, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("strategy", ["exact", "zero_pad"])
def test_exits_stay_within_their_share_at_every_place_and_use_it_up(llama, share, strategy):
    """No rounding in favour of exits: at no place are they more than the share, and a token ran all layers only if needed."""
    ids = torch.randint(3, 128, (2, 7), generator=torch.Generator().manual_seed(0))
    policy = Noting(7, 1, 3)
    config = TIDEConfig(mode="fast", kv_cache_strategy=strategy, max_pending=100, max_exit_share=share)
    with TIDE(llama, policy, config) as engine:
        engine.generate(ids, max_new_tokens=NEW, **OPTIONS)
        assert engine.last_stats.exited_tokens == len(policy.left)
    for row in range(2):
        exits = 0
        for place in range(2, NEW + 1):  # the first token comes with the prompt
            one_more_fits = exits + 1 <= share * place + 1e-9
            assert ((row, place) in policy.left) == one_more_fits
            exits += one_more_fits
            assert exits / place <= share + 1e-9
    assert len(policy.left) == {0.0: 0, 0.29: 2 * 6, 0.5: 2 * 12, 0.9: 2 * 21, 1.0: 2 * 23}[share]


def test_the_default_share_lets_no_text_be_exits_only(llama, ids):
    with TIDE(llama, Everyone(1), TIDEConfig(mode="fast", max_pending=100)) as engine:
        engine.generate(ids, max_new_tokens=40, **OPTIONS)
        assert engine.last_stats.exited_tokens == 36


def test_the_share_of_a_row_is_its_own(llama, prompts):
    ids, mask = prompts
    config = TIDEConfig(mode="fast", max_pending=100, max_exit_share=0.4)

    def run(ids, mask):
        with TIDE(llama, ByState(1, 3), config) as engine:
            text = engine.generate(ids, attention_mask=mask, max_new_tokens=NEW, **OPTIONS)
            return text[:, ids.shape[1] :].tolist(), engine.last_stats.exited_tokens

    together, exits = run(ids, mask)
    alone = [run(row[keep.bool()][None], None) for row, keep in zip(ids, mask, strict=True)]
    assert together == [text[0] for text, _ in alone]
    assert exits == sum(own for _, own in alone)
    assert max(own for _, own in alone) == 9  # 0.4 of 24: the bound was reached


def test_exact_mode_ignores_max_exit_share(llama, ids):
    runs = []
    for share in (0.0, 1.0):
        with TIDE(llama, Everyone(1), TIDEConfig(max_exit_share=share)) as engine:
            engine.generate(ids, max_new_tokens=12, **OPTIONS)
            runs.append(engine.last_stats.drafted)
    assert runs[0] == runs[1] > 0


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_a_checkpoint_before_the_first_layer_changes_nothing_for_rows_that_may_not_leave(llama, prompts, mode, monkeypatch):
    """Segments that stand alike run in one pass; the first one has no layers, and compiled layers start from ids there."""
    ids = prompts[0][2:]
    policy = Where(lambda depth, row, position: depth == 2 and position % 3 != 0, 0, 1, 2)
    found = []
    for backend in ("modules", "numba"):
        monkeypatch.setenv("TIDE_BACKEND", backend)
        with TIDE(llama, policy, TIDEConfig(mode=mode, max_pending=1, max_exit_share=1.0)) as engine:
            text = engine.generate(ids, max_new_tokens=24, **OPTIONS)
            stats = engine.last_stats
            found.append((text.tolist(), stats.exits_per_layer, stats.drafted_by_step, stats.layers_run))
    assert found[0] == found[1]
    assert found[0][1][1] > 0 or mode == "exact"


@pytest.mark.invariant(5)
@pytest.mark.parametrize("samples", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("compaction", [0.0, 0.5])
def test_what_leaves_does_not_depend_on_other_rows(llama, samples, compaction):
    """A memory head sees finished tokens, so they must not be finished because other rows had to be."""
    ids = torch.randint(3, 128, (4, 9), generator=torch.Generator().manual_seed(5))
    config = TIDEConfig(mode="fast", exit_threshold=0.5, max_pending=4, max_exit_share=0.8, compaction_threshold=compaction)
    options = dict(OPTIONS, max_new_tokens=20, do_sample=samples)
    file = a_file(llama, "memory", (0, 2), 0.5)
    with TIDE(llama, None, config) as engine:
        policy = policy_for(file, engine.adapter, engine.runner.head)
        engine._settings = engine._settings._replace(policy=policy, plan=make_plan(config, policy, engine.adapter))
        together = engine.generate(
            ids, attention_mask=torch.ones_like(ids), **options, **(dict(seed=[1, 2, 3, 4]) if samples else {})
        )
        assert 0.1 < engine.last_stats.exit_rate < 0.8
        for row in range(4):
            alone = engine.generate(ids[row : row + 1], **options, **(dict(seed=row + 1) if samples else {}))
            assert torch.equal(alone[0], together[row])


@pytest.mark.invariant(5)
@pytest.mark.parametrize("depth", [0, 2])
def test_scores_of_a_row_do_not_depend_on_other_rows_or_on_what_it_begins_with(depth):
    """Compiled exits have weights in 8 bits, for few tokens and for many. The longer prompts run in torch, unless a row begins
    with what one before it has left."""
    model = build("llama", num_hidden_layers=3)
    prompts = [torch.randint(3, 128, (1, 5 + 2 * i), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    with TIDE(model) as engine:
        policy = policy_for(a_file(model, "memory", (depth,), 0.0), engine.adapter, engine.runner.head)

    def decoded(together: list[torch.Tensor]):
        rows = [engine.add(ids, **OPTIONS, max_new_tokens=16) for ids in together]
        finish(engine, *rows)
        return rows

    with TIDE(model, policy, TIDEConfig(mode="fast", exit_threshold=0.0, max_exit_share=0.7)) as engine:
        alone = [decoded([ids])[0] for ids in prompts]
        for own, other in zip(alone, decoded(prompts), strict=True):
            assert own.tokens == other.tokens
            scores, others = ([draft.score or 0.0 for draft in row.decided] for row in (own, other))
            assert any(scores) and others == pytest.approx(scores, abs=2e-5)
