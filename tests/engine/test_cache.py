"""K/V after catch-up are those of a full run; rolling back is changing a length; rows of different
lengths line up; static shapes stay."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DynamicCache

from decoding import decode
from families import build
from policies import Knowing
from properties import examples
from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.probe import Store
from TIDE.engine.cache.segment_cache import SegmentCache, View


@pytest.mark.invariant(2)
def test_kv_after_catch_up_are_those_of_a_full_run(any_model):
    ids = torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(0))
    expected = any_model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    policy = Knowing(expected.tolist(), (1, 2, 3), seed=2, leaves=0.7, right=0.7)
    stage = decode(any_model, policy, ids, 8, compaction_threshold=1.0)
    assert [row.tokens for row in stage.rows] == expected.tolist()
    assert any(row.stats.accepted for row in stage.rows)
    for row in range(2):
        text = expected[row : row + 1]
        whole = DynamicCache()  # without the config: windows keep all their columns, as ours do
        layers = stage.runner.adapter.stores
        if Store.STATE in layers:
            whole = DynamicCache(config=any_model.config)
        any_model(text, past_key_values=whole, use_cache=True)
        for layer, store in enumerate(layers):
            if store is not Store.KV:
                continue
            keys, values = stage.segments.cache.kv(layer, row)
            length = keys.shape[1]
            assert length >= text.shape[1] - 2 - stage.plan.max_pending
            torch.testing.assert_close(keys, whole.layers[layer].keys[0, :, :length], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(values, whole.layers[layer].values[0, :, :length], atol=1e-4, rtol=1e-4)


def write(cache: SegmentCache, segment: int, rows: list[int], counts: list[int], stamp: dict) -> View:
    """A pass in which every token's key is its (row, position)."""
    with cache.open(segment, rows, counts) as view:
        width = max(counts)
        lengths = [cache.segments[segment].length[row] for row in rows]
        keys = torch.tensor(
            [[[[row, length + i] for i in range(width)]] for row, length in zip(rows, lengths, strict=True)]
        ).float()
        for layer in cache.segments[segment].layers:
            stamp[layer] = cache.update(keys, -keys, layer)
        stamp["mask"] = cache.mask()
    return view


@examples(200)
@given(data=st.data())
def test_rows_line_up_whatever_runs_and_rolls_back(data):
    """Against a plain list of lengths: every row's columns hold its own tokens in order, and only those are unmasked."""
    rows = data.draw(st.integers(1, 4))
    cache = SegmentCache(rows, [range(0, 2), range(2, 3)], [Store.KV] * 3, capacity=data.draw(st.integers(1, 12)))
    lengths = [[0] * rows, [0] * rows]
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            row = data.draw(st.integers(0, rows - 1))
            target = data.draw(st.integers(0, lengths[0][row]))
            cache.rollback(row, target)
            for own in lengths:
                own[row] = min(own[row], target)
            continue
        segment = data.draw(st.integers(0, 1))
        chosen = sorted(data.draw(st.sets(st.integers(0, rows - 1), min_size=1)))
        room = [lengths[0][row] - lengths[1][row] if segment else 5 for row in chosen]
        work = [(row, data.draw(st.integers(1, most))) for row, most in zip(chosen, room, strict=True) if most > 0]
        if not work:
            continue
        names, counts = [row for row, _ in work], [count for _, count in work]
        stamp: dict = {}
        view = write(cache, segment, names, counts, stamp)
        keys, values = stamp[2 * segment]
        assert keys.shape[2] == view.stop
        assert torch.equal(values, -keys)
        for index, (row, count) in enumerate(work):
            lengths[segment][row] += count
            visible = keys[index, 0, : view.start + count]
            if stamp["mask"] is not None:
                visible = visible[stamp["mask"][index, : view.start + count].bool()]
            assert visible.tolist() == [[row, position] for position in range(lengths[segment][row])]
        assert [own.length for own in cache.segments] == lengths
        for row in range(rows):
            assert (
                cache.kv(2 * segment, row)[0][0].tolist() == [[row, i] for i in range(lengths[segment][row])]
                or not lengths[segment][row]
            )


def test_a_failed_pass_changes_no_length():
    cache = SegmentCache(2, [range(1)], [Store.KV])
    write(cache, 0, [0, 1], [3, 2], {})
    with pytest.raises(RuntimeError, match="boom"), cache.open(0, [0, 1], [1, 1]):
        raise RuntimeError("boom")
    assert cache.segments[0].length == [3, 2]
    write(cache, 0, [0, 1], [1, 1], {})
    assert cache.segments[0].length == [4, 3]


def test_static_shapes_do_not_change_and_give_the_same_logits(each_kind):
    if each_kind.config.model_type == "gpt_neo":
        pytest.skip("its attention counts the columns it is handed instead of using the mask")
    ids = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    expected = each_kind(ids).logits
    depth = each_kind.config.num_hidden_layers
    adapter = ModelAdapter(each_kind)
    cache = SegmentCache(2, [range(depth)], adapter.stores, capacity=24, static=True)
    columns = set()
    update = cache.update

    def seen(*args, **kwargs):
        answer = update(*args, **kwargs)
        columns.update(states.shape[2] for states in answer)
        return answer

    cache.update = seen
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        with cache.open(0, [0, 1], [stop - start] * 2):
            positions = torch.arange(start, stop).expand(2, -1)
            keep = torch.arange(stop - start).expand(2, -1)
            passed = adapter.run(0, depth, PassInputs(ids[:, start:stop], positions, cache.mask(), cache), keep=keep)
        torch.testing.assert_close(passed.logits, expected[:, start:stop], atol=2e-4, rtol=1e-4)
    assert columns == {24}
    adapter.close()


def test_a_full_static_cache_says_so():
    cache = SegmentCache(1, [range(1)], [Store.KV], capacity=4, static=True)
    write(cache, 0, [0], [4], {})
    with pytest.raises(ValueError, match="holds 4 tokens and 5 are needed. Make it with a larger capacity"):
        write(cache, 0, [0], [1], {})


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_a_running_state_rolls_back_to_where_it_was_kept(family):
    model = build(family)
    adapter = ModelAdapter(model)
    assert Store.STATE in adapter.stores
    depth = model.config.num_hidden_layers
    ids = torch.randint(3, 128, (1, 9), generator=torch.Generator().manual_seed(0))
    cache = SegmentCache(1, [range(depth)], adapter.stores)

    def run(start: int, stop: int) -> torch.Tensor:
        with cache.open(0, [0], [stop - start]):
            feed = PassInputs(ids[:, start:stop], torch.arange(start, stop)[None], None, cache)
            return adapter.run(0, depth, feed, keep=torch.tensor([[stop - start - 1]])).logits

    run(0, 4), run(4, 6)
    expected = run(6, 9)
    cache.rollback(0, 8)  # nothing was kept at 8 or 7: back to 6
    assert cache.lengths(0) == [6]
    torch.testing.assert_close(run(6, 9), expected)
    cache.commit(0, 6)
    cache.rollback(0, 6)
    torch.testing.assert_close(run(6, 9), expected)
    adapter.close()
