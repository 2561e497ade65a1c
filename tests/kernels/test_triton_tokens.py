"""Triton kernels take any number of tokens, and a token's bits do not depend on how many there are. Without a GPU, in Triton's
interpreter, which is numpy: there these tests prove where things are read and written."""

from __future__ import annotations

import pytest
import torch

from layers import DIM, HIDDEN, KV_HEADS, ROWS, a_layer, a_pass, in_dtype, some_of
from levels import daily
from TIDE.kernels.reference import layers as reference

pytest.importorskip("triton")
from TIDE.engine.cache.slots import score_params
from TIDE.kernels.layer import GELU, MLP, no_norm
from TIDE.kernels.result import ACCEPTED, FIELDS
from TIDE.kernels.triton import exits as triton_exits
from TIDE.kernels.triton import ops as triton_ops
from TIDE.kernels.triton.tiles import MANY, MANY_TOKENS, card_of, gated_tile, linear_tile
from TIDE.kernels.weights import Dense
from TIDE.routing.heads import EPS
from TIDE.routing.router import Router

pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# tokens of a product are padded to 16, 32, 64 or 128; beyond, they are several
COUNTS = daily([1, 16, 17, 33, 64, 100, 130], [1, 17, 130])
SOME = [0, 127, 128, 129]  # of 130 tokens
ROOM = 80  # columns
EMPTY = torch.zeros(0)
NO_NORM = no_norm(EMPTY)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def assert_close(found, expected, close=1e-5):
    torch.testing.assert_close(found, expected, rtol=0, atol=close * float(expected.abs().max()))


def tokens_of(count):
    """Tokens of three rows, each from a column of its own on."""
    generator = torch.Generator().manual_seed(count)
    shares = {2: count // 2, 0: count - count // 2 - count // 5, 1: count // 5}
    counts = {row: own for row, own in shares.items() if own}
    return a_pass(generator, counts, {2: 3, 0: 2, 1: 4}, origins={2: 1, 0: 2, 1: 0})


@pytest.mark.parametrize("count", COUNTS)
def test_products(count):
    """With odd shapes, and rows of a larger weight."""
    x, whole, bias, base = random(count, 19), random(140, 19, seed=1), random(70, seed=2), random(count, 70, seed=3)
    weight, few = Dense(whole[70:]), Dense(whole[70:101])
    assert_close(triton_ops.linear(x, few), reference.linear(x, few, EMPTY))
    for activation in (None, GELU):
        ours, theirs = (ops.linear(x, weight, bias, activation) for ops in (triton_ops, reference))
        assert_close(ours, theirs)
    expected = base.clone()
    for ops, own in ((triton_ops, base), (reference, expected)):
        ops.add_linear(own, x, weight, bias, NO_NORM, 0.5)
    assert_close(base, expected)
    tables = random(2 * 140, 70).view(2, 140, 70)
    tables[1] = tables[0]
    for ops, table in zip((triton_exits, reference), tables, strict=True):
        ops.linear_into(x, weight, table, torch.arange(139, 139 - count, -1, device=DEVICE))
    assert_close(*tables)


@pytest.mark.parametrize("height", [6400, 6330])
def test_a_product_of_many_tokens(height):
    x, weight, bias = (own.half() for own in (random(700, 40), random(height, 40, seed=1), random(height, seed=2)))
    assert linear_tile(card_of(x.device), height, 40, 2, 700).tokens == MANY
    expected = reference.linear(x.float(), Dense(weight.float()), bias.float())
    assert_close(triton_ops.linear(x, Dense(weight), bias).float(), expected, 2e-3)
    base = random(700, height, seed=3).half()
    added = base.float() + reference.linear(x.float(), Dense(weight.float()), EMPTY)
    triton_ops.add_linear(base, x, Dense(weight), EMPTY.to(base), NO_NORM, 1.0)
    assert_close(base.float(), added, 2e-3)


def test_a_gate_of_many_tokens():
    x, gate, up = (own.half() for own in (random(700, 40), random(7168, 40, seed=1), random(7168, 40, seed=2)))
    assert gated_tile(card_of(x.device), 7168, 40, 2, 700).rows == MANY_TOKENS.rows
    mlp = MLP(Dense(gate), Dense(up), Dense(up.T), EMPTY, EMPTY, EMPTY)
    expected = reference.mlp_inner(x.float(), mlp._replace(gate=Dense(gate.float()), up=Dense(up.float())))
    assert_close(triton_ops.mlp_inner(x, mlp).float(), expected, 4e-3)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("count", COUNTS)
def test_the_inside_of_an_mlp(count, gated):
    layer, x = a_layer(torch.Generator().manual_seed(1), gated=gated, mlp_bias=True), random(count, HIDDEN)
    mlp = in_dtype(layer.mlp, torch.float32, DEVICE)
    assert_close(triton_ops.mlp_inner(x, mlp), reference.mlp_inner(x, mlp))


@pytest.mark.parametrize("count", COUNTS)
def test_queries_and_kv(count):
    layer = in_dtype(a_layer(torch.Generator().manual_seed(2), bias=True), torch.float32, DEVICE)
    tokens = in_dtype(tokens_of(count), torch.float32, DEVICE)
    cache = random(2, ROWS, KV_HEADS, ROOM, DIM)
    caches, found = (cache.clone(), cache.clone()), []
    for ops, (keys, values) in zip((triton_ops, reference), caches, strict=True):
        queries = ops.project(layer.attention, tokens, tokens.x, keys, values)
        found.append(queries if ops is reference else queries.view(len(tokens.x), -1))
    assert_close(*found)
    assert_close(*caches)


@pytest.mark.parametrize("count", COUNTS)
def test_best_tokens(count):
    x, weight, vocabulary = random(count, HIDDEN), Dense(random(201, HIDDEN, seed=1)), torch.arange(1, 201, 3, device=DEVICE)
    found = {}
    for ops in (triton_exits, reference):
        best, token, seen = x.new_zeros(count), torch.zeros(count, dtype=torch.long, device=DEVICE), x.new_zeros(count, 4)
        logits = x.new_zeros(count, len(vocabulary))
        ops.best_tokens(x, weight, best, token, seen, vocabulary, logits)
        found[ops] = token, best, seen, logits
    assert torch.equal(found[triton_exits][0], found[reference][0])
    for ours, theirs in zip(found[triton_exits][1:], found[reference][1:], strict=True):
        assert_close(ours, theirs)


def test_scores_of_many_guesses():
    guesses, signals, router = random(33, HIDDEN), random(33, 4, seed=1), Router(HIDDEN, 7, 4).to(DEVICE)
    weights, found = (router.down.weight, router.down.bias, router.up.weight), guesses.new_zeros(2, 33)
    with torch.no_grad():
        for ops, score in zip((triton_exits, reference), found, strict=True):
            ops.router_score(guesses, signals, *weights, score_params(router), EPS, score)
    assert_close(*found)


@pytest.mark.parametrize("count", COUNTS)
def test_states_for_a_memory_head(count):
    table, spread, center = random(200, HIDDEN), 1 + random(HIDDEN, seed=1).abs(), random(HIDDEN, seed=2)
    rows = torch.randperm(199, generator=torch.Generator().manual_seed(3))[:count].to(DEVICE)
    tables, outs = (table.clone(), table.clone()), random(2, count, HIDDEN)
    normed = torch.zeros_like(outs)
    for place, (ops, own) in enumerate(zip((triton_exits, reference), tables, strict=True)):
        ops.normalize_into(table, rows, normed[place], EPS, center, spread)
        ops.denormalize(normed[place], center, spread, rows, own, outs[place])
    assert_close(*normed)
    assert_close(*outs)
    assert_close(*tables)


def test_drafts_of_many_rows():
    rows, drafts, generator = 130, 5, torch.Generator().manual_seed(4)
    drafted = torch.randint(0, 3, (17, rows), generator=generator).to(DEVICE)
    full = torch.randint(0, 3, (16, rows), generator=generator).to(DEVICE)
    scores = torch.rand(16, rows, generator=generator).to(DEVICE)
    results = []
    for ops in (triton_exits, reference):
        tokens, result = drafted.clone(), torch.zeros(rows, FIELDS, device=DEVICE)
        starts = torch.arange(16, dtype=torch.int32, device=DEVICE)[:, None].repeat(1, rows)
        active = (torch.arange(rows, device=DEVICE) % 5 > 0).int()
        limits = torch.arange(rows, dtype=torch.int32, device=DEVICE) % 7
        ops.accept(full, torch.ones_like(scores), tokens, starts, scores, active, result, limits, drafts, 0.2, True)
        results.append((result, tokens, starts))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert len(results[0][0][:, ACCEPTED].unique()) > 3


def test_a_token_among_130_has_the_bits_it_has_alone():
    layer = in_dtype(a_layer(torch.Generator().manual_seed(5)), torch.float16, DEVICE)
    cache = random(2, ROWS, KV_HEADS, ROOM, DIM).half()
    tokens, among = in_dtype(tokens_of(130), torch.float16, DEVICE), cache.clone()
    queries, base = triton_ops.project(layer.attention, tokens, tokens.x, *among), random(130, HIDDEN).half()
    inner, best = triton_ops.mlp_inner(tokens.x, layer.mlp), best_of(tokens.x)
    together = base.clone()
    triton_ops.add_linear(together, inner, layer.mlp.down, layer.mlp.down_bias, NO_NORM, 0.3)
    for index in SOME:
        one, own = some_of(tokens, slice(index, index + 1)), cache.clone()
        place = int(one.rows), slice(None), int(one.columns)
        assert torch.equal(triton_ops.project(layer.attention, one, one.x, *own)[0], queries[index])
        assert torch.equal(own[:, *place], among[:, *place])
        alone, sums = triton_ops.mlp_inner(one.x, layer.mlp), base[index : index + 1].clone()
        triton_ops.add_linear(sums, alone, layer.mlp.down, layer.mlp.down_bias, NO_NORM, 0.3)
        assert torch.equal(alone[0], inner[index]) and torch.equal(sums[0], together[index])
        for ours, theirs in zip(best_of(one.x), best, strict=True):
            assert torch.equal(ours[0], theirs[index])


def best_of(x):
    """Token, logit, signals."""
    best, seen = torch.zeros(len(x), device=DEVICE), torch.zeros(len(x), 4, device=DEVICE)
    token = torch.zeros(len(x), dtype=torch.long, device=DEVICE)
    triton_exits.best_tokens(x, Dense(random(150, HIDDEN, seed=6).to(x.dtype)), best, token, seen)
    return token, best, seen


def test_a_layer_of_many_tokens_is_the_layer_of_each_alone():
    layer = in_dtype(a_layer(torch.Generator().manual_seed(7)), torch.float16, DEVICE)
    tokens = in_dtype(tokens_of(33), torch.float16, DEVICE)
    cache = random(2, ROWS, KV_HEADS, ROOM, DIM).half()
    among, whole = cache.clone(), some_of(tokens, slice(None))
    triton_ops.decoder_layer(layer, whole, *among)
    for index in (0, 20, 32):
        before = cache.clone()
        one = some_of(tokens, slice(index, index + 1))
        own = tokens.rows == one.rows
        columns = tokens.columns[own & (tokens.columns < one.columns)]
        before[:, int(one.rows), :, columns] = among[:, int(one.rows), :, columns]
        triton_ops.decoder_layer(layer, one, *before)
        assert torch.equal(one.x[0], whole.x[index])
        assert torch.equal(before[:, one.rows, :, one.columns], among[:, one.rows, :, one.columns])
