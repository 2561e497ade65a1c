"""Fused layers: used where they may be, equal to the model's own layers, and given up when they may not be."""

from __future__ import annotations

import copy
import logging
import time

import pytest
import torch

import TIDE
from arrivals import finish
from families import COMPILED, FAMILIES, KINDS, build
from levels import daily
from TIDE.adapters.layer_parts import LAYERS, layer_parts
from TIDE.engine import select as fused
from TIDE.engine.runners import patience

numba = pytest.importorskip("numba")


def written(engine, prompts, **options):
    ids, mask = prompts
    return engine.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0, **options)


def test_a_vocabulary_may_be_tiny():
    model, ids = build("llama", vocab_size=4), torch.tensor([[1, 3, 1]])
    options = dict(max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    with TIDE.TIDE(model) as engine:
        assert engine.runner.name == "numba"
        assert torch.equal(engine.generate(ids, **options), model.generate(ids, **options))


def test_the_table_is_covered():
    assert {type(build(name).get_decoder().layers[0]).__name__ for name in COMPILED} == set(LAYERS)


@pytest.mark.parametrize("name", daily(sorted(set(FAMILIES) - set(COMPILED)), KINDS))
def test_other_families_run_their_own_layers(name):
    model = build(name)
    with TIDE.TIDE(model) as engine:
        assert engine.runner.name == "modules"


def test_weights_are_read_in_place(llama, prompts):
    with TIDE.TIDE(llama) as engine:
        before = written(engine, prompts)
        with torch.no_grad():
            llama.model.layers[1].mlp.down_proj.weight.mul_(-2)
        assert engine.runner.name == "numba"
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
        engine(prompts[0])
        assert len(seen) == 25
        hook.remove()


@pytest.mark.parametrize("before", ["refused", "removed"])
def test_weights_that_were_exchanged_after_a_row_that_never_ran_are_not_overlooked(llama, before):
    ids = torch.tensor([[5, 6, 7]])
    with TIDE.TIDE(llama) as engine:
        engine.generate(ids, max_new_tokens=2, do_sample=False)
        if before == "refused":
            with pytest.raises(ValueError, match="token ids"):
                engine.add(torch.tensor([[99999]]), max_new_tokens=1)
        else:
            engine.remove(engine.add(ids, max_new_tokens=1))
        down = llama.model.layers[2].mlp.down_proj
        down.weight = torch.nn.Parameter(torch.randn_like(down.weight))
        row = engine.add(ids, max_new_tokens=6, do_sample=False)
        finish(engine, row)
        assert row.tokens == llama.generate(ids, max_new_tokens=6, do_sample=False)[0].tolist()


def test_a_layer_that_was_exchanged_is_not_overlooked(llama, prompts):
    with TIDE.TIDE(llama) as engine:
        written(engine, prompts)
        other = copy.deepcopy(llama.model.layers[0].mlp)
        with torch.no_grad():
            other.up_proj.weight.neg_()
        llama.model.layers[0].mlp = other
        assert torch.equal(written(engine, prompts), written(llama, prompts))


def test_a_fused_layer_that_differs_is_given_up_and_named(llama, prompts, monkeypatch, caplog):
    right = layer_parts

    def wrong(layer, config):
        found = right(layer, config)
        wrong_attention = found.attention._replace(scaling=2 * found.attention.scaling)
        return found._replace(attention=wrong_attention) if layer is llama.model.layers[2] else found

    monkeypatch.setattr(fused, "layer_parts", wrong)
    with caplog.at_level(logging.WARNING), TIDE.TIDE(llama) as engine:
        assert engine.runner.name == "modules"
        assert torch.equal(written(engine, prompts), written(llama, prompts))
    assert "layer 2 (LlamaDecoderLayer)" in caplog.text


def test_compiled_code_uses_at_most_as_many_threads_as_torch(llama, prompts, monkeypatch):
    from TIDE.kernels.cpu import threads as cpu_threads

    counts = []
    monkeypatch.setattr(cpu_threads, "set_num_threads", counts.append)
    monkeypatch.setattr(cpu_threads.config, "NUMBA_NUM_THREADS", 8)
    for threads in (1, 3, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        with TIDE.TIDE(llama) as engine:  # a new one: fewer threads are tried where layers take longer, as on a busy machine
            written(engine, prompts)
        assert max(counts) == min(threads, 8)
        counts.clear()


def test_who_waits_for_a_compiler_is_told(monkeypatch, capsys):
    monkeypatch.setattr(patience, "PATIENCE", 0.01)
    with patience.saying_what_takes_so_long("a sum"):
        numba.njit(lambda x: x + 1)(1)
        time.sleep(0.2)
    assert capsys.readouterr().err == "compiling a sum (may take a minute, once on a machine)\n"


def test_who_waits_for_code_from_a_cache_is_not_told_that_it_is_compiled(llama, monkeypatch, capsys):
    with TIDE.TIDE(llama):  # now it is there
        pass
    capsys.readouterr()
    monkeypatch.setattr(patience, "PATIENCE", 0.001)
    with TIDE.TIDE(llama):
        assert capsys.readouterr().err == ""


ARRANGED = {
    "attention and MLP side by side": ("stablelm", dict(use_parallel_residual=True)),
    "biases in the MLP": ("llama", dict(mlp_bias=True)),
    "biases in attention": ("llama", dict(attention_bias=True)),
    "biases of q, k and v": ("stablelm", dict(use_qkv_bias=True)),
    "low caps": ("gemma2", dict(attn_logit_softcapping=0.5, query_pre_attn_scalar=1)),
    "no caps": ("gemma2", dict(attn_logit_softcapping=None, query_pre_attn_scalar=1)),
    "angles by kind of layer": (
        "gemma3",
        dict(
            rope_parameters={
                "sliding_attention": dict(rope_type="default", rope_theta=100.0),
                "full_attention": dict(rope_type="linear", factor=4.0, rope_theta=100000.0),
            }
        ),
    ),
}


@pytest.mark.parametrize("change", ARRANGED)
def test_options_of_a_family_are_fused_too(change, prompts):
    name, settings = ARRANGED[change]
    model = build(name, **settings)
    expected = written(model, prompts)
    assert not torch.equal(expected, written(build(name), prompts)), "the option should matter"
    with TIDE.TIDE(model) as engine:
        assert engine.runner.name == "numba"
        assert torch.equal(written(engine, prompts), expected)


OTHERWISE = {
    "norms of heads": ("stablelm", dict(qk_layernorm=True)),
    "layer norms of heads": ("phi", dict(qk_layernorm=True)),
    "clipped": ("olmo", dict(clip_qkv=0.01)),
}


@pytest.mark.parametrize("change", ["lora", "double", *OTHERWISE])
def test_layers_without_parts_run_as_their_own_modules(change, prompts):
    name, settings = OTHERWISE.get(change, ("llama", {}))
    model = build(name, **settings)
    if change == "double":
        model = model.double()
    if change == "lora":
        model.model.layers[1].self_attn.q_proj = torch.nn.Sequential(model.model.layers[1].self_attn.q_proj)
    with TIDE.TIDE(model) as engine:
        assert engine.runner.name == "modules"
        assert torch.equal(written(engine, prompts), written(model, prompts))
