"""Reading at once against the engine itself, which writes the given texts token by token."""

from __future__ import annotations

import pytest
import torch

import TIDE
from levels import daily
from router_files import a_file
from TIDE.evals import reading
from TIDE.evals.reading import read

TEXTS = [[5, 9, 17, 33, 2, 40, 41, 7] * 5, [3], [8, 8, 21, 4, 60, 11], [12, 50] * 9]


@pytest.fixture
def make(model, monkeypatch, tmp_path):
    """What makes an engine with exits of a kind; it is closed in the end."""
    monkeypatch.setenv("TIDE_BACKEND", "modules")  # nothing to compile
    made = []

    def engine(strategy="memory", checkpoints=(0, 2), vocabulary=None, **config):
        while made:
            made.pop().close()  # a model has one engine at a time
        path = tmp_path / "router.safetensors"
        a_file(model, strategy, checkpoints, 0.0, vocabulary).save(path)
        made.append(TIDE.TIDE(model, path, TIDE.TIDEConfig(mode="fast", **config)))
        return made[-1]

    yield engine
    for one in made:
        one.close()


def check_as_written(engine) -> int:
    """Compare texts with the engine's own logits, one by one; return how many tokens left."""
    for text, found in zip(TEXTS, read(engine, TEXTS), strict=True):
        wanted = engine(torch.tensor([text])).logits[0]
        torch.testing.assert_close(found.logits(0, len(text)), wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.logits(len(text) - 1, len(text)), wanted[-1:], rtol=1e-4, atol=1e-4)
        assert found.exited == engine.last_stats.exited_tokens
    return sum(found.exited for found in read(engine, TEXTS))


@pytest.mark.parametrize("strategy", daily(["identity", "lens", "memory"], ["memory"]))
@pytest.mark.parametrize("checkpoints", [(0,), (2,), (0, 2)])
def test_logits_are_those_of_a_text_that_is_written(make, strategy, checkpoints):
    counts = [
        check_as_written(make(strategy, checkpoints, exit_threshold=threshold, max_pending=pending))
        for threshold, pending in ((0.0, 3), (0.47, 8), (0.5, 2), (1.0, 4))
    ]
    assert counts[0] > 0 and counts[-1] == 0


@pytest.mark.parametrize("checkpoints", [(0,), (2,), (0, 2)])
@pytest.mark.parametrize(("threshold", "pending"), [(0.0, 3), (0.47, 8), (0.5, 2)])
def test_heads_that_are_not_compiled_are_read_alike(make, checkpoints, threshold, pending):
    engine = make("memory", checkpoints, exit_threshold=threshold, max_pending=pending)
    engine.policy.compiled = dict.fromkeys(engine.policy.compiled)  # as on a GPU
    check_as_written(engine)


def test_no_more_tokens_leave_than_their_share_allows(make):
    few, many = (check_as_written(make(exit_threshold=0.0, max_exit_share=share)) for share in (0.2, 0.9))
    assert 0 < few < many


def test_exits_with_a_smaller_vocabulary_are_read_alike(make):
    assert check_as_written(make(exit_threshold=0.0, vocabulary=torch.arange(3, 40))) > 0


def test_texts_are_read_without_writing_them(make, monkeypatch):
    engine = make(exit_threshold=0.0)
    monkeypatch.setattr(TIDE.TIDE, "__call__", None)
    assert [found.exited > 0 for found in read(engine, TEXTS)] == [len(text) > 1 for text in TEXTS]
    with engine.using(TIDE.TIDEConfig(mode="exact")):
        assert [found.exited for found in read(engine, TEXTS)] == [0] * len(TEXTS)


@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
def test_where_kv_are_filled_in_the_engine_itself_reads(make, strategy, monkeypatch):
    engine, asked, as_ever = make(exit_threshold=0.0, kv_cache_strategy=strategy), [], reading._read_plainly
    monkeypatch.setattr(reading, "_read_plainly", lambda *given: asked.append(1) or as_ever(*given))
    assert check_as_written(engine) > 0 and asked
