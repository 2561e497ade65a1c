"""Attention in Triton: tokens of a row read its K/V together, chunk by chunk. Without a GPU, in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch

from layers import DIM, KV_HEADS, ROWS, a_layer, a_pass, grouped, in_blocks, in_dtype, some_of
from TIDE.kernels.reference import layers as reference

triton_attention = pytest.importorskip("TIDE.kernels.triton.attention")

pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]  # the interpreter has no products of bf16
CHUNK = 64
STARTS = {0: 20, 1: 126, 2: 70}  # tokens of row 1 are on both sides of a chunk's end
EACH = 4  # tokens of every row
LENGTHS = [start + EACH for start in STARTS.values()]
ROOM = 192
FEATURES = [dict(), dict(window=75), dict(window=9, cap=0.8), dict(heads=3 * KV_HEADS)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(triton_attention, "CHUNK", CHUNK)
    monkeypatch.setattr(triton_attention, "MERGED", 2)


def a_case(dtype, **features):
    """Queries of three rows in turn, and their K/V in blocks."""
    generator = torch.Generator().manual_seed(5)
    attention = in_dtype(a_layer(generator, **features), dtype, DEVICE).attention
    tokens = a_pass(generator, dict.fromkeys(STARTS, EACH), STARTS, origins=dict.fromkeys(STARTS, 0))
    tokens = some_of(tokens, torch.arange(ROWS * EACH).view(ROWS, EACH).T.flatten())
    cache = torch.randn(2, ROWS, KV_HEADS, ROOM, DIM, generator=generator).to(dtype)
    queries = torch.randn(len(tokens.rows), attention.q.rows, generator=generator).to(DEVICE, dtype)
    tables, paged = in_blocks(cache, LENGTHS, generator)
    tokens = in_dtype(tokens, dtype, DEVICE)
    return attention, tokens._replace(tables=tables.to(DEVICE)), queries, paged.to(DEVICE)


def attended(attention, tokens, queries, cache):
    return triton_attention.attend(attention, tokens, queries, *cache, ROOM)


def assert_same(found, expected):
    """The same bits on a GPU. The interpreter's products are numpy's, whose bits depend on shapes."""
    if DEVICE == "cuda":
        assert torch.equal(found, expected)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


# tokens alone, with a table and without, are the smallest groups: they meet one feature each
@pytest.mark.parametrize(
    ("features", "groups"), [*itertools.product(FEATURES, [ROWS, 3]), (FEATURES[0], None), (FEATURES[2], 1)], ids=str
)
def test_tokens_that_read_together_see_what_the_reference_sees(features, groups):
    attention, tokens, queries, cache = a_case(torch.float32, **features)
    expected = reference.attend(attention, tokens, queries, *cache, ROOM)
    tokens = tokens._replace(groups=groups) if groups in (ROWS, None) else grouped(tokens, groups)
    torch.testing.assert_close(attended(attention, tokens, queries, cache), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", FEATURES[:3], ids=str)
@pytest.mark.parametrize("groups", [ROWS, 3])
def test_positions_before_the_begin_are_seen_by_themselves_alone(features, groups):
    attention, tokens, queries, cache = a_case(torch.float32, **features)
    first = tokens.positions - tokens.positions.min()  # from the first position on
    tokens = tokens._replace(positions=first, columns=first, angles=first)
    expected = reference.attend(attention, tokens, queries, *cache, ROOM, begins_at=2)
    apart = tokens._replace(groups=groups) if groups == ROWS else grouped(tokens, groups)
    found = triton_attention.attend(attention, apart, queries, *cache, ROOM, begins_at=2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    cache[1, tokens.tables[0, 0].long(), :, :2] += 1.0
    again = triton_attention.attend(attention, apart, queries, *cache, ROOM, begins_at=2)
    changed = (again != found).any(-1)
    assert torch.equal(changed, (tokens.rows == 0) & (first < 2)) and changed.any() and (first >= 2).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_busy", [True, False])
@pytest.mark.parametrize("features", FEATURES[:2], ids=str)
def test_bits_depend_neither_on_company_nor_on_how_chunks_are_spread(features, is_busy, dtype, monkeypatch):
    attention, tokens, queries, cache = a_case(dtype, **features)
    some = [1, 2, 4, 10]  # the second row on both sides of a chunk's end, and others
    apart = torch.cat([attended(attention, some_of(tokens, [at]), queries[at : at + 1], cache) for at in some])
    monkeypatch.setattr(triton_attention, "keeps_busy", lambda card, programs: is_busy)
    for own in (grouped(tokens, 4), grouped(tokens, 2), tokens._replace(groups=ROWS)):
        assert_same(attended(attention, own, queries, cache)[some], apart)
    assert not triton_attention._counters(queries.device).any()


@pytest.mark.parametrize("groups", [ROWS, 4])
def test_a_small_card_takes_fewer_tokens_side_by_side(groups, monkeypatch):
    attention, tokens, queries, cache = a_case(torch.float32)
    tokens = tokens._replace(groups=groups) if groups == ROWS else grouped(tokens, groups)
    expected = attended(attention, tokens, queries, cache)
    monkeypatch.setattr(triton_attention, "most_queries", lambda card, dim, size: 2 * attention.heads // attention.kv_heads)
    assert_same(attended(attention, tokens, queries, cache), expected)


def test_groups_without_tokens_change_nothing():
    attention, tokens, queries, cache = a_case(torch.float32)
    tokens = grouped(tokens, 4)
    none = torch.full_like(tokens.groups[:1], -1)
    more = tokens._replace(groups=torch.cat([none, tokens.groups, none]))
    assert_same(attended(attention, more, queries, cache), attended(attention, tokens, queries, cache))


def prompts(seed, dtype, **features):
    """Two rows: one from its first token on, over the ends of chunks, and one behind a text; the last group is not full."""
    generator = torch.Generator().manual_seed(seed)
    attention = in_dtype(a_layer(generator, **features), dtype, DEVICE).attention
    starts, counts = {0: 0, 1: 50, 2: 3}, {0: 100, 1: 70, 2: 1}
    tokens = a_pass(generator, counts, starts, origins=dict.fromkeys(starts, 0))
    cache = torch.randn(2, ROWS, KV_HEADS, ROOM, DIM, generator=generator).to(dtype)
    queries = torch.randn(len(tokens.rows), attention.q.rows, generator=generator).to(DEVICE, dtype)
    tables, paged = in_blocks(cache, [starts[row] + counts[row] for row in starts], generator)
    tokens = in_dtype(tokens, dtype, DEVICE)._replace(tables=tables.to(DEVICE))
    return attention, tokens, queries, paged.to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16])
@pytest.mark.parametrize(("features", "chunk"), [*((features, CHUNK) for features in FEATURES), ({}, 2 * CHUNK)], ids=str)
def test_long_passes_of_prompts_have_a_kernel_with_the_same_bits(features, chunk, dtype, monkeypatch):
    monkeypatch.setattr(triton_attention, "CHUNK", chunk)
    attention, tokens, queries, cache = prompts(6, dtype, **features)
    asked, kernel = [], triton_attention.attend_prompts
    monkeypatch.setattr(triton_attention, "attend_prompts", lambda *given: (asked.append(1), kernel(*given))[1])
    found = attended(attention, grouped(tokens, 64), queries, cache)
    assert asked
    expected = reference.attend(attention, tokens, queries, *cache, ROOM)
    last_place = 4 * torch.finfo(dtype).eps  # weights and results are rounded
    torch.testing.assert_close(found, expected, rtol=last_place, atol=last_place)
    some = [0, 1, 62, 63, 64, 99, 100, 150, 169, 170]
    apart = [attended(attention, some_of(tokens, [at]), queries[at : at + 1], cache) for at in some]
    if DEVICE == "cuda":
        assert torch.equal(found[some], torch.cat(apart))


@pytest.mark.parametrize("features", FEATURES[:2], ids=str)
@pytest.mark.parametrize("together", [64, 16])
def test_tokens_of_a_prompt_with_others_missing_between_see_all_columns(features, together):
    """As where tokens of prompts have settled: groups of one row whose positions rise by more than one."""
    attention, whole, queries, cache = prompts(7, torch.float16, **features)
    some = [at for at in range(len(queries)) if at % 3 != 1 or at > 165]
    found = attended(attention, grouped(some_of(whole, some), together), queries[some], cache)
    expected = reference.attend(attention, whole, queries, *cache, ROOM)[some]
    torch.testing.assert_close(found, expected, rtol=4e-3, atol=4e-3)
