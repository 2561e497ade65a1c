"""Rows come and go on the host, and each writes what it writes alone."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arrivals import KINDS, Text, finish
from families import LAYERS, VOCAB, build
from policies import Knowing
from properties import examples
from TIDE import TIDE, TIDEConfig
from TIDE.engine.host import stage as host_stage
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.stage import HostStage
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import Row
from TIDE.engine.schedule.scheduler import Scheduler


def row_of(engine: TIDE, ids: torch.Tensor, **options) -> Row:
    """A row as `engine.generate` would make it."""
    request = engine._prepare(dict(options, input_ids=ids, pad_token_id=0), None)
    return request.rows(engine.adapter.num_layers, engine._context)[0]


def stage_of(engine: TIDE, most_rows: int) -> HostStage:
    planner = Scheduler().planner(engine.plan)
    return HostStage(engine.runner, engine.plan, engine.policy, Sampler(), planner, most_rows)


def step(stage: HostStage) -> Launched:
    """Run a round and extend the rows; those that have ended leave."""
    launched = stage.launch()
    for row, result in launched.results():
        row.extend(result)
    for row in [row for row in stage.rows if row.finished]:
        stage.leave(row)
    return launched


@contextmanager
def engine_on(backend: str, family: str, policy=None, **config) -> Iterator[TIDE]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_BACKEND", backend)
        with TIDE(tiny(family), policy, TIDEConfig(**config)) as engine:
            assert engine.runner.name == backend
            yield engine


tiny = functools.cache(build)


@functools.cache
def alone(backend: str, family: str, text: Text) -> list[int]:
    with engine_on(backend, family) as engine:
        return engine.generate(text.ids, **text.options)[0].tolist()


class KnowingSlots(Knowing):
    """Knows the texts of the rows in a stage, whatever slots they have."""

    def score(self, candidates):
        self.texts = {row.slot: self.known[row] for row in self.stage.rows}
        return super().score(candidates)


texts = st.builds(Text, st.integers(1, 40), st.sampled_from([1, 4, 9]), st.sampled_from(list(KINDS)))
SETUPS = [
    ("modules", "llama"),
    ("numba", "llama"),
    ("modules", "lfm2"),
    ("modules", "qwen3_next"),
    ("modules", "gemma4-shared"),
]


@pytest.mark.parametrize(("backend", "family"), SETUPS)
@examples(16)
@given(
    given=st.lists(texts, min_size=1, max_size=5),
    checkpoints=st.sampled_from([(), (0,), (2,), (1, 3)]),
    seed=st.integers(0, 10**6),
    chunk=st.sampled_from([5, 16, 512]),
    most_rows=st.integers(2, 4),
    random=st.randoms(use_true_random=False),
)
def test_rows_that_come_and_go_write_what_they_write_alone(backend, family, given, checkpoints, seed, chunk, most_rows, random):
    expected_texts = [alone(backend, family, text) for text in given]
    policy = KnowingSlots([], checkpoints, seed, leaves=0.7, right=0.7) if checkpoints else None
    with engine_on(backend, family, policy, max_pending=4) as engine, mock.patch.object(host_stage, "PROMPT_CHUNK", chunk):
        stage = stage_of(engine, most_rows)
        rows = [row_of(engine, text.ids, **text.options) for text in given]
        expected = dict(zip(rows, expected_texts, strict=True))
        if policy is not None:
            policy.stage, policy.known = stage, expected
        waiting = list(rows)
        while waiting or stage.rows:
            if stage.rows and random.random() < 0.2:
                put_back = random.choice(stage.rows)
                stage.leave(put_back)
                waiting.append(put_back)
            count = random.randint(not stage.rows, most_rows - len(stage.rows))
            stage.admit(waiting[:count])
            del waiting[:count]
            step(stage)
        for row in rows:
            assert row.error is None
            assert row.tokens == expected[row]
        assert not stage.joining and stage.segments.cache.rows == 0


def test_a_long_prompt_runs_between_the_rounds_of_others(llama):
    with TIDE(llama) as engine, mock.patch.object(host_stage, "PROMPT_CHUNK", 16):
        stage = stage_of(engine, 2)
        short, long = (row_of(engine, Text(n, 0, "greedy").ids, max_new_tokens=9, eos_token_id=None) for n in (4, 40))
        stage.admit([short])
        assert step(stage).is_prefill
        stage.admit([long])
        for ran in (16, 32):
            launched = step(stage)
            assert [row for row, _ in launched.results()] == [short] and not launched.is_prefill
            assert stage.segments.length(0, long) == ran
        assert [row for row, _ in step(stage).results()] == [short, long]


def test_a_long_row_that_leaves_takes_its_columns_along(monkeypatch):
    """Rows of a pass end at one column; those that are left need not stand as far out as the long one did."""
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    with TIDE(build("llama", max_position_embeddings=1024)) as engine:
        stage = stage_of(engine, 3)
        rows = [row_of(engine, Text(n, 0, "greedy").ids, max_new_tokens=9, eos_token_id=None) for n in (5, 400, 8)]
        stage.admit(rows)
        for _ in range(2):
            step(stage)
        own = stage.segments.cache.segments[0]
        assert own.end(0) == own.end(1) == own.end(2) == 401
        stage.leave(rows[1])
        step(stage)
        assert own.end(0) == own.end(2) == 10


@pytest.mark.parametrize("do_sample", [False, True])
def test_nan_logits_of_one_row_end_that_row_only(do_sample):
    """Its slot serves another row afterwards."""
    model = build("llama")
    bad = VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[bad] = torch.nan
    options = dict(max_new_tokens=9, eos_token_id=None, suppress_tokens=[bad], do_sample=do_sample)
    if do_sample:
        options["seed"] = 3
    ids = Text(9, 0, "greedy").ids % bad
    spoilt = ids.clone()
    spoilt[0, 4] = bad
    with TIDE(model) as engine:
        expected = [engine.generate(own, pad_token_id=0, **options)[0].tolist() for own in (ids, ids[:, :5])]
        first, second = (engine.add(own, **options) for own in (spoilt, ids))
        engine.step()
        assert isinstance(first.error, FloatingPointError)
        third = engine.add(ids[:, :5], **options)
        finish(engine, second, third)
        assert [second.tokens, third.tokens] == expected


class Counting:
    """Counts the tokens that the model's own layers compute."""

    def __init__(self, model) -> None:
        self.computed = 0
        model.model.layers[0].mlp.register_forward_hook(self._add)

    def _add(self, module, args, output) -> None:
        self.computed += args[0].shape[0] * args[0].shape[1]


@pytest.mark.parametrize("joins", [False, True], ids=["together", "while another row is running"])
def test_prompts_of_different_lengths_compute_little_padding(llama, monkeypatch, joins):
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    counting = Counting(llama)
    lengths = [20, 200, 198, 21, 64, 150, 66, 35, 199, 20]
    with TIDE(llama) as engine:
        stage = stage_of(engine, len(lengths) + 1)
        rows = [row_of(engine, Text(n, 0, "greedy").ids, max_new_tokens=40, eos_token_id=None) for n in lengths]
        if joins:
            stage.admit([row_of(engine, Text(8, 0, "greedy").ids, max_new_tokens=40, eos_token_id=None)])
            step(stage)
        stage.admit(rows)
        while stage.joining:
            step(stage)
        ran = sum(len(row.tokens) - 1 for row in stage.rows)  # all but the newest of each
        assert counting.computed == sum(row.stats.layers_run for row in stage.rows) / LAYERS
        assert ran <= counting.computed <= ran / 0.97
