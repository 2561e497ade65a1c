"""`engine.using`: other settings for a while, on the one engine a model can have, and then the old ones again."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from policies import Everyone
from TIDE import TIDE, TIDEConfig

OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=8)
FAST = TIDEConfig(mode="fast", kv_cache_strategy="zero_pad", max_pending=3)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(0))


def held(engine):
    return engine.config, engine.policy, engine.plan


def test_inside_the_engine_writes_what_one_made_with_these_settings_writes(llama, ids):
    with TIDE(llama, Everyone(1), FAST) as engine:
        expected = engine.generate(ids, **OPTIONS)
    full = llama.generate(ids, **OPTIONS)
    assert not torch.equal(full, expected)
    with TIDE(llama, Everyone(1)) as engine:
        before = held(engine)
        with engine.using(FAST):
            assert torch.equal(engine.generate(ids, **OPTIONS), expected)
            assert engine.config is FAST
            with engine.using(FAST, exits=False):
                assert torch.equal(engine.generate(ids, **OPTIONS), full)
                assert engine.last_stats.drafted == 0
            assert torch.equal(engine.generate(ids, **OPTIONS), expected), "one inside another ends where it began"
        assert held(engine) == before
        assert torch.equal(engine.generate(ids, **OPTIONS), full)


def test_threads_that_enter_and_leave_in_turn_leave_the_engine_as_it_was(llama):
    """A enters, B enters, A leaves, B leaves."""
    with TIDE(llama, Everyone(1)) as engine, ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        before, inside = held(engine), {}
        for thread, exits in ((first, False), (second, True)):
            inside[thread] = ExitStack()
            thread.submit(inside[thread].enter_context, engine.using(FAST, exits=exits)).result()
        assert [thread.submit(lambda: engine.policy).result() for thread in (first, second)] == [None, before[1]]
        assert held(engine) == before, "others are not concerned"
        for thread in (first, second):
            thread.submit(inside[thread].close).result()
        assert held(engine) == before
        assert [thread.submit(held, engine).result() for thread in (first, second)] == [before, before]


def test_tasks_that_enter_and_leave_in_turn_leave_the_engine_as_it_was(llama):
    with TIDE(llama, Everyone(1)) as engine:
        before = held(engine)

        async def use(config):
            with engine.using(config):
                await asyncio.sleep(0)
                assert engine.config is config
            await asyncio.sleep(0)
            assert held(engine) == before

        async def both():
            await asyncio.gather(use(FAST), use(TIDEConfig()))

        asyncio.run(both())
        assert held(engine) == before


def test_requests_of_other_threads_keep_the_settings_of_the_engine(llama, ids):
    """They begin while another thread goes in and out of other settings."""
    with TIDE(llama, Everyone(1), FAST) as engine:
        expected, over = engine.generate(ids, **OPTIONS), threading.Event()

        def go_in_and_out():
            while not over.is_set():
                with engine.using(TIDEConfig(), exits=False):
                    pass

        with ThreadPoolExecutor(1) as other:
            other.submit(go_in_and_out)
            try:
                for _ in range(20):
                    assert torch.equal(engine.generate(ids, **OPTIONS), expected)
            finally:
                over.set()


def test_an_error_inside_changes_nothing_outside(llama, ids):
    with TIDE(llama, Everyone(1)) as engine:
        before = held(engine)
        with pytest.raises(KeyboardInterrupt), engine.using(FAST):
            raise KeyboardInterrupt
        assert held(engine) == before
        with pytest.raises(ValueError, match="the prompt is empty"), engine.using(FAST):
            engine.generate(ids[:, :0])
        assert held(engine) == before


def test_a_stream_goes_on_with_the_settings_it_began_with(llama, ids):
    with TIDE(llama, Everyone(1)) as engine:
        with engine.using(FAST):
            expected = engine.generate(ids, **OPTIONS)[0, 7:].tolist()
            stream = engine.stream(ids, **OPTIONS)
        assert list(stream) == expected


def test_settings_the_model_cannot_do_are_refused_and_so_is_a_closed_engine():
    from families import build

    model = build("lfm2")
    with TIDE(model, Everyone(1)) as engine:
        before = held(engine)
        with pytest.raises(ValueError, match="keep a running state"), engine.using(FAST):
            pass
        assert held(engine) == before
    with pytest.raises(RuntimeError, match="this engine is closed"), engine.using(TIDEConfig()):
        pass
