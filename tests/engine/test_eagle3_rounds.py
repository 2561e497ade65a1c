"""EAGLE-3 heads in whole rounds: drafts as a reference that shares no code makes them, and the text of exits off."""

from __future__ import annotations

import dataclasses
import functools
import os

import pytest
import torch

import TIDE
from arrivals import KINDS, Text, a_model, check, decoded, gib_of, rows_put_back
from arrivals import model as of_arrivals
from eagle_heads import Reference, a_head, config_of, fitted, tensors_of, with_vocabulary, write
from families import VOCAB, build
from levels import daily
from policies import texts_of
from runners import Recording, in_rounds, on_modules, on_references, why_on_the_host
from TIDE.config import TIDEConfig
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.select import described_layers
from TIDE.engine.slots.round import SlotRound
from TIDE.engine.slots.tree_round import TreeRound
from TIDE.kernels.reference import sampling
from TIDE.routing.router import SIGNALS, Router

FLAGS = [(), ("fc_norm", "norm_output"), ("norm_before_fc", "norm_before_residual")]
NEWER = dict(fc_norm=True, norm_output=True)  # EAGLE-3.1
DEPTHS = [1, 2, 4]
IN_A_ROW = dict(then=3, max_pending=3, draft_tree=0)
OPTIONS = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)


@functools.cache
def model():
    return build("llama")


def folder_of(path, tensors, depths=DEPTHS, vocabulary=VOCAB, **flags):
    config = config_of("speculators", vocabulary, eagle_aux_hidden_state_layer_ids=list(depths), **flags)
    return write(path, config, tensors)


@functools.cache
def good_tensors():
    """Of a head that knows the texts of `expected`, where they are greedy."""
    texts = [model().generate(some_ids(rows), **OPTIONS | dict(max_new_tokens=55)) for rows in (1, 3)]
    return fitted(model(), tuple(DEPTHS), more=torch.cat(texts), **NEWER)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A head of EAGLE-3.1 whose drafts are often right."""
    return folder_of(tmp_path_factory.mktemp("good"), good_tensors(), **NEWER)


def some_ids(rows: int = 1, tokens: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, tokens), generator=torch.Generator().manual_seed(rows))


@functools.cache
def expected(rows: int, kind: str) -> torch.Tensor:
    with on_references(TIDE.TIDE(model())) as engine:
        return engine.generate(some_ids(rows), **(OPTIONS | KINDS[kind] | dict(seed=5)))


def noted_drafts(monkeypatch) -> list[tuple[int, list[int]]]:
    """Position of the newest final token and drafts of every round of the first row."""
    found, run = [], SlotRound.deep_pass

    def deep_pass(self, drafted):
        found.append((int(self.slots.grid.starts[0, 0]), self.slots.chain.tokens[1 : drafted + 1, 0].tolist()))
        run(self, drafted)

    monkeypatch.setattr(SlotRound, "deep_pass", deep_pass)
    return found


@torch.no_grad()
def states_of(text: list[int], depths) -> list[torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}
    layers = model().model.layers
    hooks = [
        layers[depth - 1].register_forward_hook(
            lambda module, given, found, depth=depth: kept.update({depth: found[0] if isinstance(found, tuple) else found})
        )
        for depth in depths
        if depth
    ]
    model()(torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    kept[0] = model().get_input_embeddings()(torch.tensor([text]))
    return [kept[depth].view(len(text), -1) for depth in depths]


@torch.no_grad()
def reference_drafts(head: Reference, text: list[int], start: int, count: int, depths, vocabulary=None) -> list[int]:
    """What the head drafts behind the token at a position, greedily."""
    ids, parts = text[: start + 1], states_of(text, depths)
    for number in range(count):
        embedded = model().get_input_embeddings()(torch.tensor(ids))
        best = int(head.drafts(embedded, parts, start, number + 1)[-1].argmax())
        ids = [*ids, best if vocabulary is None else int(vocabulary[best])]
    return ids[start + 1 :]


def check_drafts(rounds, text, head, depths=DEPTHS, vocabulary=None):
    drafted = [(start, drafts) for start, drafts in rounds if drafts and start < len(text)]
    assert len(drafted) > 1
    for start, drafts in drafted:
        assert drafts == reference_drafts(head, text, start, len(drafts), depths, vocabulary), f"behind position {start}"


@pytest.mark.parametrize("flags", FLAGS, ids=str)
@pytest.mark.parametrize("depths", [[1, 2, 4], [0, 1, 3]], ids=str)
def test_drafts_are_those_of_the_reference(flags, depths, tmp_path, monkeypatch):
    flags, rounds = dict.fromkeys(flags, True), noted_drafts(monkeypatch)
    tensors = tensors_of(**flags)
    with in_rounds(model(), policy=folder_of(tmp_path, tensors, depths, **flags), **IN_A_ROW) as engine:
        text = engine.generate(some_ids(), **OPTIONS)
        assert why_on_the_host(engine, some_ids(), **OPTIONS) is None and "rounds on the host" not in engine.backend
    assert torch.equal(text, expected(1, "greedy"))
    check_drafts(rounds, text[0].tolist(), Reference(tensors, flags), depths)


@pytest.mark.parametrize("script", [[], [0, 3, 0, 0, 3, 1, 0, 3], [0] * 18 + [3, 3, 0, 3, 3]], ids=str)
def test_accepted_and_missed_tokens_are_fed_again_with_true_states(script, good, monkeypatch):
    rounds = noted_drafts(monkeypatch)
    with in_rounds(model(), policy=good, script=script, **IN_A_ROW) as engine:
        text = engine.generate(some_ids(), **OPTIONS)
        stats, head = engine.last_stats, engine.policy.exits[0].head
    assert torch.equal(text, expected(1, "greedy"))
    assert stats.accepted > 2
    assert head.sizes.norm_output and head.sizes.fc_norm
    check_drafts(rounds, text[0].tolist(), Reference(good_tensors(), NEWER))


def test_a_draft_vocabulary_names_its_own_tokens(tmp_path, monkeypatch):
    rounds, some = noted_drafts(monkeypatch), torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:48]
    tensors, texts = tensors_of(48), {kind: expected(1, kind) for kind in KINDS}
    with in_rounds(model(), policy=folder_of(tmp_path, with_vocabulary(tensors, some)), **IN_A_ROW) as engine:
        for kind in KINDS:
            found = engine.generate(some_ids(), **(OPTIONS | KINDS[kind] | dict(seed=5)))
            assert torch.equal(found, texts[kind])
            assert engine.last_stats.drafted > 0
            if kind == "greedy":
                check_drafts(rounds, found[0].tolist(), Reference(tensors), vocabulary=some)


@pytest.mark.invariant(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_text_is_that_of_exits_off(kind, rows, good, tmp_path):
    text = expected(rows, kind)
    for head in (good, a_head(tmp_path)):
        with in_rounds(model(), policy=head, then=3, max_pending=7, draft_tree=0) as engine:
            found = engine.generate(some_ids(rows), **(OPTIONS | KINDS[kind] | dict(seed=5)))
            assert torch.equal(found, text)
            assert engine.last_stats.drafted > 0 and engine.scheduler.rounds
            assert engine.last_stats.accepted > 5 * rows or (head, kind) != (good, "greedy")


@pytest.mark.invariant(3)
@pytest.mark.parametrize("name", ["qwen3", "gemma", "gemma3", "phi3", "olmo2", "mistral"])
def test_compiled_families_draft_in_rounds(name, prompts, tmp_path):
    """Scaled embeddings, norms of queries and keys, windows: those are the model's, and the head has none of them."""
    own, (ids, mask) = build(name), prompts
    options = OPTIONS | dict(max_new_tokens=8)
    text = own.generate(ids, attention_mask=mask, **options)
    with in_rounds(own, policy=a_head(tmp_path), then=2, max_pending=3) as engine:
        found = engine.generate(ids, attention_mask=mask, **options)
        assert texts_of(found, mask) == texts_of(text, mask)
        assert engine.last_stats.drafted > 0 and engine.scheduler.rounds


@pytest.mark.parametrize("has_router", [False, True])
def test_in_mode_fast_rounds_decide_as_the_host_does(has_router, good):
    """By its own probability, or by the router of a head that was trained on; scores are those of the host too."""
    found, config = {}, TIDEConfig(mode="fast", exit_threshold=0.4, max_pending=3, max_exit_share=0.8)
    for place in (on_references, lambda engine: engine):
        with TIDE.TIDE(model(), good, config) as engine:
            if has_router:
                torch.manual_seed(0)
                own = engine.policy.exits[0]
                engine.policy.exits[0] = dataclasses.replace(own, router=Router(64, 8, SIGNALS).requires_grad_(False))
            place(engine).scheduler = Recording(then=3)
            text = engine.generate(some_ids(), **OPTIONS)
            assert bool(engine.scheduler.rounds) == (place is on_references)
            decided = engine.last_rows[0].decided
            scores = [own.score for own in decided if own.depth == 0]
            found[place] = text.tolist(), [own.depth for own in decided], torch.tensor(scores)
    ours, theirs = found.values()
    assert ours[:2] == theirs[:2] and 0 in ours[1]
    torch.testing.assert_close(ours[2], theirs[2], rtol=1e-3, atol=1e-4)


@pytest.mark.invariant(5)
def test_rows_that_come_late_and_rows_that_are_put_back(tmp_path, monkeypatch):
    put_back = rows_put_back(monkeypatch)
    texts = [Text(10, 90, "greedy"), Text(11, 90, "sampled"), Text(12, 90, "penalised", 3), Text(1, 9, "processed", 5)]
    head = folder_of(tmp_path, fitted(of_arrivals(), (1, 2, 3), steps=20), [1, 2, 3])
    with on_references(TIDE.TIDE(a_model(), head)) as engine:
        engine.scheduler = Recording(then=2)
        for tree in (0, 7):
            config = TIDEConfig(cache_gib=gib_of(engine, 7 + bool(tree)), max_pending=7, draft_tree=tree)
            check(texts, decoded(engine, texts, config=config))
        check(texts, decoded(engine, texts))
    assert put_back


@pytest.mark.parametrize("kind", daily(KINDS, ["greedy", "penalised"]))
def test_trees_write_the_text(kind, good, tmp_path):
    for head in (good, a_head(tmp_path)):
        for rows in (1, 3):
            text = expected(rows, kind)
            with in_rounds(model(), policy=head, then=7, draft_tree=15, max_pending=7) as engine:
                found = engine.generate(some_ids(rows), **(OPTIONS | KINDS[kind] | dict(seed=5)))
                assert torch.equal(found, text)
                assert bool(engine.last_stats.trees) == (kind in ("greedy", "sampled"))


def test_the_likeliest_way_through_a_tree_is_the_drafts_in_a_row(good, monkeypatch):
    trees, run = [], TreeRound.deep_pass

    def deep_pass(self, drafted):
        run(self, drafted)
        parents, ids, way = self.tree.verifying.nodes.parents[:, 0].tolist(), self.tree.verifying.nodes.ids[:, 0].tolist(), [0]
        while way[-1] in parents:
            way.append(parents.index(way[-1]))  # nodes are in the order of their scores
        trees.append((int(self.slots.grid.starts[0, 0]), [ids[node] for node in way[1:]]))

    monkeypatch.setattr(TreeRound, "deep_pass", deep_pass)
    with in_rounds(model(), policy=good, then=7, max_pending=7, draft_tree=15) as engine:
        text = engine.generate(some_ids(), **OPTIONS)
    assert max(len(ids) for _, ids in trees) > 3
    check_drafts(trees, text[0].tolist(), Reference(good_tensors(), NEWER))


@pytest.mark.full
@pytest.mark.invariant(7)
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU: tests/gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("flags", "tree"), [(FLAGS[1], 0), (FLAGS[2], 3)], ids=str)
def test_kernels_draft_what_references_draft(flags, tree, tmp_path, monkeypatch):
    """In Triton's interpreter, with a draft vocabulary: guesses, memories and drafts of a few rounds."""
    triton_ops, triton_exits = (pytest.importorskip(f"TIDE.kernels.triton.{name}") for name in ("ops", "exits"))
    flags, found = dict.fromkeys(flags, True), []
    some = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:48]
    head = folder_of(tmp_path, with_vocabulary(tensors_of(48, **flags), some), **flags)

    def on_kernels(engine):
        layers = described_layers(engine.adapter)
        engine.runner = TritonRunner(engine.adapter, layers, triton_ops, triton_exits, sampling)
        return engine

    carry = TreeRound.deep_pass
    monkeypatch.setattr(
        TreeRound,
        "deep_pass",
        lambda self, drafted: (carry(self, drafted), nodes.append(self.tree.verifying.nodes.ids.tolist())),
    )
    for place in (on_references, on_kernels):
        nodes: list = []
        with in_rounds(model(), policy=head, place=place, then=2, max_pending=2, draft_tree=tree) as engine:
            text = engine.generate(some_ids(1, 5), **OPTIONS | dict(max_new_tokens=4))
            (_, store), *_ = [own for own in engine.runner.pool.stores if own[0] is not None]
            found.append((text.tolist(), nodes, store.before[64:73], store.keys[-1][1, :, :8], engine.last_stats.drafted))
    ours, theirs = found
    assert ours[:2] == theirs[:2] and ours[4] == theirs[4] > 0 and bool(tree) == bool(nodes)
    for own, other in zip(ours[2:4], theirs[2:4], strict=True):
        assert own.abs().max() > 0.1
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


def test_the_models_own_modules_run_rounds_with_such_heads(good):
    text = expected(1, "greedy")
    with in_rounds(model(), policy=good, place=on_modules, **IN_A_ROW) as engine:
        assert why_on_the_host(engine, some_ids(), **OPTIONS) is None
        assert torch.equal(engine.generate(some_ids(), **OPTIONS), text)
        assert engine.last_stats.accepted > 3 and engine.scheduler.rounds
