"""Triton kernels give what the references give. Here they run in Triton's interpreter, which proves arithmetic, not speed."""

from __future__ import annotations

import pytest
import torch

from layers import COLUMNS, DIM, FEATURES, HIDDEN, KV_HEADS, ROWS, a_layer, a_pass, in_dtype, some_of
from levels import daily
from TIDE.kernels.reference import layers as reference

pytest.importorskip("triton")
from TIDE.engine.cache.slots import score_params
from TIDE.kernels.result import ACCEPTED, FIELDS, IS_NAN, NOTHING_LEFT
from TIDE.kernels.triton import attention as triton_attention
from TIDE.kernels.triton import exits as triton_exits
from TIDE.kernels.triton import ops as triton_ops
from TIDE.kernels.weights import Dense
from TIDE.routing.heads import EPS
from TIDE.routing.router import Router, signals_of

pytestmark = pytest.mark.invariant(7)

CLOSE = {torch.float32: 1e-5, torch.float16: 4e-3}  # of the largest; the interpreter has no bf16 products, GPUs have


def assert_close(found, expected):
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=CLOSE[found.dtype] * float(expected.abs().max()))


def assert_same_layer(layer, tokens, generator, dtype):
    cache = torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator)
    own, ours = cache.to(dtype), in_dtype(tokens, dtype)
    own = own.clone()
    triton_ops.decoder_layer(in_dtype(layer, dtype), ours, own[0], own[1])
    reference.decoder_layer(layer, tokens, cache[0], cache[1])
    assert_close(ours.x, tokens.x)
    assert_close(own, cache)


@pytest.mark.parametrize("counts", [{1: 1}, {1: 5}, {2: 5, 0: 5, 1: 5}, {2: 1, 0: 8, 1: 2}], ids=str)
def test_half_precision_any_rows_and_tokens(counts):
    generator = torch.Generator().manual_seed(5)
    tokens = a_pass(generator, counts, {0: 21, 1: 3, 2: 17})
    assert_same_layer(a_layer(generator), tokens, generator, torch.float16)


OF_KV = {"bias", "head_norms", "offset", "rotary", "eps", "layer_norm", "in_norms", "parallel"}  # all that keys and values see


@pytest.mark.parametrize("features", [own for own in FEATURES if not own or OF_KV & own.keys()], ids=str)
@pytest.mark.parametrize("asking", daily([0, 3, 6], [3]))
def test_tokens_behind_those_that_ask_leave_kv_and_nothing_else(features, asking):
    generator = torch.Generator().manual_seed(12)
    layer, tokens = a_layer(generator, **features), a_pass(generator, {2: 4, 0: 3}, {2: 9, 0: 14})
    tokens = some_of(tokens, torch.tensor([1, 3, 6, 5, 0, 2, 4]))  # those that ask see others behind them
    cache, before = torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator), tokens.x.clone()
    all_ask, own = in_dtype(tokens, torch.float32), cache.clone()
    own_x = all_ask.x.clone()
    reference.decoder_layer(layer, all_ask._replace(x=own_x), own[0], own[1])
    for ops in (reference, triton_ops):
        some, kept = in_dtype(tokens, torch.float32)._replace(asking=asking), cache.clone()
        some = some._replace(x=before.clone())
        ops.decoder_layer(layer, some, kept[0], kept[1])
        assert_close(kept, own)
        if asking:
            assert_close(some.x[:asking], own_x[:asking])
        assert torch.equal(some.x[asking:], before[asking:])


def test_stretches_of_keys_are_joined(monkeypatch):
    monkeypatch.setattr(triton_attention, "CHUNK", 16)
    for features in (dict(), dict(window=5)):
        generator = torch.Generator().manual_seed(6)
        tokens = a_pass(generator, {2: 3, 0: 4}, 21, origins={2: 2, 0: 17})
        assert_same_layer(a_layer(generator, **features), tokens, generator, torch.float32)


MIXED = {2: 3, 0: 1, 1: 4}


@pytest.mark.parametrize(
    ("counts", "features"),
    [
        *((counts, dict()) for counts in ({1: 2}, {1: 5}, {0: 1, 1: 8}, MIXED)),
        *((MIXED, features) for features in (dict(head_norms=True), dict(head_norms="all"), dict(window=3))),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_alone_and_among_others(counts, features):
    generator = torch.Generator().manual_seed(7)
    layer = in_dtype(a_layer(generator, **features), torch.float16)
    tokens = in_dtype(a_pass(generator, counts, {0: 25, 1: 9, 2: 2}), torch.float16)
    cache = torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator).half()
    alone, states = cache.clone(), []
    for index in range(len(tokens.x)):
        one = some_of(tokens, slice(index, index + 1))
        triton_ops.decoder_layer(layer, one, alone[0], alone[1], most=int(tokens.positions[index]) + 1)
        states.append(one.x)
    triton_ops.decoder_layer(layer, tokens, cache[0], cache[1])
    assert torch.equal(torch.cat(states), tokens.x)
    assert torch.equal(alone, cache)


def test_the_best_token_is_the_first_of_the_highest():
    x, weight = torch.randn(3, HIDDEN), torch.randn(201, HIDDEN)
    weight[[7, 180]] = 5 * x[1] / x[1].norm()
    best, token = torch.zeros(3), torch.zeros(3, dtype=torch.long)
    triton_exits.best_tokens(x, Dense(weight), best, token)
    logits = x @ weight.T
    assert token.tolist() == logits.argmax(-1).tolist() and token[1] == 7
    assert_close(best, logits.amax(-1))
    vocabulary = torch.arange(1, 201, 3)
    for ops in (triton_exits, reference):
        seen = torch.zeros(3, 4)
        ops.best_tokens(x, Dense(weight), best, token, seen, vocabulary)
        assert token.tolist() == vocabulary[logits[:, vocabulary].argmax(-1)].tolist()
        assert_close(best, logits[:, vocabulary].amax(-1))
        assert_close(seen, signals_of(logits[:, vocabulary]))
        others = torch.zeros_like(token), torch.zeros_like(best), torch.zeros(3, 4), torch.zeros(2, 3, len(vocabulary))
        few = Dense(weight[vocabulary])
        ops.best_tokens(x, few, others[1], others[0], others[2], vocabulary, others[3][0])
        ops.write_logits(x, few, vocabulary, others[3][1])
        assert torch.equal(others[0], token), "an LM head may have rows for the vocabulary alone"
        for ours, theirs in zip(others[1:], (best, seen, logits[:, vocabulary].expand(2, -1, -1)), strict=True):
            assert_close(ours, theirs)
    weight[20, 0] = float("nan")
    triton_exits.best_tokens(x, Dense(weight), best, token)
    assert best.isinf().all()


def test_states_for_a_memory_head():
    generator = torch.Generator().manual_seed(9)
    table, center = torch.randn(9, HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)
    spread, rows = 0.5 + torch.rand(HIDDEN, generator=generator), torch.tensor([4, 7])
    found, expected = torch.zeros(2, 2, 3 * HIDDEN)
    for ops, out in ((triton_exits, found), (reference, expected)):
        ops.normalize_into(table, rows, out[:, HIDDEN : 2 * HIDDEN], 1e-6, center, spread)
        ops.normalize_into(table[:2], None, out[:, 2 * HIDDEN :], 1e-6)
    assert_close(found, expected)
    rings = torch.zeros(2, 4, HIDDEN)
    for ops, out in ((triton_exits, rings[0]), (reference, rings[1])):
        ops.normalize_into(table, rows, out, 1e-6, center, spread, torch.tensor([3, 0]))
    assert_close(*rings)
    assert_close(rings[1][[3, 0]], expected[:, HIDDEN : 2 * HIDDEN])
    tables = table.clone(), table.clone()
    for ops, own in zip((triton_exits, reference), tables, strict=True):
        ops.linear_into(table[5:8], Dense(spread[:, None] * table[:1]), own, torch.tensor([1, 8, 4]))
    assert_close(*tables)
    guesses = torch.zeros(2, 1, HIDDEN)
    for ops, own, out in zip((triton_exits, reference), tables, guesses, strict=True):
        ops.denormalize(table[:1], center, spread, torch.tensor([3]), own, out)
    assert_close(*guesses)
    assert_close(*tables)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_states_for_an_eagle3_head(dtype):
    generator = torch.Generator().manual_seed(10)
    table, gain = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((9, HIDDEN), (HIDDEN,)))
    rows, places = torch.tensor([4, 7]), torch.tensor([3, 0])
    rings = torch.zeros(2, 4, 2 * HIDDEN, dtype=dtype)
    for ops, out in ((triton_exits, rings[0]), (reference, rings[1])):
        ops.normalize_into(table, rows, out[:, :HIDDEN], 1e-5, places=places, gain=gain)
        ops.normalize_into(table[:4], None, out[:, HIDDEN:], 1e-5, gain=gain)
    assert_close(rings[0], rings[1].float())
    normed = torch.nn.functional.rms_norm(table[rows].float(), (HIDDEN,), eps=1e-5).to(dtype) * gain
    assert torch.equal(rings[1][places, :HIDDEN], normed), "rounded before its gain is applied"


def test_queries_and_kv_of_inputs_that_are_wider_than_states():
    generator = torch.Generator().manual_seed(11)
    layer, tokens = a_layer(generator), a_pass(generator, {1: 3}, 9)
    twice = {name: Dense(getattr(layer.attention, name).values.repeat(1, 2)) for name in ("q", "k", "v")}
    h, cache = (
        torch.randn(3, 2 * HIDDEN, generator=generator),
        torch.randn(2, ROWS, KV_HEADS, COLUMNS, DIM, generator=generator),
    )
    caches = cache.clone(), cache.clone()
    queries = [
        ops.project(layer.attention._replace(**twice), tokens, h, *own)
        for ops, own in zip((triton_ops, reference), caches, strict=True)
    ]
    assert_close(*queries)
    assert_close(*caches)
    apart = reference.project(layer.attention, tokens, h[:, :HIDDEN] + h[:, HIDDEN:], *cache)
    assert_close(queries[1], apart)
    assert_close(caches[1], cache)


@pytest.mark.parametrize("size", [1000, 64])
def test_places_in_blocks_and_rings(size):
    tables = torch.zeros(3, 1, dtype=torch.int32) if size == 1000 else torch.tensor([[4, 2, 0], [1, 3, 5], [0, 0, 0]]).int()
    rows, starts = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([60, 120], dtype=torch.int32)
    found, rings = torch.zeros(2, 17, 2, dtype=torch.long), torch.zeros(2, 16, 2, dtype=torch.long)
    for ops, places, ring in zip((triton_exits, reference), found, rings, strict=True):
        ops.find_places(tables, rows, starts, size, places, ring)
    assert torch.equal(*found) and torch.equal(*rings)
    assert found[0, :, 0].tolist() == list(range(60, 77)) if size == 1000 else [*range(124, 128), *range(192, 205)]
    assert rings[0, :, 0].tolist() == [16 + position % 16 for position in range(60, 76)]


@pytest.mark.parametrize(("drafts", "wrong"), [(0, 0), (4, 0), (4, 2), (4, 4), (15, 9)])
@pytest.mark.parametrize("verifies", [True, False])
def test_drafts_stand_up_to_the_first_that_is_wrong_or_unsure(drafts, wrong, verifies):
    def after(ops, worst, unsure=16, limit=15):
        """Two rows, all of whose drafts are right in the other; a third one stands still."""
        tokens, found = torch.arange(10, 27)[:, None].repeat(1, 3), torch.zeros(16, 3, dtype=torch.long)
        found[: drafts + 1] = tokens[1 : drafts + 2]
        found[wrong, 0] = 99
        best, starts = torch.full((16, 3), worst), torch.arange(5, 21, dtype=torch.int32)[:, None].repeat(1, 3)
        scores, result = torch.full((17, 3), 0.8), torch.zeros(3, FIELDS)
        scores[unsure, 0] = 0.3
        active, limits = torch.tensor([1, 1, 0], dtype=torch.int32), torch.tensor([15, limit, 15], dtype=torch.int32)
        ops.accept(found, best, tokens, starts, scores[:16], active, result, limits, drafts, 0.5, verifies)
        assert result[1, ACCEPTED] == {1.0: min(drafts, limit), float("inf"): IS_NAN, float("-inf"): NOTHING_LEFT}[worst]
        assert tokens[0, 2] == 10 and starts[0, 2] == 5
        return [*result.flatten().tolist(), *tokens.flatten().tolist(), *starts.flatten().tolist()]

    for case in ((1.0,), (float("inf"),), (float("-inf"),), (1.0, 0), (1.0, 3), (1.0, 16, 0), (1.0, 16, 3)):
        assert after(triton_exits, *case) == after(reference, *case)
    assert after(reference, 1.0)[0] == (wrong if verifies else drafts)
    assert after(reference, 1.0, 1)[0] == min(1, wrong if verifies else drafts)


@pytest.mark.parametrize("signals", [0, 4])
def test_routers_and_their_signals(signals):
    generator = torch.Generator().manual_seed(10)
    router, guess = Router(HIDDEN, 13, signals), torch.randn(1, HIDDEN, generator=generator)
    router.temperature.fill_(1.7)
    router.offset.fill_(0.2)
    weight, best, token = torch.randn(201, HIDDEN, generator=generator), torch.zeros(1), torch.zeros(1, dtype=torch.long)
    seen, score = torch.zeros(1, 4), torch.zeros(1)
    triton_exits.best_tokens(guess, Dense(weight), best, token, seen)
    logits = guess @ weight.T
    torch.testing.assert_close(seen, signals_of(logits), rtol=1e-4, atol=1e-5)
    weights = router.down.weight, router.down.bias, router.up.weight
    for ops in (triton_exits, reference):
        ops.router_score(guess, seen, *weights, score_params(router), EPS, score)
        torch.testing.assert_close(score, router(guess, logits), rtol=1e-4, atol=1e-5)
