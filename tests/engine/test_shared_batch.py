"""The batch that rows of `engine.add` share: nothing is lost or undone by other threads, errors or K/V that others have."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import pytest
import torch
from transformers import TextStreamer

import TIDE
from arrivals import Text, alone, an_engine, finish, gib_of, model
from families import build
from policies import Everyone
from runners import on_references
from TIDE.config import TIDEConfig
from TIDE.engine import batch
from TIDE.engine.batch import Batch
from TIDE.engine.host.round import HostRound
from TIDE.engine.host.stage import HostStage
from TIDE.engine.slots.round import SlotRound

HERE = [on_references, lambda engine: engine]


@pytest.mark.parametrize("place", HERE)
def test_a_row_that_is_removed_while_a_round_runs_has_ended(place, monkeypatch):
    text = Text(9, 40, "greedy")
    with place(TIDE.TIDE(model())) as engine:
        row = engine.add(text.ids, **text.options)
        for _ in range(3):
            engine.step()
        round_ = SlotRound if place is on_references else HostRound
        sample = round_.sample

        def removing(self, *given):
            if not row.removed:
                engine.remove(row)
            return sample(self, *given)

        monkeypatch.setattr(round_, "sample", removing)
        engine.step()
        written = list(row.new_tokens)
        assert row.removed and row.finished and len(written) < 40
        for _ in range(3):
            assert engine.step() == []
        assert row.new_tokens == written and row.stats.total_tokens == len(written)
        assert engine.total_stats.total_tokens == len(written)


@pytest.mark.parametrize("broken", ["planner", "stage"])
def test_a_row_that_could_not_be_taken_in_is_taken_in_later(broken, monkeypatch):
    text = Text(9, 4, "greedy")
    with TIDE.TIDE(model()) as engine:

        def raises(*_, **__):
            raise MemoryError("for now")

        row = engine.add(text.ids, **text.options)
        with monkeypatch.context() as patch:
            patch.setattr(*((engine.scheduler, "planner") if broken == "planner" else (HostStage, "__init__")), raises)
            with pytest.raises(MemoryError):
                engine.step()
        finish(engine, row)
        assert row.tokens == alone(*text[:3])


def test_rows_that_are_added_while_another_thread_makes_the_first_step_are_decoded(monkeypatch):
    text, before = Text(5, 2, "greedy"), sys.getswitchinterval()
    with TIDE.TIDE(model()) as engine:
        made = Batch.__init__

        def slowly(self, *given, **named):
            made(self, *given, **named)
            threading.Event().wait(0.002)  # time for another thread to make one too

        monkeypatch.setattr(Batch, "__init__", slowly)
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(10):
                engine._batch = None
                stepping = threading.Thread(target=engine.step)
                stepping.start()
                row = engine.add(text.ids, **text.options)
                stepping.join()
                finish(engine, row)
        finally:
            sys.setswitchinterval(before)


def test_a_row_that_ended_in_a_step_that_was_broken_off_is_reported_by_the_next():
    text = Text(9, 1, "greedy")
    with TIDE.TIDE(model(), Everyone(2)) as engine:
        first = engine.add(text.ids, **text.options)
        second = engine.add(text.ids, exits=False, **text.options)

        def interrupted(*_):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            step = Batch._step
            patch.setattr(Batch, "_step", lambda self, group: interrupted() if second in group.loop.rows else step(self, group))
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert first.finished and not second.finished
        assert first in engine.step()


def test_a_request_does_not_wait_for_kv_of_a_stream_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(batch, "PATIENCE", 0.2)
    long, other, growing = Text(150, 60, "greedy"), Text(151, 4, "greedy"), Text(30, 140, "greedy")
    with on_references(TIDE.TIDE(model())) as engine:
        engine.generate(other.ids, **other.options)
        with engine.using(TIDEConfig(cache_gib=gib_of(engine, 6))):
            stream = engine.stream(long.ids, **long.options)
            written = [next(stream)]
            for text in (other, growing):
                with pytest.raises(RuntimeError, match="belong to others, none of which was decoded"):
                    engine.generate(text.ids, **text.options)
            written += stream
            assert written == alone(*long[:3])[150:]
            assert engine.generate(growing.ids, **growing.options)[0].tolist() == alone(*growing[:3])


def test_rows_of_different_modes_that_share_blocks_wait_for_each_other():
    engine = an_engine("lens", 2)
    texts = [Text(60, 100, "greedy"), Text(61, 150, "greedy")]
    config = TIDEConfig(cache_gib=gib_of(engine, 6), mode="exact")
    configs = [config, replace(config, mode="fast", exit_threshold=1.0, max_exit_share=0.0)]
    rows = [engine.add(text.ids, config=own, **text.options) for text, own in zip(texts, configs, strict=True)]
    finish(engine, *rows)
    assert [row.error for row in rows] == [None, None]
    assert [row.tokens for row in rows] == [alone(*text[:3]) for text in texts]


def test_kv_that_rows_of_another_exit_left_are_given_up_for_rows_that_need_them():
    engine = an_engine("memory", 2)
    texts = [Text(60 + index, 30, "greedy") for index in range(6)]
    config = TIDEConfig(cache_gib=gib_of(engine, 20))
    budget = config.cache_gib * 2**30
    for exits in (True, False, True):
        rows = [engine.add(text.ids, config=config, exits=exits, **text.options) for text in texts]
        finish(engine, *rows)
        assert [row.error for row in rows] == [None] * len(rows)
        assert [row.tokens for row in rows] == [alone(*text[:3]) for text in texts]
        taken = sum(store.blocks * store.block_bytes for _, store in engine.runner.pool.stores)
        assert taken <= budget + 2 * max(store.block_bytes for _, store in engine.runner.pool.stores)


class NoNumbers(Everyone):
    """Its drafts have no numbers to choose from."""

    def predict(self, candidates, head):
        return head(candidates.states) * float("nan")


@pytest.mark.parametrize("options", [{}, dict(do_sample=True, seed=3, top_k=5)])
def test_a_draft_that_cannot_be_chosen_is_none_and_the_text_goes_on(options):
    ids, own = torch.tensor([[5, 6, 7]]), dict(max_new_tokens=6, **(options or dict(do_sample=False)))
    llama = build("llama")
    with TIDE.TIDE(llama) as engine:
        expected = engine.generate(ids, **own)
    with TIDE.TIDE(llama, NoNumbers(2)) as engine:
        assert torch.equal(engine.generate(ids, **own), expected)
        assert engine.last_stats.exited_tokens == 0


def test_what_add_stream_using_and_remove_cannot_take_is_said():
    text = Text(5, 2, "greedy")
    with TIDE.TIDE(model()) as engine:
        streamer = TextStreamer(None)
        for asked in (engine.add, engine.stream):
            with pytest.raises(ValueError, match="found a streamer"):
                asked(text.ids, streamer=streamer, **text.options)
        with pytest.raises(TypeError, match="config must be a TIDEConfig, found dict"):
            engine.add(text.ids, config={"mode": "fast"}, **text.options)
        with pytest.raises(TypeError, match="config must be a TIDEConfig, found dict"), engine.using({"mode": "fast"}):
            pass
        with pytest.raises(TypeError, match="found NoneType"):
            engine.remove(None)
        assert engine.generate(text.ids, **text.options)[0].tolist() == alone(*text[:3])
