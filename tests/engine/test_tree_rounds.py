"""Rounds with trees of drafts write the text of `model.generate`, whatever the tree, the acceptance and the batch."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import TIDE
from arrivals import finish
from families import VOCAB, build
from levels import daily
from properties import examples
from router_files import exits_of
from runners import Recording, as_it_is, on_modules, on_references
from TIDE.config import TIDEConfig
from TIDE.engine.slots.stage import SlotStage
from TIDE.engine.slots.tree_round import TreeRound
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import trees

OPTIONS = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
KINDS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.8, top_k=20, seed=5),
    "biased": dict(do_sample=True, top_p=0.9, logit_bias={7: 3.0}, seed=6),
    "penalised": dict(do_sample=True, repetition_penalty=1.5, seed=7),
}


@functools.cache
def model():
    return build("llama", num_hidden_layers=3)


@functools.cache
def policy():
    return exits_of(model(), "memory", 0)


def an_engine(script=(), then=7, **config):
    """An engine with rounds as on a GPU; drafts by a script."""
    engine = on_references(TIDE.TIDE(model(), policy(), TIDEConfig(**{"max_pending": 7, **config})))
    engine.scheduler = Recording(script, then)
    return engine


def some_ids(rows: int, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(rows))


@functools.cache
def expected(rows: int, kind: str = "greedy"):
    with on_references(TIDE.TIDE(model())) as engine:
        return engine.generate(some_ids(rows), **{**OPTIONS, **KINDS[kind]})


def sure_of_the_first(logits, vocabulary, settings, rows, starts, ids, logs):
    """Children of a head that almost knows: trees become deep."""
    trees.few_best(logits, vocabulary, settings, rows, starts, ids, logs)
    logs[:, 0] *= 0.02


def told(wrong: set[int], texts):
    """A tree whose nodes are partly the text: at every depth one node is, unless its position is a wrong one."""
    choose_nodes = TreeRound.deep_pass

    def deep_pass(self, drafted):
        exits = self.runner.exits
        ordinary = exits.choose_nodes

        def choose(candidates, shape, roots, starts, nodes):
            ordinary(candidates, shape, roots, starts, nodes)
            for row, text in enumerate(texts[: self.slots.rows]):
                current, start = 0, int(starts[row])
                while (children := (nodes.parents[:, row] == current).nonzero()[:, 0].tolist()) and current is not None:
                    at = int(nodes.positions[children[0], row])
                    if at >= len(text) or at in wrong:
                        break
                    ids = [int(nodes.ids[child, row]) for child in children]
                    current = children[(at + start) % len(children)] if text[at] not in ids else children[ids.index(text[at])]
                    nodes.ids[current, row] = text[at]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exits, "choose_nodes", choose)
            choose_nodes(self, drafted)

    return deep_pass


@pytest.mark.invariant(3)
@examples(12)
@given(
    drafts=st.integers(1, 63),
    lengths=st.lists(st.sampled_from([0, 2, 7]), max_size=8),
    wrong=st.sets(st.integers(9, 30)),
    rows=st.sampled_from([1, 1, 2, 3]),
    is_deep=st.booleans(),
)
def test_any_tree_any_acceptance_any_batch_the_same_text(drafts, lengths, wrong, rows, is_deep):
    ids, text = some_ids(rows), expected(rows)
    with pytest.MonkeyPatch.context() as patch, an_engine(lengths, draft_tree=drafts) as engine:
        patch.setattr(TreeRound, "deep_pass", told(wrong, text.tolist()))
        patch.setattr(reference, "few_best", sure_of_the_first if is_deep else trees.few_best)
        assert torch.equal(engine.generate(ids, **OPTIONS), text)
        stats = engine.last_stats
    assert stats.trees > 0 and stats.accepted + stats.remaining_tokens == stats.total_tokens == rows * OPTIONS["max_new_tokens"]
    assert stats.rejected == stats.drafted - stats.accepted
    assert stats.accepted or wrong


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drafts", daily([7, 15, 31, 63], [15]))
def test_trees_of_a_head_write_the_text(kind, drafts):
    for rows in (1, 3):
        text = expected(rows, kind)
        with an_engine(draft_tree=drafts) as engine:
            assert torch.equal(engine.generate(some_ids(rows), **{**OPTIONS, **KINDS[kind]}), text)
            assert bool(engine.last_stats.trees) == (kind != "penalised")


def test_a_path_of_right_drafts_takes_few_rounds():
    text = expected(1)
    with pytest.MonkeyPatch.context() as patch, an_engine(draft_tree=15) as engine:
        patch.setattr(TreeRound, "deep_pass", told(set(), text.tolist()))
        patch.setattr(reference, "few_best", sure_of_the_first)
        assert torch.equal(engine.generate(some_ids(1), **OPTIONS), text)
        stats = engine.last_stats
    assert stats.trees <= 7 and stats.accepted >= 12
    assert 3 < stats.tree_depth <= 5 and 2 <= stats.tree_width <= 6 and "Trees: " in stats.summary()


@pytest.mark.parametrize(
    ("place", "config", "strategy", "reason"),
    [
        (on_references, dict(exit_threshold=0.5), "memory", "exit_threshold chooses drafts by the scores of routers"),
        (on_references, dict(), "lens", "is no memory or EAGLE-3 head before the first layer"),
        (on_modules, dict(), "memory", "the model's own modules do not know the ancestors of a token"),
        (as_it_is, dict(), "memory", "rounds are on the host: "),
    ],
)
def test_where_there_are_no_trees_it_is_said_and_the_text_is_the_same(place, config, strategy, reason, caplog):
    text = expected(1)
    own = exits_of(model(), strategy, 0 if strategy == "memory" else 1)
    with place(TIDE.TIDE(model(), own, TIDEConfig(draft_tree=7, **config))) as engine:
        for _ in range(2):  # an engine says it once
            assert torch.equal(engine.generate(some_ids(1), **OPTIONS), text)
        assert not engine.last_stats.trees
    (said,) = [record.getMessage() for record in caplog.records if "draft_tree" in record.getMessage()]
    assert reason in said


def test_without_drafts_or_without_a_tree_nothing_is_said(caplog):
    text = expected(1)
    for exits, config in ((False, dict(draft_tree=7)), (True, dict(draft_tree=0)), (True, dict(mode="fast"))):
        with an_engine(**config) as engine, engine.using(engine.config, exits=exits):
            found = engine.generate(some_ids(1), **OPTIONS)
            assert not engine.last_stats.trees and (config == dict(mode="fast") or torch.equal(found, text))
    assert not [record for record in caplog.records if "draft_tree" in record.getMessage()]


@pytest.mark.parametrize(("rows", "drafts"), [(1, 31), (2, 15), (3, 15), (5, 0)])
def test_unless_told_otherwise_few_rows_have_trees_and_many_have_none(rows, drafts, monkeypatch, caplog):
    seen, deep_pass = set(), TreeRound.deep_pass
    monkeypatch.setattr(TreeRound, "deep_pass", lambda own, levels: seen.add(own.tree.shape.drafts) or deep_pass(own, levels))
    text = expected(rows)
    with an_engine() as engine:
        assert torch.equal(engine.generate(some_ids(rows), **OPTIONS), text)
        assert seen == ({drafts} if drafts else set()) and bool(engine.last_stats.trees) == bool(drafts)
    assert not [record for record in caplog.records if "draft_tree" in record.getMessage()]


@pytest.fixture
def widths(monkeypatch):
    """The slots of every round from now on."""
    found, launch = [], SlotStage.launch
    monkeypatch.setattr(SlotStage, "launch", lambda stage: found.append(stage.width) or launch(stage))
    return found


@pytest.mark.parametrize(
    ("drafts", "lengths", "known", "slots"),
    [
        (None, (9, 12, 60, 10, 58), 3, (8, 4)),
        (None, (9, 12, 20, 10, 18), 3, (8, 8)),
        (None, (9, 12, 60, 10, 58), 5, (8, 8)),
        (63, (9, 12, 60, 10, 58), 3, (8, 4)),
        (None, (9, 12, 120), 1, (4, 1)),
        (None, (9, 12, 40), 1, (4, 4)),
    ],
)
def test_the_last_of_many_rows_get_fewer_slots_and_larger_trees(drafts, lengths, known, slots, widths):
    """Unless they have little to write by then, or nothing was captured for so few. Trees of 63 do not fit on eight slots."""
    ids, options = some_ids(len(lengths)), dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    with on_references(TIDE.TIDE(model())) as engine:
        texts = engine.generate(ids, max_new_tokens=max(lengths), **options).tolist()
    with an_engine(draft_tree=drafts) as engine:
        engine.generate(ids[:known], **OPTIONS)
        widths.clear()
        rows = [engine.add(own[None], max_new_tokens=new, **options) for own, new in zip(ids, lengths, strict=True)]
        finish(engine, *rows)
        assert [row.tokens for row in rows] == [text[: len(row.tokens)] for text, row in zip(texts, rows, strict=True)]
        assert (widths[0], widths[-1]) == slots
        assert all(bool(row.stats.trees) == (slots[1] < 8) for row in rows if len(row.new_tokens) > 12)


def test_a_row_that_joins_others_takes_them_to_no_slots_that_were_never_used(widths):
    ids, options = some_ids(6), dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    with an_engine() as engine:
        rows = [engine.add(own[None], max_new_tokens=new, **options) for own, new in zip(ids, (9, 9, 9, 60, 60), strict=False)]
        finish(engine, *rows[:3])
        rows.append(engine.add(ids[5:], max_new_tokens=20, **options))
        finish(engine, *rows)
        assert set(widths) == {8}


def test_trees_leave_their_rows_no_blocks_to_share_and_none_too_few():
    """A text that grows over the ends of blocks: nodes are written up to 63 columns behind the root."""
    with on_references(TIDE.TIDE(model())) as engine:
        text = engine.generate(some_ids(2, 50), **{**OPTIONS, "max_new_tokens": 90})
    with an_engine(draft_tree=63) as engine:
        assert torch.equal(engine.generate(some_ids(2, 50), **{**OPTIONS, "max_new_tokens": 90}), text)
        assert engine.last_stats.trees > 20


def test_an_accepted_path_leaves_what_a_prefill_of_its_text_leaves():
    """K/V of all layers, and K/V and memories of the exit head."""

    def kept(ids, text, new):
        with pytest.MonkeyPatch.context() as patch, an_engine(draft_tree=15) as engine:
            patch.setattr(TreeRound, "deep_pass", told({13, 20}, text.tolist()))
            patch.setattr(reference, "few_best", sure_of_the_first)
            assert torch.equal(engine.generate(ids, **{**OPTIONS, "max_new_tokens": new}), text[:, : ids.shape[1] + new])
            (slots,) = engine.runner.pool.free_slots
            store, accepted = slots.store, engine.last_stats.accepted
        first = int(store._free[-1])  # the block the row had first is the next to be taken
        before = store.before[first * store.size :][: store.size]
        return accepted, [before, *(own[first].transpose(0, 1) for own in (*store.keys, *store.values))]

    text = expected(1)
    size = text.shape[1] - 6  # what the last round moved is not looked at
    accepted, found = kept(some_ids(1), text, 20)
    assert accepted >= 10
    _, wanted = kept(text[:, : size + 2], text, 3)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[:size], theirs[:size], rtol=1e-4, atol=1e-4)
