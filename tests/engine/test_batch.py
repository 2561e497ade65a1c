"""Rows that come and go in an engine's batch, and each writes what it writes alone.

On a device, with the references in place of kernels, K/V are in blocks: when they run out the newest row is put back and
computed again.
"""

from __future__ import annotations

import functools
import gc
import os
import resource
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import TIDE
from arrivals import (
    KINDS,
    LENGTH,
    MOST_NEW,
    Text,
    alone,
    an_engine,
    check,
    decoded,
    exits,
    finish,
    gib_of,
    model,
    rows_put_back,
)
from families import VOCAB, build
from policies import Everyone
from properties import IS_LONG, examples
from router_files import exits_of
from runners import Recording, as_it_is, on_references
from TIDE.config import TIDEConfig
from TIDE.engine.cache.kv_blocks import BLOCK
from TIDE.engine.cache.prefill_buffers import Prompts
from TIDE.engine.cache.slots import AT_ONCE
from TIDE.engine.host.round import HostRound
from TIDE.engine.loop import Loop
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.select import described_layers
from TIDE.engine.slots.residents import AHEAD
from TIDE.engine.slots.round import SlotRound
from TIDE.kernels.reference import sampling

texts_of = st.lists(
    st.builds(
        Text,
        prompt=st.sampled_from([1, 2, 9, 15, 16, 17, 40, 63, 64, 65, 100]),
        new=st.sampled_from([1, 3, 6, MOST_NEW]),
        kind=st.sampled_from(list(KINDS)),
        arrives=st.integers(0, 8),
        leaves=st.none() | st.integers(1, 9),
    ),
    min_size=1,
    max_size=6,
)
MANY = [Text(60 + index, MOST_NEW, kind, index // 2) for index, kind in enumerate([*KINDS, *KINDS])]


@pytest.mark.parametrize(("strategy", "depth"), [(None, 0), ("memory", 0), ("memory", 2), ("lens", 2)])
@examples(6)
@given(texts=texts_of, drafts=st.integers(0, 5), blocks=st.sampled_from([5, 7, 12, 100]), at_once=st.integers(1, AT_ONCE))
@example(texts=MANY, drafts=2, blocks=7, at_once=1)
@example(texts=MANY, drafts=2, blocks=7, at_once=4)
@example(texts=MANY, drafts=0, blocks=100, at_once=3)
def test_a_row_among_others_writes_what_it_writes_alone(strategy, depth, texts, drafts, blocks, at_once):
    engine = an_engine(strategy, depth)
    engine.scheduler, engine._batch = Recording(then=drafts), None
    with pytest.MonkeyPatch.context() as patch:  # as where a device would wait for the host
        patch.setattr(Loop, "_pace", lambda self, is_idle, waited: setattr(self, "at_once", at_once))
        found = decoded(engine, texts, config=TIDEConfig(cache_gib=gib_of(engine, blocks), max_pending=7))
    check(texts, found)
    for _, store in engine.runner.pool.stores:
        assert store.free == store.blocks - 1  # every block was given back


@functools.cache
def on_kernels() -> TIDE.TIDE:
    """An engine of one layer whose rounds run the kernels themselves, in Triton's interpreter."""
    own = build("llama", num_hidden_layers=1)
    engine = TIDE.TIDE(own, exits_of(own, "memory", 0))
    ops, exits_of_kernels = (pytest.importorskip(f"TIDE.kernels.triton.{name}") for name in ("ops", "exits"))
    engine.runner = TritonRunner(engine.adapter, described_layers(engine.adapter), ops, exits_of_kernels, sampling)
    engine.generate(torch.tensor([[5, 6]]), max_new_tokens=1, do_sample=False, **LENGTH)
    return engine


@pytest.mark.full
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run on the GPU: tests/gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@settings(max_examples=200 if IS_LONG else 2)
@given(
    texts=st.lists(
        st.builds(
            Text,
            prompt=st.sampled_from([1, 9, 63]),
            new=st.integers(1, 3),
            kind=st.sampled_from(["greedy", "sampled"]),
            arrives=st.integers(0, 1),
            leaves=st.none() | st.integers(1, 2),
        ),
        min_size=2,
        max_size=2,
    ),
    drafts=st.integers(0, 2),
    blocks=st.sampled_from([5, 100]),
)
def test_rows_on_kernels_write_what_they_write_alone(texts, drafts, blocks):
    engine = on_kernels()
    engine.scheduler, engine._batch = Recording(then=drafts), None
    found = decoded(engine, texts, config=TIDEConfig(cache_gib=gib_of(engine, blocks), max_pending=3, draft_tree=0))
    with on_references(TIDE.TIDE(build("llama", num_hidden_layers=1))) as references:
        for text, own in zip(texts, found, strict=True):
            expected = references.generate(text.ids, **text.options)[0].tolist()
            assert own == expected if text.leaves is None else own == expected[: len(own)]


@pytest.mark.parametrize(("strategy", "at_once"), [(None, 1), ("memory", AT_ONCE)])
def test_rows_are_put_back_when_blocks_run_out(strategy, at_once, monkeypatch):
    put_back = rows_put_back(monkeypatch)
    monkeypatch.setattr(Loop, "_pace", lambda self, is_idle, waited: setattr(self, "at_once", at_once))
    texts = [Text(10, 90, "greedy"), Text(11, 90, "sampled"), Text(12, 90, "penalised")]
    with on_references(TIDE.TIDE(model(), None if strategy is None else exits(strategy, 0))) as engine:
        engine.scheduler = Recording(then=2)
        check(texts, decoded(engine, texts, config=TIDEConfig(cache_gib=gib_of(engine, 7), max_pending=7, draft_tree=0)))
    assert put_back


FEW, MANY_ROWS = ((9, 0), (30, 1), (64, 1), (17, 4)), [(5 + index, 0) for index in range(33)]


# a round has no room for nine tokens of each of 33 rows; nobody drafts less for that
@pytest.mark.parametrize(
    ("kind", "rows", "most", "share"), [*((kind, FEW, 3, 0.6) for kind in KINDS), ("greedy", MANY_ROWS, 8, 1.0)]
)
def test_in_mode_fast_a_row_leaves_where_it_leaves_alone(kind, rows, most, share):
    config = TIDEConfig(mode="fast", exit_threshold=0.0, max_pending=most, max_exit_share=share)
    texts = [Text(prompt, 12, kind, arrives) for prompt, arrives in rows]
    with on_references(TIDE.TIDE(model(), exits("memory", 2), config)) as engine:
        expected = [engine.generate(text.ids, **text.options)[0].tolist() for text in texts]
        assert engine.last_stats.exited_tokens
        assert decoded(engine, texts) == expected


@pytest.mark.invariant(9)
def test_in_mode_fast_a_text_does_not_depend_on_who_had_its_blocks_before():
    fast = TIDEConfig(mode="fast", exit_threshold=0.0, max_pending=3, max_exit_share=0.8)
    texts = [Text(prompt, 12, "greedy") for prompt in (2, 3, 5, 9)]

    def decided(engine, text):
        row = engine.add(text.ids, **text.options, config=replace(fast, cache_gib=gib_of(engine, 6)))
        finish(engine, row)
        return row.tokens, [own.score or 0.0 for own in row.decided]

    expected = []
    for text in texts:
        with on_references(TIDE.TIDE(model(), exits("memory", 0))) as engine:
            expected.append(decided(engine, text))
    with on_references(TIDE.TIDE(model(), exits("memory", 0))) as engine:
        for before in (200, 150, 100):
            decided(engine, Text(before, 12, "greedy"))
            for text, (tokens, scores) in zip(texts, expected, strict=True):
                found = decided(engine, text)
                assert found[0] == tokens
                assert found[1] == pytest.approx(scores, abs=1e-5)


def test_modes_and_thresholds_are_those_of_each_row():
    fast = TIDEConfig(mode="fast", exit_threshold=0.0, max_pending=3, max_exit_share=0.6)
    text = Text(20, 14, "greedy")
    with on_references(TIDE.TIDE(model(), exits("memory", 2))) as engine:
        with engine.using(fast):
            expected = engine.generate(text.ids, **text.options)[0].tolist()
        rows = [
            engine.add(text.ids, **text.options),
            engine.add(text.ids, config=fast, **text.options),
            engine.add(text.ids, exits=False, **text.options),
        ]
        finish(engine, *rows)
    assert rows[0].tokens == rows[2].tokens == alone(*text[:3])
    assert rows[1].tokens == expected and rows[1].stats.exited_tokens and not rows[2].stats.drafted


@pytest.mark.parametrize("place", [on_references, as_it_is])
def test_rows_are_reported_when_they_get_tokens_or_end(place):
    with place(TIDE.TIDE(model())) as engine:
        assert engine.step() == []
        first = engine.add(Text(9, 3, "greedy").ids, max_new_tokens=3, do_sample=False, **LENGTH)
        changed = [engine.step() for _ in range(12)]
        assert [first] in changed and changed[-1] == [] and first.finished
        assert len(first.new_tokens) == 3 == first.stats.total_tokens == engine.total_stats.total_tokens


def raises(ids, scores, **kwargs):
    if ids.shape[1] > 20:
        raise KeyError("the user's own")
    return scores


def spoils(value: float):
    return lambda ids, scores: scores * 0 + value if ids.shape[1] > 20 else scores


TROUBLES = {
    "a processor raises": (dict(logits_processor=[raises]), KeyError),
    "a processor gives NaN": (dict(logits_processor=[spoils(float("nan"))]), ValueError),
    "a processor forbids all": (dict(logits_processor=[spoils(float("-inf"))]), ValueError),
    "kernels forbid all": (dict(suppress_tokens=list(range(VOCAB))), ValueError),
    "a criterion raises": (dict(stopping_criteria=[lambda ids, scores, **_: raises(ids, False)]), KeyError),
}


@pytest.mark.parametrize(
    ("place", "policy", "mode"),
    [(on_references, None, "exact"), (as_it_is, Everyone(1), "exact"), (as_it_is, Everyone(1), "fast")],
)
@pytest.mark.parametrize("trouble", TROUBLES)
def test_an_error_in_one_row_is_that_rows_alone(trouble, place, policy, mode):
    (options, error), text = TROUBLES[trouble], Text(16, 14, "greedy")
    with place(TIDE.TIDE(model(), policy, TIDEConfig(mode=mode))) as engine:
        expected = engine.generate(text.ids, **text.options)[0].tolist()
        rows = [engine.add(text.ids, **(text.options | own)) for own in ({}, options, {})]
        finish(engine, *rows)
        assert type(rows[1].error) is error and rows[1].tokens == expected[: len(rows[1].tokens)]
        assert rows[0].tokens == rows[2].tokens == expected
        with pytest.raises(error):
            engine.generate(text.ids, **(text.options | options))
        assert engine.generate(text.ids, **text.options)[0].tolist() == expected


def test_a_prompt_that_can_never_fit_is_refused_and_others_go_on():
    long, short = Text(400, 4, "greedy"), Text(9, 4, "greedy")
    with on_references(TIDE.TIDE(model())) as engine:
        config = TIDEConfig(cache_gib=gib_of(engine, 4))
        engine.generate(short.ids, **short.options)  # so that the runner is checked
        rows = [engine.add(text.ids, config=config, **text.options) for text in (long, short)]
        finish(engine, *rows)
        assert isinstance(rows[0].error, ValueError) and "cache_gib" in str(rows[0].error)
        assert rows[1].tokens == alone(*short[:3])
        with engine.using(config), pytest.raises(ValueError, match="needs more K/V"):
            engine.generate(long.ids, **long.options)


@pytest.mark.parametrize("place", [on_references, as_it_is])
def test_rows_are_removed_once(place):
    text = Text(9, 40, "greedy")
    with place(TIDE.TIDE(model())) as engine:
        row, other = (engine.add(text.ids, **text.options) for _ in range(2))
        for _ in range(6):
            engine.step()
        engine.remove(row)
        with pytest.raises(ValueError, match="removed before"):
            engine.remove(row)
        written = list(row.tokens)
        finish(engine, other)
        assert row.tokens == written and other.tokens == alone(*text[:3])
        engine.remove(other)  # it has ended: nothing happens
        assert not other.removed
    with pytest.raises(RuntimeError, match="this engine is closed"):
        engine.add(text.ids, **text.options)


@pytest.mark.parametrize("place", [on_references, as_it_is])
@pytest.mark.parametrize("at", [1, 4])
def test_a_step_that_is_broken_off_loses_nothing(place, at, monkeypatch):
    text = Text(20, 14, "sampled")
    with place(TIDE.TIDE(model())) as engine:
        rows = [engine.add(text.ids, **text.options) for _ in range(2)]
        for _ in range(at):
            engine.step()

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(HostRound, "sample", interrupted)
            patch.setattr(SlotRound, "sample", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        if place is on_references:
            assert not engine.runner.graphs.of and engine.cache_use[0] == 0.0  # nothing half done is kept
        finish(engine, *rows)
        assert [row.tokens for row in rows] == [alone(*text[:3])] * 2


def test_threads_hand_rows_over():
    """One thread decodes, others add and remove."""
    texts = [Text(5 + index, 6, kind) for index, kind in enumerate([*KINDS] * 3)]
    rows, done = {}, threading.Event()

    def ask(engine, own):
        for text in own:
            rows[text] = engine.add(text.ids, **text.options)
            engine.remove(engine.add(text.ids, **text.options))

    with on_references(TIDE.TIDE(model())) as engine:

        def serve():
            while not done.is_set() or engine._batch.rows:
                engine.step()

        engine.step()
        server = threading.Thread(target=serve)
        clients = [threading.Thread(target=ask, args=(engine, texts[number::3])) for number in range(3)]
        for thread in (server, *clients):
            thread.start()
        for thread in clients:
            thread.join(600)
        done.set()
        server.join(600)
    assert not server.is_alive() and len(rows) == len(texts)
    check(texts, [rows[text].tokens for text in texts])


def resident_mib() -> float:
    """The process's memory, where the system tells."""
    found = Path("/proc/self/statm")
    return int(found.read_text().split()[1]) * resource.getpagesize() / 2**20 if found.exists() else 0.0


@pytest.mark.full
@pytest.mark.long
def test_many_requests_through_sixteen_slots_and_few_blocks():
    """No row is lost, texts are right, memory stays, and what rows had is free again; 2,000 requests with TIDE_LONG=1."""
    generator, count = torch.Generator().manual_seed(0), 2000 if IS_LONG else 60
    drawn = [torch.randint(0, most, (count,), generator=generator).tolist() for most in (90, 9, 4, count // 2)]
    texts = [Text(prompt + 1, new + 1, list(KINDS)[kind], step) for prompt, new, kind, step in zip(*drawn, strict=True)]
    with on_references(TIDE.TIDE(model())) as engine:
        engine.runner.most_rows = 16
        config, in_use = TIDEConfig(cache_gib=gib_of(engine, 20)), []
        for half in (texts[: count // 2], texts[count // 2 :]):
            first = min(text.arrives for text in half)
            half = [text._replace(arrives=text.arrives - first) for text in half]
            check(half, decoded(engine, half, config=config))
            gc.collect()
            in_use.append(resident_mib())
        assert in_use[1] - in_use[0] < 32, in_use
        store = engine.runner.pool.store(None)
        assert store.blocks <= 20 and store.free == store.blocks - 1
        free = [slots.rows for slots in engine.runner.pool.free_slots]
        assert len(free) == len(set(free))


def test_slots_that_long_texts_had_stand_at_their_beginning_again():
    """Attention of a round plans for the texts that are there, and would wait for chunks of one that is not."""
    with on_references(TIDE.TIDE(build("llama", max_position_embeddings=1024))) as engine:
        engine.generate(Text(3, 4, "greedy").ids, **Text(3, 4, "greedy").options)
        for lengths in ([500] * 4, [20] * 3):
            rows = [engine.add(Text(length, 4, "greedy").ids, **Text(length, 4, "greedy").options) for length in lengths]
            engine.step()
            slots = engine._batch._groups[0].stage.residents.slots
            free = set(range(slots.rows)) - {row.slot for row in rows}
            assert not any(slots.grid.starts[0, place] for place in free)
            finish(engine, *rows)


def test_a_row_that_fails_while_it_joins_is_decoded_once(monkeypatch):
    with on_references(TIDE.TIDE(model())) as engine:
        engine.generate(Text(3, 4, "greedy").ids, **Text(3, 4, "greedy").options)
        text, grow = Text(1500, 4, "greedy"), engine.runner.pool.grow
        row = engine.add(text.ids, **text.options)

        def interrupted(*given):
            raise KeyboardInterrupt

        monkeypatch.setattr(engine.runner.pool, "grow", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        monkeypatch.setattr(engine.runner.pool, "grow", grow)
        assert engine._batch.rows == [row]
        finish(engine, row)
        store = engine.runner.pool.store(None)
        assert len(row.new_tokens) == 4 and store.free == store.blocks - 1


@pytest.mark.parametrize("lengths", [(5, 50), (30, 300, 90, 200, 31, 299, 64, 128), (1, 10)])
def test_prompts_that_differ_tenfold_have_hardly_any_padding(lengths, monkeypatch):
    computed, write = [], Prompts.write

    def noting(self, given, blocks):
        found = write(self, given, blocks)
        computed.append(len(found.ids))
        return found

    monkeypatch.setattr(Prompts, "write", noting)
    with on_references(TIDE.TIDE(model())) as engine:
        engine.generate(Text(3, 4, "greedy").ids, **Text(3, 4, "greedy").options)
        computed.clear()
        for length in lengths:
            engine.add(Text(length, 2, "greedy").ids, **Text(length, 2, "greedy").options)
        while engine._batch.rows:
            engine.step()
    assert sum(computed) - sum(length - 1 for length in lengths) < 16


def test_the_use_of_blocks_is_stated():
    engine = an_engine(None, 0)
    engine._batch = None
    text = Text(100, 9, "greedy")
    row = engine.add(text.ids, **text.options)
    engine.step()
    size = gib_of(engine, 1)
    used, there = engine.cache_use
    assert used == pytest.approx(size * -(-(100 + AHEAD) // BLOCK)) and there == pytest.approx(
        size * engine.runner.pool.store(None).blocks
    )
    finish(engine, row)
    engine.step()
    assert engine.cache_use == (0.0, there)


@pytest.mark.parametrize("other", [{"exits": False}, {"config": dict(exit_threshold=0.7)}])
def test_a_row_that_waits_for_blocks_is_not_overtaken_by_rows_of_other_settings(other):
    """Rows of another threshold, or without exits, are decoded apart, and share K/V with them."""
    with on_references(TIDE.TIDE(model(), exits("memory", 0))) as engine:
        engine.generate(Text(3, 4, "greedy").ids, **Text(3, 4, "greedy").options)
        tight = dict(cache_gib=gib_of(engine, 12), max_pending=2, draft_tree=0)
        short, long = Text(20, 30, "greedy"), Text(200, 3, "greedy")

        def another():
            return engine.add(short.ids, **short.options, config=TIDEConfig(**tight))

        live = [another() for _ in range(8)]
        for _ in range(3):
            engine.step()
        own = TIDEConfig(**tight, **other.get("config", {}))
        late = engine.add(long.ids, **long.options, config=own, exits=other.get("exits", True))
        for _ in range(150):
            engine.step()
            live = [another() if row.finished else row for row in live]
        assert late.finished and late.tokens == alone(*long[:3])
        assert any(row.new_tokens for row in live)  # and they go on behind it


def test_threads_that_step_count_every_token_once():
    texts = [Text(5 + index, 20, "greedy") for index in range(4)]
    with TIDE.TIDE(model()) as engine:
        rows = [engine.add(text.ids, **text.options) for text in texts]

        def work():
            finish(engine, *rows)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.total_stats.total_tokens == sum(len(row.new_tokens) for row in rows) == 80


@pytest.mark.parametrize("place", [on_references, as_it_is])
def test_closing_gives_back_what_open_rows_have(place):
    engine = place(TIDE.TIDE(model()))
    text = Text(90, 50, "greedy")
    engine.generate(text.ids, **{**text.options, "max_new_tokens": 2})
    row = engine.add(text.ids, **text.options)
    for _ in range(3):
        engine.step()
    stores = engine.runner.pool.stores if place is on_references else ()
    engine.close()
    assert isinstance(row.error, RuntimeError) and "closed before this text had ended" in str(row.error)
    assert not engine._batch._groups and all(store.free == store.blocks - 1 for _, store in stores)


def test_an_engine_may_be_closed_by_a_row():
    """A criterion runs in the middle of a step."""
    engine = on_references(TIDE.TIDE(model()))
    text = Text(9, 20, "greedy")
    row = engine.add(text.ids, **text.options, stopping_criteria=[lambda ids, scores: engine.close() or False])
    finish(engine, row)
    assert isinstance(row.error, RuntimeError) and not engine._batch._groups
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()
