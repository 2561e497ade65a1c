"""Tiles fit into the shared memory of every card, and are the measured ones on an H200."""

from __future__ import annotations

import itertools

import pytest
import torch

from TIDE.kernels import dispatch
from TIDE.kernels.triton import tiles as cards
from TIDE.kernels.triton.tiles import Card

KB = 1024
CARDS = {
    "V100": Card((7, 0), 96 * KB, 80),
    "T4": Card((7, 5), 64 * KB, 40),
    "A100": Card((8, 0), 163 * KB, 108),
    "RTX 3090": Card((8, 6), 99 * KB, 82),
    "RTX 3050": Card((8, 6), 99 * KB, 20),
    "L4": Card((8, 9), 99 * KB, 58),
    "RTX 4090": Card((8, 9), 99 * KB, 128),
    "H100": Card((9, 0), 227 * KB, 114),
    "H200": Card((9, 0), 227 * KB, 132),
    "B200": Card((10, 0), 227 * KB, 148),
    "RTX 5090": Card((12, 0), 99 * KB, 170),
}
SHAPES = [(24, 24), (576, 576), (1536, 576), (2048, 2048), (4096, 4096), (14336, 4096), (4096, 14336), (128256, 4096), (0, 64)]
SIZES = [2, 4]
TOKENS = [1, 16, 17, 33, 64, 100, 128, 130, 2000]


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("size", SIZES)
def test_tiles_fit_into_shared_memory_and_registers(name, size):
    card = CARDS[name]
    for (height, width), tokens in itertools.product(SHAPES, TOKENS):
        one = [tile(card, height, width, size, tokens) for tile in (cards.linear_tile, cards.head_tile)]
        two = [cards.gated_tile(card, height, width, size, tokens)]
        two += [cards.project_tile(card, height, width, dim, size, tokens) for dim in (16, 64, 128, 256)]
        for tile, weights in [*((tile, 1) for tile in one), *((tile, 2) for tile in two)]:
            used = cards.product_memory(tile.rows, tile.columns, tile.stages, size, weights, tile.tokens)
            assert used <= card.shared_memory
            assert min(tile.rows, tile.columns, tile.tokens) >= 16
            assert tile.stages <= (2 if card.capability < (8, 0) else 5)
            assert tile.even == (width % tile.columns == 0)
            assert tokens <= tile.tokens * tile.groups < tokens + tile.tokens
            is_large = card.capability[0] in (9, 10) and (tile.tokens == 256 or (tile.rows == 128 and weights == 2))
            sums = 32 if is_large else 16  # tensor cores there take the factors from shared memory
            assert weights * tile.rows * tile.tokens <= sums * 128 * tile.warps
    for dim in (16, 64, 128, 256):
        group = cards.most_queries(card, dim, size)
        assert group >= 16
        tile = cards.attention_tile(card, dim, group, size)
        assert cards.attention_memory(tile.keys, tile.stages, dim, group, size) <= card.shared_memory
        assert 16 <= tile.keys <= 64
        assert {cards.attention_tile(card, dim, queries, size).keys for queries in (16, 32, group)} == {tile.keys}
        long = cards.prompt_tile(card, dim)
        assert size != 2 or long.keys == tile.keys  # a token's bits depend on it
        assert cards.attention_memory(long.keys, long.stages, dim, long.queries, 2) <= card.shared_memory
        assert long.queries >= 16 and 2 * long.queries * dim <= 32 * 128 * long.warps  # two sums stay in registers


def measured(height, rows, columns, stages, size):
    """The tile that was measured to be best on an H200: rows, columns, stages."""
    while rows > 16 and height < 128 * rows:
        rows //= 2
    return rows, 2 * columns // size, stages


@pytest.mark.parametrize("size", SIZES)
def test_an_h200_has_the_tiles_that_were_measured_on_it(size):
    card = CARDS["H200"]
    for (height, width), tokens in itertools.product(SHAPES, (1, 16)):
        every = [cards.linear_tile, cards.gated_tile, cards.head_tile]
        linear, gated, head = (tile(card, height, width, size, tokens) for tile in every)
        assert linear[:3] == measured(height, 32, 256, 5, size)
        assert gated[:3] == measured(height, 64, 128, 3, size)
        assert head[:3] == measured(height, 64, 256, 4, size)
        for dim in (16, 64, 128):
            rows = 32 if height >= 2048 and dim >= 64 else 16
            project = cards.project_tile(card, height, width, dim, size, tokens)
            assert project[:3] == (rows, 512 // size, 4)
            assert cards.attention_tile(card, dim, 16, size) == (64 if size == 2 else 16, 3, 4)
            assert {own[4:] for own in (linear, gated, head, project)} == {(16, 1, 4)}


@pytest.mark.parametrize(
    ("tokens", "height", "expected"),
    [
        (32, 28672, (64, 128, 4, True, 32, 1, 4)),
        (64, 28672, (128, 64, 4, True, 64, 1, 4)),
        (64, 8192, (64, 128, 4, True, 64, 1, 4)),
        (128, 28672, (128, 64, 3, True, 128, 1, 8)),
        (128, 4096, (64, 128, 3, True, 128, 1, 4)),
        (300, 28672, (128, 64, 3, True, 128, 3, 8)),
        (2048, 4096, (128, 64, 3, True, 256, 8, 8)),
        (1024, 576, (64, 128, 3, True, 128, 8, 4)),
    ],
)
def test_more_than_16_tokens_have_wider_tiles_that_were_measured_too(tokens, height, expected):
    assert cards.linear_tile(CARDS["H200"], height, 4096, 2, tokens) == expected


@pytest.mark.parametrize("name", CARDS)
def test_the_rows_of_an_lm_head_do_not_depend_on_the_tokens(name):
    """Signals are sums over the rows of a tile."""
    for height, width in SHAPES:
        assert len({cards.head_tile(CARDS[name], height, width, 2, tokens).rows for tokens in TOKENS}) == 1


def test_small_cards_have_tall_tiles_sooner():
    rows = [cards.linear_tile(CARDS[name], 2048, 2048, 2, 1).rows for name in ("RTX 3050", "L4", "H200")]
    assert rows == [32, 32, 16]


def test_the_interpreter_runs_the_tiles_of_an_h200():
    assert cards.card_of(torch.device("cpu")) == CARDS["H200"]


def test_bfloat16_on_an_older_card_is_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dispatch, "card_of", lambda device: CARDS["T4"])
    reason = dispatch.why_no_kernels(torch.device("cuda"), torch.bfloat16)
    assert reason is not None and "8.0" in reason and "7.5" in reason and "float16" in reason
    assert "8.0" not in str(dispatch.why_no_kernels(torch.device("cuda"), torch.float16))
