"""Trees of drafts: candidates by running score, the nodes chosen from them, and the path that the full model takes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from properties import examples
from TIDE.engine.cache.slots import beam_of, candidates_of, nodes_of
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.reference import trees
from TIDE.kernels.reference.noise import noise
from TIDE.kernels.reference.sampling import Params, Settings
from TIDE.kernels.reference.trees import Beam, Candidates, Chain, Nodes, TreeShape, tree_shape

pytestmark = pytest.mark.invariant(7)

VOCABULARY = 40


class Guess(NamedTuple):
    """What a head that is a table would say: the logarithms of all tokens after a text."""

    seed: int

    def logits(self, texts: list[tuple[int, ...]]) -> torch.Tensor:
        rows = [torch.Generator().manual_seed(hash((self.seed, *text)) % 2**31) for text in texts]
        return torch.stack([2 * torch.randn(VOCABULARY, generator=own).round(decimals=1) for own in rows])


def grown(shape: TreeShape, starts: list[int], roots: list[int], guess: Guess) -> tuple[Beam, Candidates, Nodes]:
    """A tree for each row, level by level, and the texts behind its candidates checked on the way."""
    rows, at = len(starts), torch.tensor(starts, dtype=torch.int32)
    beam, candidates, nodes = beam_of(shape, rows, "cpu"), candidates_of(shape, rows, "cpu"), nodes_of(shape, rows, "cpu")
    texts = [(root,) for root in roots]
    asked = list(texts)  # texts up to everything that was asked, as `Beam.parents` counts them
    for level in range(shape.levels):
        few_ids = torch.zeros(len(texts), shape.width, dtype=torch.long)
        few_logs = torch.zeros(len(texts), shape.width)
        places = torch.arange(rows).repeat_interleave(len(texts) // rows)
        trees.few_best(guess.logits(texts), None, None, places, at[places] + level, few_ids, few_logs)
        trees.grow(few_ids, few_logs, at, level, beam, candidates)
        if level + 1 < shape.levels:
            own = zip(beam.parents[level + 1].tolist(), beam.ids[level + 1].tolist(), strict=True)
            texts = [(*asked[parent], token) for parent, token in own]
            asked += texts
    trees.choose_nodes(candidates, shape, torch.tensor(roots), at, nodes)
    return beam, candidates, nodes


def text_of(nodes: Nodes, row: int, node: int) -> tuple[int, ...]:
    """The tokens from the root to a node."""
    parent, token = int(nodes.parents[node, row]), int(nodes.ids[node, row])
    return (token,) if parent < 0 else (*text_of(nodes, row, parent), token)


def log_of(guess: Guess, text: tuple[int, ...]) -> float:
    if len(text) == 1:
        return 0.0
    logs = guess.logits([text[:at] for at in range(1, len(text))]).log_softmax(-1)
    return sum(float(logs[at, token]) for at, token in enumerate(text[1:]))


SHAPES = st.tuples(st.integers(1, 63), st.integers(1, 7)).map(lambda own: tree_shape(*own))


@examples(40)
@given(drafts=st.integers(1, 63), deepest=st.integers(1, 15))
def test_shapes_have_room_for_their_nodes(drafts, deepest):
    shape = tree_shape(drafts, deepest)
    assert 1 <= shape.levels <= min(shape.drafts, deepest) and shape.drafts <= min(drafts, shape.candidates)
    assert shape.levels + 1 < MOST_TOKENS and shape.asked <= 64
    if deepest >= 7 and drafts >= 4:
        assert shape.drafts == drafts


@examples(25)
@given(shape=SHAPES, seed=st.integers(0, 10**6), starts=st.lists(st.integers(0, 500), min_size=1, max_size=3))
def test_a_tree_is_closed_and_has_the_likeliest_texts(shape, seed, starts):
    guess, roots = Guess(seed), [7 + row for row in range(len(starts))]
    beam, candidates, nodes = grown(shape, starts, roots, guess)
    for row, start in enumerate(starts):
        texts = [text_of(nodes, row, node) for node in range(shape.drafts + 1)]
        assert len(set(texts)) == len(texts) and texts[0] == (roots[row],)
        scores = [log_of(guess, text) for text in texts]
        assert all(a >= b - 1e-4 for a, b in pairwise(scores))  # the likeliest first
        left = sorted(candidates.scores[row].tolist(), reverse=True)[shape.drafts :]
        assert not left or max(left) <= scores[-1] + 1e-4
        for node, text in enumerate(texts):
            depth = len(text) - 1
            line = [texts.index(text[: size + 2]) for size in range(depth)]
            assert int(nodes.parents[node, row]) == (line[-2] if depth > 1 else 0 if depth else -1)
            assert int(nodes.positions[node, row]) == start + depth and int(nodes.columns[node, row]) == start + node
            assert nodes.ancestors[node, row, :depth].tolist() == [start + own for own in line]
            assert int(nodes.roots[node, row]) == start
    for level in range(1, shape.levels):
        own = beam.columns[level].view(len(starts), -1)
        for row, start in enumerate(starts):
            assert own[row].tolist() == [start + 1 + (level - 1) * shape.width + place for place in range(shape.width)]
        assert torch.equal(beam.ancestors[level, :, level - 1], beam.columns[level])
        if level > 1:
            first = len(starts) + (level - 2) * len(own.flatten())
            assert torch.equal(beam.ancestors[level, :, level - 2], beam.columns[level - 1][beam.parents[level] - first])


@examples(30)
@given(shape=SHAPES, seed=st.integers(0, 10**6), data=st.data())
def test_a_path_follows_the_full_model_as_far_as_there_are_nodes(shape, seed, data):
    rows = data.draw(st.integers(1, 2))
    starts, roots = [5 * row for row in range(rows)], list(range(rows))
    _, _, nodes = grown(shape, starts, roots, Guess(seed))
    found = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(0, VOCABULARY - 1), min_size=rows, max_size=rows),
                min_size=shape.drafts + 1,
                max_size=shape.drafts + 1,
            )
        )
    )
    for row in range(rows):  # along a few nodes the full model agrees
        node = data.draw(st.integers(0, shape.drafts))
        while node:
            parent = int(nodes.parents[node, row])
            found[parent, row], node = nodes.ids[node, row], parent
    best = torch.rand(found.shape)
    best[:, 0] = best[:, 0].masked_fill(torch.rand(len(best), generator=torch.Generator().manual_seed(seed)) < 0.2, math.inf)
    chain, path = a_chain(rows), torch.zeros(shape.levels + 1, rows, dtype=torch.long)
    trees.straighten(nodes, found, best, shape.levels, chain, path)
    for row in range(rows):
        texts = [text_of(nodes, row, node) for node in range(shape.drafts + 1)]
        text, node, kept = (roots[row],), 0, 0
        while (longer := (*text, int(found[node, row]))) in texts:
            text, kept = longer, kept + 1
            node = texts.index(text)
            assert int(chain.tokens[kept, row]) == text[-1] and int(path[kept, row]) == node
            assert int(chain.found[kept, row]) == int(found[node, row]) and chain.best[kept, row] == best[node, row]
        if kept < shape.levels:
            assert int(chain.tokens[kept + 1, row]) != int(found[node, row])
        depths = [len(own) - 1 for own in texts]
        assert chain.scores[: shape.levels, row].tolist() == [depths.count(depth + 1) for depth in range(shape.levels)]


def a_chain(rows: int) -> Chain:
    long = [torch.zeros(MOST_TOKENS + 1, rows, dtype=torch.long) for _ in range(2)]
    return Chain(*long, torch.zeros(MOST_TOKENS, rows), torch.zeros(MOST_TOKENS, rows))


def test_siblings_of_a_sampled_row_are_the_likeliest_to_be_drawn():
    logits = torch.randn(2, VOCABULARY, generator=torch.Generator().manual_seed(1))
    settings = Settings(2, VOCABULARY, "cpu")
    settings.write([(Params(noise=True, temperature=0.5), 123, []), (Params(), 0, [])])
    ids, logs = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4)
    trees.few_best(logits, None, settings, torch.tensor([0, 1]), torch.tensor([10, 20]), ids, logs)
    noised = logits[0] / 0.5 + noise(torch.tensor(123), torch.tensor(11), torch.arange(VOCABULARY))
    assert ids.tolist() == [noised.topk(4).indices.tolist(), logits[1].topk(4).indices.tolist()]
    torch.testing.assert_close(logs[0], noised.log_softmax(-1).topk(4).values)


def test_impossible_tokens_leave_every_node_in_its_place():
    """Heads may give NaN; nodes then have any tokens, but columns behind the root all the same."""
    shape = tree_shape(15)
    starts = torch.tensor([30], dtype=torch.int32)
    beam, candidates, nodes = beam_of(shape, 1, "cpu"), candidates_of(shape, 1, "cpu"), nodes_of(shape, 1, "cpu")
    for level in range(shape.levels):
        asked = shape.width if level else 1
        few_ids, few_logs = torch.zeros(asked, shape.width, dtype=torch.long), torch.zeros(asked, shape.width)
        logits = torch.full((asked, VOCABULARY), math.nan)
        trees.few_best(logits, None, None, torch.zeros(asked), torch.zeros(asked), few_ids, few_logs)
        assert (few_logs == -math.inf).all()
        trees.grow(few_ids, few_logs, starts, level, beam, candidates)
    trees.choose_nodes(candidates, shape, torch.tensor([3]), starts, nodes)
    assert nodes.columns[:, 0].tolist() == list(range(30, 46))
    assert (nodes.parents[1:, 0] < torch.arange(1, 16)).all() and (nodes.parents[1:, 0] >= 0).all()


def test_columns_of_a_path_are_moved_behind_the_root():
    generator, size = torch.Generator().manual_seed(0), 8
    tables = torch.tensor([[3, 1, 5], [2, 6, 4]], dtype=torch.int32)
    keys = [torch.randn(7, 2, size, 4, generator=generator) for _ in range(2)]
    values = [torch.randn(7, 2, size, 3, generator=generator) for _ in range(2)]
    starts, path = torch.tensor([6, 13], dtype=torch.int32), torch.tensor([[0, 0], [2, 1], [3, 5], [9, 3]])

    def column(tensor, row, at):
        return tensor[int(tables[row, at // size]), :, at % size].clone()

    before = [[column(own, row, at) for row in range(2) for at in range(24)] for own in (*keys, *values)]
    trees.move_columns(keys, values, torch.zeros(2, 2, dtype=torch.long), tables, starts, path)
    for own, old in zip((*keys, *values), before, strict=True):
        for row, start in enumerate(starts.tolist()):
            for at in range(24):
                step = at - start
                source = start + int(path[step, row]) if 0 <= step < len(path) else at
                assert torch.equal(column(own, row, at), old[24 * row + source]), (row, at)
