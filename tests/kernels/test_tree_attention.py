"""Attention of tokens in trees: each sees its ancestors in the order of positions, and has the bits of a text."""

from __future__ import annotations

import pytest
import torch

from layers import DIM, KV_HEADS, a_layer, in_blocks, in_dtype
from levels import daily
from TIDE.kernels.layer import Ancestors, Pass
from TIDE.kernels.reference import layers as reference

triton_attention = pytest.importorskip("TIDE.kernels.triton.attention")

pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter has no products of bf16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
ROOTS = [20, 63, 124]  # positions of the newest final tokens: trees lie within a block, behind the end of one, on both sides
PARENTS = [0, 0, 1, 1, 2, 3, 5, 3, 6, 7]  # of nodes 1, 2, …; node 0 is the root
ROOM = 192
FEATURES = [dict(), dict(window=5), dict(window=40, cap=0.8)]


def line_of(node: int) -> list[int]:
    """Nodes from the root's child to a node."""
    return [] if not node else [*line_of(PARENTS[node - 1]), node]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(triton_attention, "CHUNK", 64)
    monkeypatch.setattr(triton_attention, "MERGED", 2)


def a_case(dtype, **features):
    """Attention, the nodes of a tree in each row, their queries, and K/V in rows."""
    generator = torch.Generator().manual_seed(5)
    attention = in_dtype(a_layer(generator, **features), dtype, DEVICE).attention
    nodes, rows = len(PARENTS) + 1, len(ROOTS)
    cache = torch.randn(2, rows, KV_HEADS, ROOM, DIM, generator=generator).to(dtype)
    queries = torch.randn(nodes * rows, attention.q.rows, generator=generator).to(DEVICE, dtype)
    lines = [line_of(node) for node in range(nodes) for _ in ROOTS]
    roots = torch.tensor(ROOTS * nodes, dtype=torch.int32)
    columns = torch.tensor([node + root for node in range(nodes) for root in ROOTS], dtype=torch.int32)
    depth = max(map(len, lines))
    table = torch.zeros(len(lines), depth, dtype=torch.int32)
    for token, line in enumerate(lines):
        table[token, : len(line)] = torch.tensor([int(roots[token]) + node for node in line], dtype=torch.int32)
    positions = roots + torch.tensor([len(line) for line in lines], dtype=torch.int32)
    tables, paged = in_blocks(cache, [root + nodes for root in ROOTS], generator)
    x, own = torch.zeros(len(lines), 1), torch.arange(rows, dtype=torch.int32).repeat(nodes)
    tokens = Pass(x, x, x, own, columns, positions, positions, tables, None, Ancestors(roots, table))
    return attention, in_dtype(tokens, dtype, DEVICE), queries, paged.to(DEVICE), cache, generator


def in_a_row(tokens, cache, token, generator):
    """A node as the newest token of a text: its ancestors' K/V moved to their positions."""
    row, root, position = (int(own[token]) for own in (tokens.rows, tokens.ancestors.roots, tokens.positions))
    own = cache[:, row : row + 1].clone()
    for place, column in enumerate(tokens.ancestors.columns[token, : position - root].tolist()):
        own[:, :, :, root + 1 + place] = cache[:, row : row + 1, :, column]
    tables, paged = in_blocks(own, [position + 1], generator)
    at = tokens.positions[token : token + 1]
    alone = Pass(tokens.x[:1], tokens.x, tokens.x, at * 0, at, at, at, tables.to(DEVICE))
    return alone, paged.to(DEVICE)


@pytest.mark.parametrize(
    ("features", "is_busy", "dtype"),
    daily(
        [*((own, True, torch.float32) for own in FEATURES), *((FEATURES[0], False, dtype) for dtype in DTYPES)],
        [(FEATURES[2], True, torch.float32)],
    ),
    ids=str,
)
def test_a_node_has_the_bits_that_it_has_in_a_text(features, is_busy, dtype, monkeypatch):
    monkeypatch.setattr(triton_attention, "keeps_busy", lambda card, programs: is_busy)
    attention, tokens, queries, paged, cache, generator = a_case(dtype, **features)
    found = triton_attention.attend(attention, tokens, queries, *paged, ROOM)
    for token in range(1, len(queries), 5):
        alone, own = in_a_row(tokens, cache, token, generator)
        expected = triton_attention.attend(attention, alone, queries[token : token + 1], *own, ROOM)
        assert torch.equal(found[token : token + 1], expected), f"node {token // len(ROOTS)} of row {token % len(ROOTS)}"


@pytest.mark.parametrize(
    ("features", "begins_at"), daily([*((own, 0) for own in FEATURES), (FEATURES[0], 1)], [(FEATURES[2], 0)]), ids=str
)
def test_kernel_and_reference_see_the_same(features, begins_at):
    attention, tokens, queries, paged, cache, generator = a_case(torch.float32, **features)
    expected = reference.attend(attention, tokens, queries, *paged, ROOM, begins_at)
    found = triton_attention.attend(attention, tokens, queries, *paged, ROOM, begins_at)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    alone, own = in_a_row(tokens, cache, 31, generator)
    in_text = reference.attend(attention, alone, queries[31:32], *own, ROOM, begins_at)
    torch.testing.assert_close(expected[31:32], in_text, rtol=1e-4, atol=1e-5)
