"""Rows together on a GPU: each has the bits it has alone, whenever it joins. Skipped without one.

PYTHONPATH=src:tests python -m pytest -o addopts="" tests/gpu
"""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from test_on_gpu import with_exit

import TIDE
from arrivals import KINDS, Text, decoded, finish, gib_of, rows_put_back
from families import build
from runners import Recording
from TIDE.config import TIDEConfig
from TIDE.engine.slots.round import SlotRound
from TIDE.engine.slots.stage import SlotStage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHOWN = [kind for kind in KINDS if kind != "processed"]  # whose scores the device has


@pytest.fixture
def scores(monkeypatch):
    """The full model's best score at every position of every row, as rounds find them; without graphs, to look inside."""
    found, accept, launch, stages = defaultdict(dict), SlotRound.accept, SlotStage.launch, []

    def noting(self, drafted):
        starts, best = self.slots.grid.starts.tolist(), self.slots.chain.best.tolist()
        accept(self, drafted)
        for row in stages[-1].residents.running:
            accepted = int(self.slots.result.latest[row.slot, 0])
            for step in range(accepted + 1):
                found[tuple(row.tokens[: row.prompt]), row.sampling.seed][starts[step][row.slot]] = best[step][row.slot]

    monkeypatch.setenv("TIDE_NO_GRAPHS", "1")
    monkeypatch.setattr(SlotRound, "accept", noting)
    monkeypatch.setattr(SlotStage, "launch", lambda stage: [stages.append(stage), launch(stage)][1])
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "strategy"), [(None, None), (0, "memory"), (2, "lens")])
def test_a_row_has_the_bits_it_has_alone(dtype, depth, strategy, scores):
    """In a batch of 64, joined late, with drafts or without."""
    texts = [Text(4 + 3 * index, 24, SHOWN[index % 3], arrives=index // 20) for index in range(64)]
    check_bits(texts, dtype, depth, strategy, scores, blocks=10000)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("depth", "strategy"), [(None, None), (0, "memory"), (2, "lens")])
def test_a_row_that_was_put_back_has_the_bits_it_has_alone(dtype, depth, strategy, scores, monkeypatch):
    put_back = rows_put_back(monkeypatch)
    texts = [Text(4 + 9 * index, 150, SHOWN[index % 3], arrives=index // 8) for index in range(16)]
    check_bits(texts, dtype, depth, strategy, scores, blocks=40)
    assert put_back


def check_bits(texts, dtype, depth, strategy, scores, blocks):
    """Compare texts, and every best score of the full model, of rows together with those of each row alone, exits off."""
    model = build("llama", max_position_embeddings=1024).to("cuda", dtype)
    policy = None if depth is None else with_exit(model, depth, strategy)
    with TIDE.TIDE(model) as engine:
        engine.generate(texts[0].ids.cuda(), **texts[0].options)
        scores.clear()
        expected = [engine.generate(text.ids.cuda(), **text.options)[0].tolist() for text in texts]
        assert engine.runner.name == "triton"
        alone = {key: dict(own) for key, own in scores.items()}
    with TIDE.TIDE(model, policy) as engine:
        engine.generate(texts[0].ids.cuda(), **texts[0].options)
        for drafts in (0, 3):
            scores.clear()
            engine.scheduler = Recording(then=drafts)
            config = TIDEConfig(cache_gib=gib_of(engine, blocks), max_pending=7, draft_tree=0)
            assert decoded(engine, texts, config=config) == expected, drafts
            for key, own in alone.items():
                assert {position: scores[key][position] for position in own} == own, drafts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_graphs_write_what_they_write_alone(dtype):
    model = build("llama").to("cuda", dtype)
    policy = with_exit(model, 0, "memory")
    texts = [Text(5 + 7 * index, 30, list(KINDS)[index % 4], arrives=index % 5) for index in range(24)]
    with TIDE.TIDE(model, policy) as engine:
        expected = [engine.generate(text.ids.cuda(), **text.options)[0].tolist() for text in texts]
        for drafts in (0, 2, 3):
            engine.scheduler = Recording(then=drafts)
            assert decoded(engine, texts) == expected
            assert engine.without_graphs is None


@pytest.mark.parametrize("prompt", [700, 1300])
def test_long_prompts_run_in_long_passes(prompt):
    model = build("llama", max_position_embeddings=2048).cuda()
    text = Text(prompt, 30, "greedy")
    with TIDE.TIDE(model, with_exit(model, 0, "memory")) as engine:
        expected = model.generate(text.ids.cuda(), **text.options)
        for _ in range(3):
            assert torch.equal(engine.generate(text.ids.cuda(), **text.options), expected)
        rows = [engine.add(text.ids.cuda(), **text.options) for _ in range(3)]
        finish(engine, *rows)
        assert all(row.tokens == expected[0].tolist() for row in rows)


def test_rows_come_and_go_without_waiting_for_the_device():
    """The host reads results of rounds and waits for nothing else: not when a row joins, ends or moves to other slots."""
    model = build("llama").cuda()
    texts = [Text(5 + 7 * index, 20 + index, list(KINDS)[index % 3], arrives=index % 5) for index in range(12)]
    with TIDE.TIDE(model, with_exit(model, 0, "memory")) as engine:
        engine.scheduler = Recording(then=2)
        expected = [decoded(engine, texts) for _ in range(3)][-1]
        waiting = [engine.add(text.ids, **text.options) for text in texts]
        torch.cuda.set_sync_debug_mode("error")
        try:
            finish(engine, *waiting)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.runner.failed is None
        assert [row.tokens for row in waiting] == expected
