"""Texts that begin alike share K/V, and nothing of that shows in what is written."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import TIDE
from arrivals import finish
from families import VOCAB, build
from router_files import exits_of
from runners import Recording, on_references
from TIDE.config import TIDEConfig
from TIDE.engine.cache.kv_blocks import BLOCK
from TIDE.engine.cache.prefix_tree import PrefixTree

pytestmark = pytest.mark.invariant(6)

OPTIONS = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)


@functools.cache
def a_model():
    return build("llama", num_hidden_layers=2, max_position_embeddings=1024)


def text(*parts: tuple[int, int]) -> torch.Tensor:
    """(1, tokens): pieces of so many tokens, made of a number each."""
    ids = [torch.randint(3, VOCAB, (size,), generator=torch.Generator().manual_seed(seed)) for seed, size in parts]
    return torch.cat(ids)[None]


@functools.cache
def expected(*parts: tuple[int, int]) -> list[int]:
    return a_model().generate(text(*parts), **OPTIONS)[0].tolist()


def opened(strategy: str | None = None, drafts: int = 0, **settings) -> TIDE.TIDE:
    """An engine that has had its first request, so that what follows runs in whole rounds."""
    model = a_model.__wrapped__()
    policy = None if strategy is None else exits_of(model, strategy, 0)
    engine = on_references(TIDE.TIDE(model, policy, TIDEConfig(**settings)))
    engine.scheduler = Recording(then=drafts)
    engine.generate(text((0, 5)), **OPTIONS)
    return engine


def answered(engine: TIDE.TIDE, *parts: tuple[int, int], **options) -> int:
    """Check an answer; return how many tokens of the prompt had to run."""
    assert engine.generate(text(*parts), **(OPTIONS | options))[0].tolist() == expected(*parts)
    return prompt_run(engine.last_rows[0])


def prompt_run(row) -> int:
    """The tokens of a prompt that ran. Its newest one runs in a round."""
    return row.prompt - 1 - row.stats.reused_tokens


@pytest.mark.parametrize(("strategy", "drafts"), [(None, 0), ("memory", 2)])
def test_what_was_there_does_not_run_again(strategy, drafts):
    with opened(strategy, drafts) as engine:
        work = []
        for parts, runs in [
            (((1, 200),), 199),
            (((1, 200),), 199 - 3 * BLOCK),  # three whole blocks were there
            (((1, 200), (2, 50)), 249 - 3 * BLOCK),
            (((1, 130),), 129 - 2 * BLOCK),
            (((1, 40), (3, 100)), 139),  # less than a block is alike
        ]:
            assert answered(engine, *parts) == runs
            work.append(engine.last_stats.layers_run)
        assert work[1] <= work[0] - 2 * (3 * BLOCK - 1)  # measured, not claimed


def test_what_was_written_is_there_too():
    """A conversation: each turn is the text so far and more, and only what is new runs, to whole blocks."""
    with opened() as engine:
        ids = text((4, 60))
        for turn in range(10):
            options = OPTIONS | {"max_new_tokens": 30, "attention_mask": torch.ones_like(ids)}
            whole = engine.generate(ids, **options)
            row = engine.last_rows[0]
            assert torch.equal(whole, a_model().generate(ids, **options))
            assert row.stats.reused_tokens == (len(ids[0]) - 26) // BLOCK * BLOCK * (turn > 0)
            ids = torch.cat([whole, text((5 + turn, 25))], 1)


def test_several_answers_to_one_prompt_run_it_once():
    with opened() as engine:
        ids, options = text((1, 500)), OPTIONS | dict(do_sample=True, temperature=1.5, num_return_sequences=8, seed=3)
        found = engine.generate(ids, **options)
        rows = engine.last_rows
        assert len({tuple(own) for own in found.tolist()}) > 1
        assert sum(map(prompt_run, rows)) == 499 + 7 * (499 - 7 * BLOCK)
        for row, own in zip(rows, found, strict=True):
            alone = engine.generate(ids, **(options | dict(num_return_sequences=1, seed=row.sampling.seed)))
            assert torch.equal(alone[0], own)


def test_a_row_that_joins_later_waits_for_what_another_is_making():
    with opened() as engine:
        first = engine.add(text((1, 300)), **OPTIONS)
        second = engine.add(text((1, 300), (2, 9)), **OPTIONS)
        finish(engine, first, second)
        assert (first.tokens, second.tokens) == (expected((1, 300)), expected((1, 300), (2, 9)))
        assert (prompt_run(first), prompt_run(second)) == (299, 308 - 4 * BLOCK)


def test_texts_of_another_salt_are_not_found():
    with opened() as engine:
        assert answered(engine, (1, 200), cache_salt="a") == 199
        assert answered(engine, (1, 200), cache_salt="b") == 199
        assert answered(engine, (1, 200)) == 199
        assert answered(engine, (1, 200), cache_salt="b") == 199 - 3 * BLOCK
        with pytest.raises(ValueError, match="cache_salt must be a string, found 3"):
            engine.generate(text((1, 9)), cache_salt=3, **OPTIONS)


@pytest.mark.parametrize("change", ["in place", "exchanged"])
def test_other_weights_make_other_kv(change):
    model = build("llama", num_hidden_layers=2, max_position_embeddings=1024)
    ids, layer = text((1, 200)), model.model.layers[0].self_attn
    with TIDE.TIDE(model) as engine:
        for _ in range(3):
            engine.runner = on_references(engine).runner if engine.runner.name != "triton" else engine.runner
            engine.generate(ids, **OPTIONS)
        assert engine.last_stats.reused_tokens == 3 * BLOCK
        with torch.no_grad():
            if change == "in place":
                layer.v_proj.weight.mul_(-1)
            else:
                layer.v_proj.weight = torch.nn.Parameter(-layer.v_proj.weight)
        if change == "exchanged":
            on_references(engine)
        assert torch.equal(engine.generate(ids, **OPTIONS), model.generate(ids, **OPTIONS))
        assert engine.last_stats.reused_tokens == 0


def test_in_mode_fast_prompts_are_shared_and_what_exits_wrote_is_not():
    with opened("memory", mode="fast", max_pending=3) as engine:
        ids, options = text((1, 130)), OPTIONS | {"max_new_tokens": 80}
        first = engine.generate(ids, **options)
        assert torch.equal(engine.generate(ids, **options), first)
        assert engine.last_stats.reused_tokens == 2 * BLOCK
        engine.generate(torch.cat([first, first[:, :5]], 1), **options)
        assert engine.last_stats.reused_tokens == 2 * BLOCK


def test_a_round_that_fails_leaves_nothing_to_find(monkeypatch):
    with opened() as engine:
        row = engine.add(text((1, 200)), **OPTIONS)
        monkeypatch.setattr(engine.runner.lm_head_on_slots, "choose", lambda *given: 1 / 0)
        engine.step()
        monkeypatch.undo()
        finish(engine, row)
        assert row.tokens == expected((1, 200))
        store = engine.runner.pool.store(None)
        assert store.free == store.blocks - 1 and not store.prefixes.idle


def test_blocks_are_forgotten_in_the_order_of_their_last_use():
    with opened() as engine:
        size = engine.runner.pool.store(None).block_bytes / 2**30
    with opened(cache_gib=9 * size) as engine:  # a text of 200 tokens takes four, and three can be kept
        for seed, runs in [(1, 199), (2, 199), (1, 199 - 3 * BLOCK), (3, 199), (1, 199 - 3 * BLOCK), (2, 199 - BLOCK)]:
            assert answered(engine, (seed, 200)) == runs, seed
        assert engine.runner.pool.store(None).blocks == 9


def all_blocks_are_there(engine) -> bool:
    store = engine.runner.pool.stores[-1][1]
    return store.free == store.blocks - 1 and len(set(store._free)) == len(store._free)


@pytest.mark.parametrize("when", ["before", "behind"])
def test_an_interrupt_while_blocks_are_given_back_gives_none_back_twice(when, monkeypatch):
    release = PrefixTree.release

    def interrupted(self, held):
        if when == "behind":
            release(self, held)
        raise KeyboardInterrupt

    with opened() as engine:
        for new in (3, 30):  # the second is there when the first one leaves
            engine.add(text((1, 200), (new, 20)), **(OPTIONS | {"max_new_tokens": new}))
        with monkeypatch.context() as patch:
            patch.setattr(PrefixTree, "release", interrupted)
            with pytest.raises(KeyboardInterrupt):
                [engine.step() for _ in range(20)]
        free = engine.runner.pool.stores[-1][1]._free
        assert len(set(free)) == len(free)
        for seed in range(3):
            answered(engine, (seed, 150))


def test_rows_that_are_alike_from_their_first_tokens_on_and_end_one_after_the_other():
    """None of them has a whole block when the first one ends."""
    with opened() as engine:
        new = (3, 60, 90)
        rows = [engine.add(text((9, 10 + 30 * (own > 3))), **(OPTIONS | {"max_new_tokens": own})) for own in new]
        finish(engine, *rows)
        assert all_blocks_are_there(engine)
        assert rows[1].tokens == rows[2].tokens[: len(rows[1].tokens)]
        for seed in range(4):
            answered(engine, (seed, 150))


def test_rows_that_began_before_everything_was_forgotten_share_nothing():
    with opened() as engine:
        store = engine.runner.pool.store(None)
        answered(engine, (1, 200))
        rows = [engine.add(text((1, 200), (5, 70 + 9 * place)), **(OPTIONS | {"max_new_tokens": 9})) for place in range(3)]
        engine.step()
        store.forget_prefixes()
        finish(engine, *rows)
        assert all_blocks_are_there(engine) and not store.prefixes.idle
        assert answered(engine, (1, 200)) == 199
        assert answered(engine, (1, 200)) == 199 - 3 * BLOCK


def test_salts_that_nobody_uses_are_forgotten():
    with opened() as engine:
        for number in range(5):
            answered(engine, (1, 20), cache_salt=str(number))
        assert not engine.runner.pool.store(None).prefixes._roots


pieces = st.lists(st.tuples(st.integers(1, 3), st.sampled_from([64, 64, 64, 30, 1])), min_size=1, max_size=4)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(pieces, st.integers(0, 3), st.sampled_from([None, "a"])), min_size=1, max_size=8),
    st.sampled_from([14, 30, 1000]),
    st.sampled_from([None, "memory"]),
)
def test_any_texts_in_any_order_with_any_budget(asked, blocks, strategy):
    """Prefix trees, evictions, rows that are put back: the texts are those of the model, and no block is lost."""
    engine = shared_engine(strategy, blocks)
    store, rows, step = engine.runner.pool.stores[-1][1], [], 0
    for parts, wait, salt in asked:
        for _ in range(wait):
            engine.step()
        rows.append((parts, engine.add(text(*parts), cache_salt=salt, **OPTIONS)))
    while not all(row.finished for _, row in rows):
        engine.step()
        step += 1
        assert step < 1000, "rows do not get on"
    for parts, row in rows:
        assert row.error is None and row.tokens == expected(*parts)
    assert store.free == store.blocks - 1


@functools.cache
def shared_engine(strategy, blocks):
    drafts = 2 if strategy else 0
    with opened(strategy, drafts) as engine:
        size = engine.runner.pool.stores[-1][1].block_bytes / 2**30
    return opened(strategy, drafts, cache_gib=blocks * size)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 1), max_size=4), st.booleans()), max_size=30))
def test_blocks_are_held_found_and_forgotten(steps):
    """Against a plain model: a set of texts by salt. Every block is held, idle or given back, and never twice."""
    prefixes, known, rows, number, gone = PrefixTree(1), set(), [], 0, []
    for salt, tokens, leaves in steps:
        held = prefixes.begin(salt)
        for place in range(len(tokens)):
            beginning = (salt, *tokens[: place + 1])
            found = prefixes.hold_next(held, tokens)
            assert (found is not None) == (beginning in known)
            if found is None:
                prefixes.add(held, tokens, number)
                number += 1
                known.add(beginning)
        assert len({node.block for node in held.nodes}) == len(tokens)
        rows.append((salt, tokens, held))
        if leaves:
            _, _, first = rows.pop(len(rows) // 2)
            assert prefixes.release(first) == []
        while prefixes.idle > 3:
            gone.append(prefixes.evict())
            known = {(own[0], *own[1:]) for own in known if _is_there(prefixes, own)}
    in_use = {node.block for _, _, held in rows for node in held.nodes}
    assert len(set(gone)) == len(gone) and not in_use & set(gone)
    assert len(in_use) + prefixes.idle + len(gone) == number
    dropped = prefixes.drop()
    for _, tokens, held in rows:
        assert prefixes.hold_next(held, [*tokens, 0]) is None, "what was forgotten is not found"
        dropped += prefixes.release(held)
    assert sorted(dropped + gone) == list(range(number))


def _is_there(prefixes, beginning) -> bool:
    salt, *tokens = beginning
    branches = prefixes._roots[salt].branches if salt in prefixes._roots else {}
    for token in tokens:
        if (token,) not in branches:
            return False
        branches = branches[token,].children
    return True
