"""Kernels of trees give what the references in `trees.py` give. Without a GPU, in Triton's interpreter."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from TIDE.engine.cache.slots import beam_of, candidates_of, nodes_of
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.reference import trees
from TIDE.kernels.reference.sampling import Params, Settings
from TIDE.kernels.reference.trees import Chain, tree_shape

triton_trees = pytest.importorskip("TIDE.kernels.triton.trees")

pytestmark = [pytest.mark.invariant(7), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def both(values, work):
    """Run the reference and the kernel on copies of tensors; return both."""
    found = [copy.deepcopy(values) for _ in range(2)]
    for by, own in zip((trees, triton_trees), found, strict=True):
        work(by, *own)
    return found


def assert_same(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        if isinstance(ours, tuple):
            assert_same(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def some(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("has_settings", [False, True])
@pytest.mark.parametrize(("size", "few", "chosen"), [(37, 6, False), (2100, 8, False), (1300, 3, True), (3, 4, False)])
def test_the_few_best_tokens(size, few, chosen, has_settings):
    few = min(few, size)
    logits = some(3, size).round(decimals=1)  # some are equal
    logits[1, size // 2] = math.nan
    vocabulary = torch.arange(size, device=DEVICE) * 3 + 1 if chosen else None
    settings = Settings(2, 3 * size + 1, DEVICE) if has_settings else None
    if settings is not None:
        settings.write([(Params(noise=True, temperature=0.6), 77, []), (Params(temperature=2.0), 0, [])])
    rows, starts = (torch.tensor(own, dtype=torch.int32, device=DEVICE) for own in ([0, 1, 0], [9, 40, 11]))
    out = torch.zeros(3, few, dtype=torch.long, device=DEVICE), torch.zeros(3, few, device=DEVICE)
    expected, found = both(out, lambda by, ids, logs: by.few_best(logits, vocabulary, settings, rows, starts, ids, logs))
    assert_same(found, expected)


@pytest.mark.parametrize("drafts", [1, 7, 15, 63])
def test_trees_grow_and_their_paths_are_found(drafts):
    shape, rows = tree_shape(drafts), 2
    starts = torch.tensor([5, 60], dtype=torch.int32, device=DEVICE)
    state = beam_of(shape, rows, DEVICE), candidates_of(shape, rows, DEVICE), nodes_of(shape, rows, DEVICE)
    for level in range(shape.levels):
        asked = rows * (shape.width if level else 1)
        logs = -some(asked, shape.width, seed=level).abs().round(decimals=1).sort().values
        ids = torch.randint(0, 50, logs.shape, device=DEVICE)
        if level == 1:
            logs[0] = -math.inf
        expected, found = both(state, lambda by, beam, own, _: by.grow(ids, logs, starts, level, beam, own))  # noqa: B023
        assert_same(found, expected)
        state = expected
    roots = torch.tensor([3, 4], device=DEVICE)
    expected, found = both(state, lambda by, _, own, nodes: by.choose_nodes(own, shape, roots, starts, nodes))
    for node in range(shape.drafts + 1):  # behind a node's own column there is nothing
        for row in range(rows):
            depth = int(expected[2].positions[node, row] - starts[row])
            for own in (expected, found):
                own[2].ancestors[node, row, depth:] = 0
    assert_same(found[1:], expected[1:])
    nodes = expected[2]
    chosen = torch.randint(0, 50, (shape.drafts + 1, rows), device=DEVICE)
    for row, last in enumerate((shape.drafts, shape.drafts // 2)):
        while last:
            parent = int(nodes.parents[last, row])
            chosen[parent, row], last = nodes.ids[last, row], parent
    best = some(*chosen.shape)
    best[-1, 0] = math.inf
    long = [torch.zeros(MOST_TOKENS + 1, rows, dtype=torch.long, device=DEVICE) for _ in range(2)]
    single = [torch.zeros(MOST_TOKENS, rows, device=DEVICE) for _ in range(2)]
    out = Chain(*long, *single), torch.zeros(shape.levels + 1, rows, dtype=torch.long, device=DEVICE)
    expected, found = both(out, lambda by, chain, path: by.straighten(nodes, chosen, best, shape.levels, chain, path))
    assert_same(found, expected)


def test_columns_of_a_path_are_moved_at_once():
    size = 8
    tables = torch.tensor([[3, 1, 5], [2, 6, 4]], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([6, 13], dtype=torch.int32, device=DEVICE)
    path = torch.tensor([[0, 0], [2, 1], [3, 5], [9, 3]], device=DEVICE)
    layers = [([some(7, 2, size, 6, seed=1), some(7, 3, size, 5, seed=2)], [some(7, 2, size, 6), some(7, 3, size, 4)])]

    def move(by, held):
        keys, values = held
        pairs = [[key.data_ptr(), value.data_ptr()] for key, value in zip(keys, values, strict=True)]
        by.move_columns(keys, values, torch.tensor(pairs, device=DEVICE), tables, starts, path)

    (expected,), (found,) = both(layers, move)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
