"""The engine as an object: how it is made, printed, copied and called."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import re

import pytest
import torch

from families import build
from policies import Everyone
from router_files import original_file
from TIDE import TIDE, TIDEConfig
from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.weights import unwrapped
from TIDE.engine.select import described_layers, select_runner
from TIDE.kernels import dispatch


@pytest.fixture
def ids():
    return torch.randint(3, 128, (2, 8), generator=torch.Generator().manual_seed(0))


# ---- making one ------------------------------------------------------------------------------------------------------


def test_a_router_file_may_be_called_router_or_router_path(llama, tmp_path):
    file = original_file(tmp_path / "router.pt")
    config = TIDEConfig(min_layers=0)
    for given in (dict(router_path=str(file)), dict(router_path=file), dict(router=file)):
        with TIDE(llama, **given, config=config) as engine:
            assert engine.policy.checkpoints == (1, 3)
    with TIDE(llama, file, config) as engine:
        assert engine.policy.checkpoints == (1, 3)


def test_two_router_files_are_refused(llama):
    with pytest.raises(TypeError, match="found both. Leave one out"):
        TIDE(llama, "a.pt", router_path="b.pt")


@pytest.mark.parametrize("strategy", ["zero_pad", "propagate"])
def test_a_strategy_that_only_fast_knows_chooses_fast_and_says_so_once(llama, ids, strategy, caplog):
    with caplog.at_level(logging.WARNING), TIDE(llama, Everyone(2), TIDEConfig(kv_cache_strategy=strategy)) as engine:
        engine.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert engine.last_stats.accepted == engine.last_stats.drafted > 0
    assert [record.message for record in caplog.records if "mode 'fast' was chosen" in record.message] == [
        record.message for record in caplog.records
    ]
    assert len(caplog.records) == 1


def test_a_strategy_that_was_chosen_with_its_mode_needs_no_warning(llama, caplog):
    with caplog.at_level(logging.WARNING):
        TIDE(llama, Everyone(2), TIDEConfig(mode="fast", kv_cache_strategy="zero_pad")).close()
        TIDE(llama, None, TIDEConfig(kv_cache_strategy="zero_pad")).close()
    assert not caplog.records


def test_min_layers_beyond_all_exits_says_which_there_are(llama, caplog):
    with caplog.at_level(logging.WARNING), TIDE(llama, Everyone(1, 2), TIDEConfig(min_layers=3)) as engine:
        assert len(engine.plan.spans) == 1
    assert "min_layers is 3 and all exits are at smaller depths (1, 2), so no token will exit. Use min_layers=2" in caplog.text


# ---- backends --------------------------------------------------------------------------------------------------------


def test_a_missing_compiler_is_named_once_and_in_the_backend(llama, monkeypatch, caplog):
    from TIDE.engine import select as fused

    fused._warn_once.cache_clear()
    monkeypatch.setattr(dispatch, "_trouble", lambda package: "is not installed")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            with TIDE(llama) as engine:
                backend = engine.backend
    assert backend.startswith("the model's own layers (numba is not installed")
    assert "pip install -U numba" in backend
    assert [record.message for record in caplog.records if "pip install -U numba" in record.message] == [
        caplog.records[0].message
    ]


def test_a_compiler_that_cannot_be_imported_is_no_crash(llama, monkeypatch):
    """numba refuses a numpy that is newer than itself with an ImportError."""

    def refuse(name):
        raise ImportError("Numba needs NumPy 1.0 or less")

    monkeypatch.setattr(dispatch.importlib, "import_module", refuse)
    monkeypatch.setattr(dispatch, "_trouble", dispatch._trouble.__wrapped__)  # without what it remembers
    with TIDE(llama) as engine:
        assert "numba cannot be imported (Numba needs NumPy 1.0 or less)" in engine.backend


def test_other_reasons_for_the_models_own_layers_are_in_the_backend(llama, monkeypatch):
    with TIDE(build("gpt2")) as engine:
        assert engine.backend == "the model's own layers (there is no compiled layer for GPT2Block as it is here)"
    with TIDE(llama.double()) as engine:
        assert "compiled layers on cpu are for float32, and the model is float64" in engine.backend
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    with TIDE(build("llama")) as engine:
        assert engine.backend == "the model's own layers (TIDE_BACKEND=modules is set)"


@pytest.mark.parametrize(
    ("backend", "family", "words"),
    [
        ("modules", "llama", "the model's own layers (TIDE_BACKEND=modules is set)"),
        ("modules", "gpt2", "the model's own layers (TIDE_BACKEND=modules is set)"),
        ("numba", "llama", "compiled layers on cpu (numba)"),
        ("numba", "gemma3", "compiled layers on cpu (numba)"),
        ("", "llama", "compiled layers on cpu (numba)"),
        (None, "llama", "compiled layers on cpu (numba)"),
    ],
)
def test_a_backend_that_was_asked_for_is_used(backend, family, words, ids, monkeypatch):
    if backend is None:
        monkeypatch.delenv("TIDE_BACKEND", raising=False)
    else:
        monkeypatch.setenv("TIDE_BACKEND", backend)
    model = build(family)
    with TIDE(model) as engine:
        assert engine.backend == words
        assert engine.runner.name == (backend or "numba")
        found = engine.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(found, model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0))


@pytest.mark.parametrize(
    ("backend", "family", "instead", "choose"),
    [
        ("triton", "llama", "compiled layers on cpu (numba)", "numba"),
        ("triton", "gpt2", "the model's own layers (there is no compiled layer for GPT2Block as it is here)", "modules"),
        ("numba", "gpt2", "the model's own layers (there is no compiled layer for GPT2Block as it is here)", "modules"),
    ],
)
def test_a_backend_that_cannot_be_used_is_refused_with_what_would_run(backend, family, instead, choose, monkeypatch, ids):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    model = build(family)
    with pytest.raises(ValueError, match=f"TIDE_BACKEND={backend} is set") as refused:
        TIDE(model)
    said = str(refused.value)
    assert f"this {type(model).__name__} on cpu would run as {instead}. Unset TIDE_BACKEND, or choose {choose}." in said
    monkeypatch.setenv("TIDE_BACKEND", choose)  # the model was left as it was
    with TIDE(model) as engine:
        assert engine.runner.name == choose
        engine.generate(ids, max_new_tokens=2, pad_token_id=0)


@pytest.mark.parametrize("backend", ["cuda", "Numba", "modules ", "1"])
def test_a_backend_that_does_not_exist_is_refused_with_those_that_do(backend, llama, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    with pytest.raises(ValueError, match=f"must be one of modules, numba, triton, or unset, found '{backend}'"):
        TIDE(llama)


def test_a_backend_that_was_asked_for_is_refused_when_a_hook_comes_later(llama, ids, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "numba")
    with TIDE(llama) as engine:
        hook = llama.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match="there are hooks on its modules, which compiled layers would not call"):
            engine.generate(ids, max_new_tokens=2, pad_token_id=0)
        hook.remove()
        engine.generate(ids, max_new_tokens=2, pad_token_id=0)
        assert engine.runner.name == "numba"


def hooked(model):
    model.model.layers[1].register_forward_hook(lambda *_: None)
    return model


def with_lora(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()


def quantized(model):
    model.hf_quantizer = object()  # as transformers leaves one on what it quantized
    return model


def partly_elsewhere(model):
    model.model.layers[3].mlp.to("meta")
    return model


CHANGED = {
    "hooks": (hooked, "there are hooks on its modules, which compiled layers would not call"),
    "adapters": (with_lora, "there are adapters (PEFT) on its layers"),
    "quantized": (quantized, "its weights are quantized"),
    "several devices": (partly_elsewhere, "the model is spread over several devices"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_changed_model_is_not_run_by_compiled_layers_and_the_backend_says_why(what, llama, monkeypatch):
    change, why = CHANGED[what]
    adapter = ModelAdapter(unwrapped(change(llama)))
    assert described_layers(adapter) == why
    assert select_runner(adapter).words == f"the model's own layers ({why})"
    monkeypatch.setenv("TIDE_BACKEND", "numba")
    with pytest.raises(ValueError, match=f"{re.escape(why)}.* choose modules"):
        select_runner(adapter)
    adapter.close()


def test_cuda_kernels_can_be_forbidden(monkeypatch):
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(dispatch, "_trouble", lambda package: None)
    assert dispatch.why_no_kernels(cuda, torch.bfloat16) is None
    monkeypatch.setenv("TIDE_NO_CUDA", "1")
    assert dispatch.why_no_kernels(cuda, torch.bfloat16) == "TIDE_NO_CUDA=1 is set"
    assert dispatch.why_no_kernels(cpu, torch.float32) is None


# ---- looking at one --------------------------------------------------------------------------------------------------


def test_an_engine_says_what_it_is(llama):
    llama.config.name_or_path = "my-org/my-model"
    with TIDE(llama, Everyone(1, 3)) as engine:
        assert (
            repr(engine)
            == "TIDE(LlamaForCausalLM my-model, 4 layers; exits at depth 1, 3; mode exact; compiled layers on cpu (numba))"
        )
    assert repr(engine).endswith("; closed)")
    with TIDE(llama, None, TIDEConfig(mode="fast")) as engine:
        assert "; exits off; mode fast; " in repr(engine)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused_in_a_line_and_leave_nothing_behind(llama, ids, copied, recwarn, capsys):
    with TIDE(llama, Everyone(2)) as engine:
        expected = engine.generate(ids, max_new_tokens=5, do_sample=False)
        with pytest.raises(TypeError, match="an engine cannot be copied or pickled"):
            copied(engine)
        gc.collect()
        assert torch.equal(engine.generate(ids, max_new_tokens=5, do_sample=False), expected)
    assert not capsys.readouterr().err
    assert not [warning for warning in recwarn if "Exception ignored" in str(warning.message)]


# ---- calling one -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_a_call_answers_as_the_model_does(family, ids):
    model = build(family)
    labels = ids.clone()
    labels[0, :3] = -100
    expected = model(ids, labels=labels)
    with TIDE(model, Everyone(2)) as engine:
        found = engine(ids, labels=labels)
        loss, logits = engine(ids, torch.ones_like(ids), labels=labels, return_dict=False)
        (alone,) = engine(input_ids=ids, return_dict=False)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits, found.logits)
    assert torch.equal(alone, found.logits)
    assert torch.equal(loss, found.loss)
    assert engine.last_stats.total_tokens == ids.numel()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_padding_does_not_count_in_a_loss(family, prompts):
    model = build(family)
    ids, mask = prompts
    rows = [row[keep.bool()] for row, keep in zip(ids, mask, strict=True)]
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in rows]
    with TIDE(model) as engine:
        found = engine(ids, mask, labels=ids).loss
    torch.testing.assert_close(found, sum(losses) / sum(len(row) - 1 for row in rows), atol=1e-4, rtol=1e-4)
