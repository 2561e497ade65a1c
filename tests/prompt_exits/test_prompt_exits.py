"""Exits in the prompt: stopped tokens run no deeper layer, the others see K/V made of their predicted states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from counting import Count
from decoding import decode
from eagle_heads import a_head
from families import LAYERS, build
from policies import Everyone
from router_files import a_file, made
from runners import on_modules, on_references, why_on_the_host
from TIDE import TIDE, Conversation, TIDEConfig
from TIDE.engine.cache.prefill_buffers import STEP
from TIDE.engine.request.plan import settings
from TIDE.engine.slots import prefill
from TIDE.kernels.reference import layers as reference
from TIDE.prompt_exits.gathered import why_no_gathering, window_of
from TIDE.prompt_exits.maps import SIGNALS, FittedPromptExit, PromptExit, StateMap, features
from TIDE.routing.policies import policy_for
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router import Router

DEPTH, PROMPT, NEW = 2, 12, 6
OPTIONS = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
FAST = TIDEConfig(mode="fast", prefill_exits=True)


class Forced(PromptExit):
    """Tokens stop where a rule over positions says so; deeper states are `predicted` from the one at the checkpoint."""

    def __init__(self, rule: Callable[[int], bool], depth: int = DEPTH, slope: float = 0.1) -> None:
        self.rule, self.depth, self.slope = rule, depth, slope
        self.asked: list[int] = []

    def stops(self, states, positions):
        self.asked += positions.tolist()
        return torch.tensor([self.rule(position) for position in positions.tolist()], dtype=torch.bool, device=states.device)

    def predict(self, depth, states):
        return states * (1 + self.slope * (depth - self.depth))


class Stops(Everyone):
    """No exits but in the prompt."""

    def __init__(self, rule, *checkpoints: int, **options) -> None:
        super().__init__(*checkpoints)
        self.prompt_exit = Forced(rule, **options)

    def score(self, candidates):
        return torch.zeros(len(candidates.rows))


def odd(position: int) -> bool:
    return position % 2 == 1


def nobody(position: int) -> bool:
    return False


def everyone(position: int) -> bool:
    return True


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def by_hand(model, ids: torch.Tensor, policy: ExitPolicy) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits and K/V of a Llama: every layer for all tokens, with the K/V of stopped ones exchanged after the checkpoint."""
    exit_ = policy.prompt_exit
    n = ids.shape[1]
    stopped = torch.tensor([exit_.rule(position) and position < n - 1 for position in range(n)])
    x = model.model.embed_tokens(ids)
    positions = torch.arange(n)[None]
    cos, sin = model.model.rotary_emb(x, positions)
    found, left = [], None
    for index, layer in enumerate(model.model.layers):
        left = x.clone() if index == exit_.depth else left
        own = layer.self_attn
        states = x
        if left is not None:
            states = torch.where(stopped[None, :, None], exit_.predict(index, left), x)
        heads = (1, n, -1, own.head_dim)
        key, value = (p(layer.input_layernorm(states)).view(heads).transpose(1, 2) for p in (own.k_proj, own.v_proj))
        query = own.q_proj(layer.input_layernorm(x)).view(heads).transpose(1, 2)
        key, query = (y * cos[:, None] + halves_turned(y) * sin[:, None] for y in (key, query))
        found.append((key[0], value[0]))
        many = [y.repeat_interleave(query.shape[1] // y.shape[1], 1) for y in (key, value)]
        seen = torch.nn.functional.scaled_dot_product_attention(query, *many, is_causal=True, scale=own.scaling)
        x = x + own.o_proj(seen.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    x = torch.where(stopped[None, :, None], exit_.predict(len(model.model.layers), left), x)
    return model.lm_head(model.model.norm(x))[0], found


def halves_turned(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


@pytest.mark.parametrize("checkpoints", [(), (1,), (0, 3)], ids=str)
@pytest.mark.parametrize("rows", [1, 3])
def test_stats_say_what_hooks_count(llama, rows, checkpoints):
    counted = Count(llama)
    ids = torch.randint(3, 128, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    with TIDE(llama, Stops(odd, *checkpoints), FAST) as engine:
        counted.pairs = 0  # the engine has tried the model
        engine.generate(ids, **OPTIONS)
    stopped = len([position for position in range(PROMPT - 1) if odd(position)])
    assert engine.last_stats.settled_tokens == rows * stopped
    assert engine.last_stats.layers_run == counted.pairs
    assert counted.pairs == rows * (LAYERS * (PROMPT + NEW - 1) - stopped * (LAYERS - DEPTH))


@pytest.mark.parametrize("checkpoints", [(), (1,), (3,), (2,)], ids=str)
def test_kv_are_those_of_predicted_states(llama, ids, checkpoints):
    policy = Stops(odd, *checkpoints)
    stage = decode(llama, policy, ids, 1, mode="fast", prefill_exits=True)
    _, expected = by_hand(llama, ids, policy)
    for layer in range(LAYERS):
        for found, own in zip(stage.segments.cache.kv(layer, 0), expected[layer], strict=True):
            torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("checkpoints", [(), (1,), (3,), (2, 3)], ids=str)
def test_a_call_gives_the_logits_of_a_prefill(llama, checkpoints):
    """Settled tokens have those of their predicted states; the last token has run all layers."""
    ids = torch.randint(3, 128, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    policy = Stops(odd, *checkpoints)
    with TIDE(llama, policy, FAST) as engine:
        found = engine(ids).logits
        stats = engine.last_stats
    for row in range(2):
        torch.testing.assert_close(found[row], by_hand(llama, ids[row : row + 1], policy)[0], atol=1e-4, rtol=1e-4)
    assert stats.exits_per_layer == {DEPTH - 1: 10}
    assert stats.remaining_tokens == 14


@pytest.mark.parametrize("backend", ["modules", "numba"])
def test_with_none_stopping_it_is_a_full_prefill(any_backend_llama, ids, backend, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    ids = torch.randint(3, 128, (1, 40), generator=torch.Generator().manual_seed(3))
    with TIDE(any_backend_llama) as engine:
        expected = engine.generate(ids, **OPTIONS)
    with TIDE(any_backend_llama, Stops(nobody), FAST) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert engine.last_stats.settled_tokens == 0


@pytest.fixture
def any_backend_llama():
    return build("llama")


def test_with_none_stopping_kv_are_the_full_models(llama, ids):
    full = decode(llama, None, ids, 1, mode="fast")
    none = decode(llama, Stops(nobody), ids, 1, mode="fast", prefill_exits=True)
    for layer in range(LAYERS):
        for found, own in zip(none.segments.cache.kv(layer, 0), full.segments.cache.kv(layer, 0), strict=True):
            assert torch.equal(found, own)


def test_the_last_token_of_a_prompt_and_written_ones_are_never_asked(llama, ids):
    policy = Stops(everyone)
    with TIDE(llama, policy, FAST) as engine:
        engine.generate(ids, **OPTIONS)
        assert sorted(policy.prompt_exit.asked) == list(range(PROMPT - 1))
        assert engine.last_stats.settled_tokens == PROMPT - 1
        policy.prompt_exit.asked.clear()
        engine.generate(ids[:, :1], **OPTIONS)
        assert not policy.prompt_exit.asked


def test_rows_stop_alike_alone_and_together(llama):
    """Whenever they join, and left-padded."""
    ids = torch.randint(3, 128, (3, PROMPT), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    policy = Stops(odd)
    with TIDE(llama, policy, FAST) as engine:
        together = engine.generate(ids, attention_mask=mask, **OPTIONS)
        assert torch.equal(together[:1], engine.generate(ids[:1], **OPTIONS))
        assert torch.equal(together[1:2, 4:], engine.generate(ids[1:2, 4:], **OPTIONS))
        rows = [engine.add(ids[:1], **OPTIONS)]
        for _ in range(2):
            engine.step()
        rows.append(engine.add(ids[2:], **OPTIONS))
        while not all(row.finished for row in rows):
            engine.step()
    assert rows[0].tokens == together[0].tolist()
    assert rows[1].tokens == together[2].tolist()


def test_tokens_of_a_long_prompt_stop_alike_in_parts():
    """It joins while another row is decoded, so it runs a part at a time."""
    model = build("llama", max_position_embeddings=1024)
    ids = torch.randint(3, 128, (1, 700), generator=torch.Generator().manual_seed(5))
    with TIDE(model, Stops(odd, 1), FAST) as engine:
        expected = engine.generate(ids, **OPTIONS)[0].tolist()
        others = engine.add(ids[:, :5], **(OPTIONS | dict(max_new_tokens=20)))
        engine.step()
        row = engine.add(ids, **OPTIONS)
        while not (row.finished and others.finished):
            engine.step()
    assert row.tokens == expected and not others.error
    assert row.stats.settled_tokens == 349


def test_every_family_does_it_or_says_why_not(each_kind, ids, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    policy, ids = Stops(odd), ids[:, :8]
    with TIDE(each_kind) as engine:
        reason, window = why_no_gathering(engine.adapter), window_of(engine.adapter)
        expected = engine(ids).logits
    if reason is not None:
        with pytest.raises(ValueError, match="prefill_exits=True cannot be used with this model"):
            TIDE(each_kind, policy, FAST)
        return
    assert window is None or window >= 8
    with TIDE(each_kind, policy, FAST) as engine:
        engine.generate(ids, **OPTIONS)
        assert engine.last_stats.settled_tokens == 3
        policy.prompt_exit.rule = nobody
        torch.testing.assert_close(engine(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_prompts_longer_than_a_window_run_all_layers_and_say_so(ids, caplog):
    model = build("mistral")
    policy = Stops(odd)
    with TIDE(model) as engine:
        window = window_of(engine.adapter)
        assert window is not None and window < PROMPT
        expected = engine.generate(ids, **OPTIONS)
    with TIDE(model, policy, FAST) as engine:
        assert torch.equal(engine.generate(ids, **OPTIONS), expected)
        assert engine.last_stats.settled_tokens == 0
    assert f"see {window} tokens" in caplog.text


# ---- whole rounds, with references in place of kernels -----------------------------------------------------------------------


def opened(model, policy, **settings):
    """An engine that has had its first request, so that what follows runs in whole rounds."""
    engine = on_references(TIDE(model, policy, TIDEConfig(mode="fast", prefill_exits=True, **settings)))
    engine.generate(torch.full((1, 3), 7), **OPTIONS)
    return engine


@pytest.mark.parametrize("strategy", [None, "identity", "memory", "eagle3"])
def test_in_whole_rounds_tokens_stop_as_on_the_host(strategy, tmp_path):
    model = build("llama", max_position_embeddings=1024)
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(2))
    with TIDE(model, a_head(tmp_path, fc_norm=True) if strategy == "eagle3" else None) as engine:
        checkpoint = {"identity": (3,), "memory": (1,)}.get(strategy)
        policy = Stops(odd) if strategy is None else engine.policy
        policy = policy_for(a_file(model, strategy, checkpoint, 0.0), engine.adapter) if checkpoint else policy
    policy.prompt_exit = Forced(odd)
    with TIDE(model, policy, replace(FAST, exit_threshold=0.0)) as engine:
        expected = engine.generate(ids, **OPTIONS)
        on_host = engine.last_stats
        assert bool(on_host.exited_tokens) == bool(strategy)
    engine = opened(model, policy, exit_threshold=0.0)
    assert why_on_the_host(engine, ids, **OPTIONS) is None
    assert torch.equal(engine.generate(ids, **OPTIONS), expected)
    stats = engine.last_stats
    assert stats.settled_tokens == on_host.settled_tokens == 2 * 74
    engine.close()


@pytest.mark.parametrize("rule", [odd, nobody, everyone])
@pytest.mark.parametrize(("exit_", "depth"), [(2, 2), (1, 2), (3, 2)])
def test_a_head_sees_the_same_wherever_tokens_stop(exit_, depth, rule, monkeypatch):
    """At its exit, before it and after it; in some passes all tokens stop."""
    model = build("phi", max_position_embeddings=1024)
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(2))
    with TIDE(model) as engine:
        policy = policy_for(a_file(model, "memory", (exit_,), 0.0), engine.adapter)
    policy.prompt_exit = Forced(rule, depth)
    with TIDE(model, policy, replace(FAST, exit_threshold=0.0)) as engine:
        expected = engine.generate(ids, **OPTIONS)
    monkeypatch.setattr(prefill, "CHUNK", 48)
    engine = opened(model, policy, exit_threshold=0.0)
    assert torch.equal(engine.generate(ids, **OPTIONS), expected)
    assert engine.last_stats.exited_tokens
    engine.close()


@pytest.fixture
def nan_in_fresh_memory():
    """Tensors that nobody has written hold NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("strategy", [None, "memory"])
def test_rows_that_stop_together_write_what_they_write_alone(strategy, monkeypatch, nan_in_fresh_memory):
    """In passes with padding and with parts of several prompts."""
    model = build("llama", max_position_embeddings=1024)
    with TIDE(model) as engine:
        policy = Stops(odd) if strategy is None else policy_for(a_file(model, strategy, (1,), 0.0), engine.adapter)
    policy.prompt_exit = Forced(odd)
    texts = [torch.randint(3, 128, (1, n), generator=torch.Generator().manual_seed(n)) for n in (1, 70, 17, 130, 40)]
    engine = opened(model, policy, exit_threshold=0.0)
    expected = [engine.generate(text, **OPTIONS | {"max_new_tokens": 20})[0].tolist() for text in texts]
    engine.close()
    monkeypatch.setattr(prefill, "CHUNK", 48)
    monkeypatch.setattr(prefill, "PACE", 16)
    engine, rows = opened(model, policy, exit_threshold=0.0), []
    for text in texts:
        rows.append(engine.add(text, **OPTIONS | {"max_new_tokens": 20}))
        engine.step()
    while not all(row.finished for row in rows):
        engine.step()
    assert [row.tokens for row in rows] == expected
    engine.close()


@pytest.mark.parametrize("depths", [(), (3,), (3, 4, 5), (2, 3)])
def test_predictions_are_those_of_each_depth(depths):
    """One product stands for the first halves of all maps; at the checkpoint itself there is none."""
    generator = torch.Generator().manual_seed(1)

    def some(*size):
        return torch.randn(size, generator=generator)

    maps = {depth: StateMap(some(depth, 8), some(8, depth), some(8)) for depth in (3, 4, 5)}
    exit_, states = FittedPromptExit(2, Router(8, 4, SIGNALS), maps), some(6, 8)
    out, found = torch.empty_like(states), []
    for depth in exit_.predictions(depths, states, out):
        found.append(depth)
        torch.testing.assert_close(out, exit_.predict(depth, states))
    assert found == list(depths)


@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_scores_are_the_routers_of_the_features(size):
    """They are computed without the features, which a long prompt would write out."""
    torch.manual_seed(3)
    router, states = Router(64, 16, SIGNALS), size * torch.randn(9, 64)
    router.temperature.fill_(0.7)
    router.offset.fill_(-0.2)
    with torch.no_grad():
        expected = torch.sigmoid(router.raw(features(states)) / router.temperature + router.offset)
        torch.testing.assert_close(FittedPromptExit(2, router, {}).scores(states), expected, atol=1e-5, rtol=1e-5)


def test_tokens_of_a_prompt_that_runs_again_are_counted_once():
    """The first request begins on the host, and goes on in whole rounds, where its prompt runs again."""
    model = build("llama", max_position_embeddings=1024)
    ids = torch.randint(3, 128, (2, 150), generator=torch.Generator().manual_seed(2))
    engine = on_references(TIDE(model, Stops(odd), FAST))
    for _ in range(2):
        engine.generate(ids, **OPTIONS)
        assert [row.stats.settled_tokens for row in engine.last_rows] == [74, 74]
    assert why_on_the_host(engine, ids, **OPTIONS) is None
    engine.close()


def test_blocks_with_stopped_tokens_are_never_shared():
    model = build("llama", max_position_embeddings=1024)
    ids = torch.randint(3, 128, (1, 200), generator=torch.Generator().manual_seed(2))
    engine = opened(model, Stops(odd))
    for _ in range(2):
        engine.generate(ids, **OPTIONS)
        assert engine.last_stats.reused_tokens == 0
        assert engine.runner.pool.store(None).prefixes.idle == 0
    with engine.using(TIDEConfig(mode="fast")):  # others find nothing either, and what they leave is not found
        for found in (0, 192):
            engine.generate(ids, **OPTIONS)
            assert engine.last_stats.reused_tokens == found
    engine.generate(ids, **OPTIONS)
    assert engine.last_stats.reused_tokens == 0
    assert engine.last_stats.settled_tokens == 99
    engine.close()


def test_after_a_warm_up_those_that_stay_find_everything_ready(monkeypatch):
    """Attention is compiled for tokens in steps, and for the number of their groups."""
    model, found, attend = build("llama", max_position_embeddings=1024), set(), reference.attend

    def noting(attention, tokens, *given):
        if isinstance(tokens.groups, torch.Tensor):
            found.add((-(-len(tokens.x) // STEP), tuple(tokens.groups.shape)))
        return attend(attention, tokens, *given)

    monkeypatch.setattr(reference, "attend", noting)
    engine = opened(model, Stops(odd))
    found.clear()
    engine.warm_up(tokens=256, progress=False)
    ready = set(found)
    for length in (4, 31, 70, 130, 210):
        ids = torch.randint(3, 128, (1, length), generator=torch.Generator().manual_seed(length))
        engine.generate(ids, **OPTIONS | {"max_new_tokens": 1})
        assert engine.last_stats.settled_tokens == (length - 1) // 2
    assert ready and found == ready
    engine.close()


def test_modules_on_a_static_cache_leave_it_to_the_host(ids):
    model = build("gpt2")
    engine = on_modules(TIDE(model, Stops(odd), FAST))
    engine.generate(ids, **OPTIONS)
    assert "exits in the prompt gather tokens" in why_on_the_host(engine, ids, **OPTIONS)
    engine.generate(ids, **OPTIONS)
    assert engine.last_stats.settled_tokens == 5
    engine.close()


# ---- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "found"), [(None, "no exits"), (Everyone(1), "exits without them")])
def test_exits_without_maps_say_what_to_do(llama, policy, found):
    with pytest.raises(
        ValueError, match=rf"needs a router file with the maps.*found {found}.*tide calibrate MODEL --prefill-exits"
    ):
        TIDE(llama, policy, FAST)
    with TIDE(llama) as engine:  # the model is as it was
        engine.generate(torch.full((1, 3), 7), **OPTIONS)


def test_a_router_file_without_maps_says_what_to_do(llama, tmp_path):
    made("identity", llama).save(tmp_path / "router.pt")
    with pytest.raises(ValueError, match="found exits without them. Make one with TIDE.calibrate"):
        TIDE(llama, tmp_path / "router.pt", FAST)


def test_a_depth_that_the_model_does_not_have_is_named(llama):
    with pytest.raises(ValueError, match="from 1 to 3 in a model of 4 layers, found 4"):
        TIDE(llama, Stops(odd, depth=4), FAST)


def test_without_a_mode_it_is_fast_and_says_so(llama, caplog):
    with TIDE(llama, Stops(odd), TIDEConfig(prefill_exits=True)) as engine:
        assert not engine.plan.exact
    assert "prefill_exits=True goes with mode 'fast' only" in caplog.text


def test_a_certificate_does_not_hold_with_exits_in_the_prompt(llama):
    policy = Stops(odd, 1)
    with TIDE(llama, policy, FAST) as engine:
        with_them = settings(engine.config, policy, engine.adapter)
        without = settings(TIDEConfig(mode="fast"), policy, engine.adapter)
    assert without.differences(with_them) == ["prefill_exits True instead of False"]


def test_a_conversation_does_not_take_predicted_kv_over(llama):
    policy = Stops(odd)
    ids = torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    with TIDE(llama, policy, FAST) as engine:
        conversation = Conversation(engine)
        longer = torch.cat([ids, torch.tensor([list(conversation.stream(ids, **OPTIONS))])], dim=1)
        found = list(conversation.stream(longer, **OPTIONS))
        assert (engine.last_stats.reused_tokens, engine.last_stats.settled_tokens) == (0, (longer.shape[1] - 1) // 2)
        assert found == engine.generate(longer, **OPTIONS)[0, longer.shape[1] :].tolist()
