"""Fused layers: used where they may be, equal to the model's own layers, and given up when they may not be."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch

import TIDE
from families import FAMILIES, build
from TIDE.adapters.features import LLAMA_LIKE, layer_features
from TIDE.engine.runners import select as fused

pytest.importorskip("numba")

FUSED = ["gemma", "granite", "llama", "mistral", "olmo", "phi3", "phi3-sliding"]
FUSED += ["qwen2", "qwen2-sliding", "qwen3", "smollm3", "stablelm"]


def written(engine, prompts, **options):
    ids, mask = prompts
    return engine.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0, **options)


@pytest.mark.parametrize("name", FUSED)
def test_llama_like_families_are_fused_and_write_what_the_model_writes(name, prompts):
    model = build(name)
    expected = written(model, prompts)
    with TIDE.TIDE(model) as engine:
        assert engine.adapter.fused is not None
        assert torch.equal(written(engine, prompts), expected)


def test_a_vocabulary_may_be_tiny():
    model, ids = build("llama", vocab_size=4), torch.tensor([[1, 3, 1]])
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with TIDE.TIDE(model) as engine:
        assert engine.adapter.fused is not None
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))


def test_the_table_is_covered():
    assert {type(build(name).get_decoder().layers[0]).__name__ for name in FUSED} == LLAMA_LIKE


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - set(FUSED)))
def test_other_families_run_their_own_layers(name):
    model = build(name)
    with TIDE.TIDE(model) as engine:
        assert engine.adapter.fused is None


def test_weights_are_read_in_place(llama, prompts):
    with TIDE.TIDE(llama) as engine:
        before = written(engine, prompts)
        with torch.no_grad():
            llama.model.layers[1].mlp.down_proj.weight.mul_(-2)
        assert engine.adapter.fused is not None
        after = written(engine, prompts)
        assert not torch.equal(before, after)
        assert torch.equal(after, written(llama, prompts))


def test_hooks_of_the_user_fire(llama, prompts):
    seen = []
    with TIDE.TIDE(llama) as engine:
        expected = written(engine, prompts)
        hook = llama.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
        assert torch.equal(written(engine, prompts), expected)
        assert len(seen) == 24
        hook.remove()


def test_hooks_fire_when_the_engine_is_called_for_logits(llama):
    seen = []
    with TIDE.TIDE(llama) as engine:
        hook = llama.model.layers[0].mlp.register_forward_hook(lambda *_: seen.append(1))
        engine(torch.tensor([[5, 6, 7]]))
        assert seen
        hook.remove()


def test_a_layer_that_was_exchanged_is_not_overlooked(llama, prompts):
    with TIDE.TIDE(llama) as engine:
        written(engine, prompts)
        other = copy.deepcopy(llama.model.layers[0].mlp)
        with torch.no_grad():
            other.up_proj.weight.neg_()
        llama.model.layers[0].mlp = other
        assert torch.equal(written(engine, prompts), written(llama, prompts))


def test_a_fused_layer_that_differs_is_given_up_and_named(llama, prompts, monkeypatch, caplog):
    right = layer_features

    def wrong(layer, config):
        found = right(layer, config)
        return found._replace(scaling=2 * found.scaling) if layer is llama.model.layers[2] else found

    monkeypatch.setattr(fused, "layer_features", wrong)
    with caplog.at_level(logging.WARNING), TIDE.TIDE(llama) as engine:
        assert engine.adapter.fused is None
        assert torch.equal(written(engine, prompts), written(llama, prompts))
    assert "layer 2 (LlamaDecoderLayer)" in caplog.text


def test_compiled_code_uses_as_many_threads_as_torch(llama, prompts, monkeypatch):
    import numba

    asked = []
    with TIDE.TIDE(llama) as engine:
        monkeypatch.setattr(engine.adapter.fused.ops, "set_num_threads", asked.append)
        monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 8)
        for threads in (1, 3, 64):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            written(engine, prompts)
            assert set(asked) == {min(threads, 8)}
            asked.clear()


def test_who_waits_for_a_compiler_is_told(llama, monkeypatch, capsys):
    check = fused.check_fused
    monkeypatch.setattr(fused, "PATIENCE", 600.0)
    with TIDE.TIDE(llama):
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(fused, "PATIENCE", 0.01)
    monkeypatch.setattr(fused, "check_fused", lambda adapter: (time.sleep(0.5), check(adapter)))
    with TIDE.TIDE(llama):
        assert "may take a minute the first time on a machine" in capsys.readouterr().err


def test_kernels_can_be_forbidden(llama, monkeypatch):
    monkeypatch.setenv("TIDE_NO_KERNELS", "1")
    with TIDE.TIDE(llama) as engine:
        assert engine.adapter.fused is None


OTHERWISE = {
    "parallel": ("stablelm", dict(use_parallel_residual=True)),
    "norms of heads": ("stablelm", dict(qk_layernorm=True)),
    "clipped": ("olmo", dict(clip_qkv=0.01)),
    "mlp bias": ("llama", dict(mlp_bias=True)),
}


@pytest.mark.parametrize("change", ["lora", "double", *OTHERWISE])
def test_what_has_no_features_runs_as_it_is(change, prompts):
    name, settings = OTHERWISE.get(change, ("llama", {}))
    model = build(name, **settings)
    if change == "double":
        model = model.double()
    if change == "lora":
        model.model.layers[1].self_attn.q_proj = torch.nn.Sequential(model.model.layers[1].self_attn.q_proj)
    with TIDE.TIDE(model) as engine:
        assert engine.adapter.fused is None
        assert torch.equal(written(engine, prompts), written(model, prompts))
