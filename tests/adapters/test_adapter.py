"""The window runs any span of layers through the model's own forward, and leaves the model as it found it."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from itertools import pairwise

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache

from arrivals import finish
from families import FAMILIES, LAYERS, build
from policies import Everyone
from TIDE import TIDE, TIDEConfig
from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.probe import Store, known_family, probe_family
from TIDE.adapters.table import FAMILIES as TABLE
from TIDE.engine.cache.segment_cache import SegmentCache


@pytest.fixture
def text():
    return torch.randint(3, 128, (2, 10), generator=torch.Generator().manual_seed(0))


def run_spans(adapter: ModelAdapter, edges: list[int], ids: torch.Tensor, keep: torch.Tensor | None = None):
    """Take ids through consecutive spans; return the cache, the states at each edge and the last logits."""
    spans = [range(a, b) for a, b in pairwise(edges)]
    cache = SegmentCache(len(ids), spans, adapter.stores)
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    rows, counts = list(range(len(ids))), [ids.shape[1]] * len(ids)
    states, logits, seen = None, None, []
    for index, span in enumerate(spans):
        with cache.open(index, rows, counts):
            feed = PassInputs(ids, positions, cache.mask(), cache)
            last = index == len(spans) - 1
            states, logits, _ = adapter.run(span.start, span.stop, feed, hidden=states, keep=keep if last else None)
        seen.append(states)
    return cache, seen, logits


def test_spans_one_after_the_other_are_the_whole_model(any_model, text):
    expected = any_model(text, output_hidden_states=True)
    depth = any_model.config.num_hidden_layers
    adapter = ModelAdapter(any_model)
    keep = torch.arange(10).expand(2, -1)
    _, states, logits = run_spans(adapter, [0, 0, 1, 3, depth], text, keep)
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
    for edge, state in zip((0, 1, 3), states, strict=False):
        torch.testing.assert_close(state, expected.hidden_states[edge], atol=1e-4, rtol=1e-4)
    adapter.close()


def test_logits_are_computed_only_where_asked(each_kind, text):
    expected = each_kind(text).logits
    adapter = ModelAdapter(each_kind)
    keep = torch.tensor([[3, 9], [0, 5]])
    _, _, logits = run_spans(adapter, [0, each_kind.config.num_hidden_layers], text, keep)
    assert logits.shape[:2] == (2, 2)
    torch.testing.assert_close(
        logits, expected.gather(1, keep[..., None].expand(-1, -1, expected.shape[-1])), atol=1e-4, rtol=1e-4
    )
    _, _, none = run_spans(adapter, [0, each_kind.config.num_hidden_layers], text)
    assert none is None
    adapter.close()


def test_logits_are_picked_afterwards_where_the_head_cannot_have_a_door(llama, text, monkeypatch):
    """No head is known, or it is the embedding itself."""
    expected = llama(text).logits
    keep = torch.tensor([[3, 9], [0, 5]])
    for head in (None, llama.get_input_embeddings()):
        monkeypatch.setattr(llama, "get_output_embeddings", lambda head=head: head)
        adapter = ModelAdapter(llama)
        _, _, logits = run_spans(adapter, [0, 2, LAYERS], text, keep)
        torch.testing.assert_close(logits, expected.gather(1, keep[..., None].expand(-1, -1, 128)), atol=1e-4, rtol=1e-4)
        adapter.close()


def test_the_head_is_final_norm_and_lm_head(each_kind, text):
    """Shown on the deepest state, where the identity exit is the model itself."""
    expected = each_kind(text).logits
    adapter = ModelAdapter(each_kind)
    _, states, _ = run_spans(adapter, [0, each_kind.config.num_hidden_layers], text)
    torch.testing.assert_close(adapter.head(states[-1][:, 4]), expected[:, 4], atol=1e-4, rtol=1e-4)
    adapter.close()


def test_a_kv_only_run_stores_what_the_layer_would_have_stored(each_kind, text):
    """For the first layer of a span: given the same states, the same K/V, and nothing after them is computed."""
    depth = each_kind.config.num_hidden_layers
    adapter = ModelAdapter(each_kind)
    if Store.STATE in adapter.stores:
        adapter.close()
        pytest.skip("layers with a running state have no K/V to store")
    positions = torch.arange(10).expand(2, -1)
    for start in range(depth):
        full, states, _ = run_spans(adapter, [0, start, depth], text)
        only = SegmentCache(2, [range(0, start), range(start, depth)], adapter.stores)
        only.segments[0] = copy.deepcopy(full.segments[0])
        only.layers[:start] = full.layers[:start]
        after_norm = count_calls(adapter.layers[start])
        with only.open(1, [0, 1], [10, 10]):
            inputs = PassInputs(text, positions, None, only)
            passed = adapter.run(start, depth, inputs, hidden=states[0], kv_of=lambda layer, own=states[0]: own)
        assert torch.equal(passed.states, states[0])
        if adapter.stores[start] is Store.KV:
            for found, expected in zip(only.kv(start, 1), full.kv(start, 1), strict=True):
                torch.testing.assert_close(found, expected)
            assert after_norm() < after_norm.when_run_in_full
    adapter.close()


def count_calls(layer: nn.Module):
    """How many submodules of a layer are called, beside how many a full run calls."""
    counts = {"calls": 0}
    hooks = [
        m.register_forward_hook(lambda *_: counts.__setitem__("calls", counts["calls"] + 1))
        for m in layer.modules()
        if m is not layer
    ]

    def found() -> int:
        for hook in hooks:
            hook.remove()
        return counts["calls"]

    found.when_run_in_full = len(hooks)
    return found


def test_the_probe_finds_what_the_table_says(any_model):
    assert probe_family(any_model) == known_family(any_model) == TABLE[any_model.config.model_type]


def test_every_family_of_the_table_has_a_test():
    assert {build(name).config.model_type for name in FAMILIES} == set(TABLE)


def test_a_family_that_is_not_in_the_table_works_by_probe(monkeypatch, prompts):
    ids, mask = prompts
    for name in ("llama", "bloom", "opt"):
        model = build(name)
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        monkeypatch.delitem(TABLE, model.config.model_type)
        with TIDE(model, Everyone(2)) as engine:
            assert torch.equal(engine.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False), expected)


def anatomy(model: nn.Module) -> list[tuple]:
    """Modules with their classes, attributes and hooks."""
    return [
        (module, type(module), set(module.__dict__), list(module._forward_hooks), list(module._forward_pre_hooks))
        for module in model.modules()
    ]


@pytest.mark.invariant(8)
def test_the_model_is_as_before_after_close(each_kind, text):
    """Same classes, attributes, hooks, parameters, output; and it can still be trained."""
    before = anatomy(each_kind)
    weights = {name: value.clone() for name, value in each_kind.state_dict().items()}
    expected, written = each_kind(text).logits, each_kind.generate(text, max_new_tokens=4, do_sample=False)
    with TIDE(each_kind, Everyone(2)) as engine:
        engine.generate(text, max_new_tokens=4, do_sample=False)
        during = each_kind(text).logits
        assert torch.equal(each_kind.generate(text, max_new_tokens=4, do_sample=False), written)
        assert list(each_kind.state_dict()) == list(weights)
    assert torch.equal(during, expected)
    assert torch.equal(each_kind(text).logits, expected)
    assert anatomy(each_kind) == before
    assert all(torch.equal(value, weights[name]) for name, value in each_kind.state_dict().items())
    each_kind(text, labels=text).loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in each_kind.parameters())
    assert any(p.grad is not None for p in each_kind.parameters())
    each_kind.zero_grad()


@pytest.mark.invariant(8)
def test_a_second_engine_works_after_the_first(llama, text):
    texts = []
    for _ in range(2):
        with TIDE(llama, Everyone(1)) as engine:
            texts.append(engine.generate(text, max_new_tokens=6, do_sample=False))
    assert torch.equal(*texts)


def test_an_engine_that_is_at_work_keeps_its_model(llama, text):
    text = text[:1]
    expected = llama.generate(text, max_new_tokens=6, do_sample=False)
    with TIDE(llama) as engine:
        stream = engine.stream(text, max_new_tokens=6, do_sample=False)
        first = next(stream)
        with pytest.raises(RuntimeError, match="already belongs to another TIDE engine, which is at work"):
            TIDE(llama)
        assert [first, *stream] == expected[0, text.shape[1] :].tolist()
        row = engine.add(text, max_new_tokens=6, do_sample=False)
        with pytest.raises(RuntimeError, match="already belongs to another TIDE engine, which is at work"):
            TIDE(llama)
        finish(engine, row)
        assert row.tokens == expected[0].tolist()
    assert torch.equal(llama.generate(text, max_new_tokens=6, do_sample=False), expected)


def test_an_idle_engine_gives_its_model_up_to_another(llama, text):
    asked = dict(max_new_tokens=6, do_sample=False)
    expected = llama.generate(text, **asked)
    first = TIDE(llama, Everyone(1))
    assert torch.equal(first.generate(text, **asked), expected)
    second = TIDE(llama)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed: another one was made for its model"):
            first.generate(text, **asked)
        assert torch.equal(second.generate(text, **asked), expected)
        first.close()  # is nothing to the second
    second.close()
    assert torch.equal(llama.generate(text, **asked), expected)


def test_an_engine_that_cannot_be_made_leaves_the_one_before_it_usable(llama, text):
    asked = dict(max_new_tokens=6, do_sample=False)
    with TIDE(llama, Everyone(1)) as engine:
        with pytest.raises(ValueError, match="prefill_exits"):
            TIDE(llama, Everyone(1), TIDEConfig(mode="fast", prefill_exits=True))
        expected = engine.generate(text, **asked)
    assert torch.equal(llama.generate(text, **asked), expected)


def test_an_engine_that_is_dropped_closes(llama, text):
    before = [type(layer) for layer in llama.model.layers]
    TIDE(llama)
    gc.collect()
    assert [type(layer) for layer in llama.model.layers] == before
    TIDE(llama).close()


def test_a_copy_of_a_model_with_an_open_engine_is_a_model_of_its_own(llama, text):
    expected = llama.generate(text, max_new_tokens=6, do_sample=False)
    with TIDE(llama, Everyone(1)) as engine:
        twin = copy.deepcopy(llama)
        with TIDE(twin, Everyone(2)) as second:
            for run in (twin.generate, second.generate, engine.generate, llama.generate):
                assert torch.equal(run(text, max_new_tokens=6, do_sample=False), expected)


def test_a_model_with_an_open_engine_can_be_pickled(llama, text):
    with TIDE(llama, Everyone(1)):
        twin = pickle.loads(pickle.dumps(llama))
    assert [type(module) for module in twin.modules()] == [type(module) for module in llama.modules()]
    assert torch.equal(twin(text).logits, llama(text).logits)


def test_another_thread_may_use_the_model_meanwhile(llama, text):
    """Also in the middle of a pass, from where a layer calls out."""
    expected = llama.generate(text, max_new_tokens=3, do_sample=False)
    found = []

    def elsewhere(*_):
        if not found:
            found.append(None)
            thread = threading.Thread(target=lambda: found.append(llama.generate(text, max_new_tokens=3, do_sample=False)))
            thread.start()
            thread.join()

    llama.model.layers[1].mlp.register_forward_hook(elsewhere)
    with TIDE(llama, Everyone(1)) as engine:
        assert torch.equal(engine.generate(text, max_new_tokens=3, do_sample=False), expected)
    assert torch.equal(found[1], expected)


def test_hooks_of_the_user_see_layers_only_when_they_run(llama, text):
    seen = []
    llama.model.layers[3].register_forward_hook(lambda *_: seen.append(3))
    adapter = ModelAdapter(llama)
    run_spans(adapter, [0, 3], text)
    assert seen == []
    run_spans(adapter, [0, 4], text)
    assert seen == [3]
    adapter.close()


def test_a_model_in_train_mode_is_refused(llama):
    with pytest.raises(ValueError, match=r"train mode.*Call model.eval\(\)"):
        TIDE(llama.train())


def test_an_encoder_decoder_model_is_refused():
    small = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=32)
    model = BartForConditionalGeneration(BartConfig(**small, encoder_attention_heads=2, decoder_attention_heads=2)).eval()
    with pytest.raises(ValueError, match="encoder-decoder"):
        TIDE(model)


def test_something_that_is_no_model_is_refused():
    with pytest.raises(TypeError, match="expected a Hugging Face model, found str"):
        TIDE("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_layers_that_cannot_be_wrapped_are_refused_and_nothing_is_left_behind(llama, text):
    class Sealed(nn.Module):
        """Stands for layers a quantization replaced by something that is no plain module."""

        def __setattr__(self, name, value):
            if name == "__class__":
                raise TypeError("object layout differs")
            super().__setattr__(name, value)

        def forward(self, hidden_states, **_):
            return hidden_states

    types = [type(layer) for layer in llama.model.layers[:3]]
    llama.model.layers[3] = Sealed()
    with pytest.raises(TypeError, match=r"Sealed of this LlamaForCausalLM cannot be wrapped .*quantized by a method"):
        TIDE(llama)
    assert [type(layer) for layer in llama.model.layers[:3]] == types
    llama(text)


def test_a_store_that_cannot_be_written_by_position_is_refused_by_layer(llama, monkeypatch):
    class Compressed(type(DynamicCache(config=llama.config).layers[0])):
        pass

    def compressed(config):
        cache = DynamicCache(config=config)
        cache.layers[2] = Compressed()
        return cache

    monkeypatch.setattr("TIDE.adapters.probe.DynamicCache", compressed)
    with pytest.raises(ValueError, match="layer 2 of LlamaForCausalLM keeps a Compressed, which TIDE cannot write by position"):
        TIDE(llama)


def test_a_layer_list_that_is_not_there_is_refused_with_the_next_step(llama):
    llama.config.num_hidden_layers = LAYERS + 1
    with pytest.raises(ValueError, match=r"no list of 5 decoder layers .* Run this model with model.generate"):
        TIDE(llama)


def test_logits_of_some_tokens_are_those_columns_of_all_logits(each_kind):
    adapter = ModelAdapter(each_kind)
    try:
        torch.manual_seed(0)
        states = torch.randn(3, adapter.hidden_dim)
        everything = adapter.head(states)
        some = torch.tensor([1, 5, 6, 40, everything.shape[1] - 1])
        torch.testing.assert_close(adapter.head(states, some), everything[:, some])
        torch.testing.assert_close(adapter.head(states, some[:2].clone()), everything[:, some[:2]], msg="another vocabulary")
    finally:
        adapter.close()


def test_taps_are_the_states_between_spans(each_kind, prompts):
    ids = prompts[0][2:]
    adapter = ModelAdapter(each_kind)
    try:
        last = adapter.num_layers
        feed = PassInputs(ids, torch.arange(ids.shape[1])[None], None, None)
        passed = adapter.run(0, last, feed, taps=(0, last // 2))
        half = adapter.run(0, last // 2, feed)
        torch.testing.assert_close(passed.taps[last // 2], half.states)
        assert set(passed.taps) == {0, last // 2}
    finally:
        adapter.close()


def test_gradients_reach_the_states_and_nothing_else(llama):
    adapter = ModelAdapter(llama)
    llama.requires_grad_(False)
    states = torch.randn(2, adapter.hidden_dim, requires_grad=True)
    adapter.head(states, with_grad=True).sum().backward()
    assert states.grad is not None
    assert not adapter.head(states).requires_grad
    adapter.close()


@pytest.mark.full
def test_an_engine_that_nobody_closed_says_nothing_when_python_ends():
    """Modules are taken apart then, and it outlasts some that it needs."""
    script = "import torch, TIDE; from families import build; torch.engine = TIDE.TIDE(build('llama'))"
    path = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0
    assert "Exception ignored" not in done.stderr, done.stderr
