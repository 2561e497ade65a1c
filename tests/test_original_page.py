"""The page of the system whose name and surface we keep: its lines of code, from top to bottom, on tiny models.

People who read that page copy these lines. Here they run as they stand there; only what is loaded is tiny, calibration has few
texts, and where there is no GPU `.cuda()` leaves a tensor where it is.
"""

from __future__ import annotations

import functools
import logging
import os
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import TIDE
from characters import TEMPLATE, characters
from families import FAMILIES, build
from router_files import original_file
from TIDE import TIDEConfig
from TIDE.calibration.calibrate import QUICK
from TIDE.models.gguf import Loaded

ROOT = Path(__file__).parent.parent
FAMILY = {"gpt2": "gpt2", "EleutherAI/pythia-1.4b": "gpt_neox", "microsoft/phi-2": "phi"}
GREEDY = dict(do_sample=False, max_new_tokens=16)


@pytest.fixture
def page(monkeypatch, tmp_path):
    """A folder with nothing in it, where everything that is loaded by name is a tiny model."""

    def load(name, torch_dtype=None, device_map=None):
        model = build(FAMILY.get(name, "llama"))
        return model if torch_dtype is None else model.to(getattr(torch, str(torch_dtype).removeprefix("torch.")))

    few = functools.partial(TIDEConfig, calibration_samples=20, checkpoint_interval=2)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: characters(TEMPLATE))
    monkeypatch.setattr("TIDE.calibration.calibrate.TIDEConfig", few)
    monkeypatch.setattr(
        "TIDE.calibration.calibrate.FULL", replace(QUICK, answer=16, schedule=replace(QUICK.schedule, epochs=1))
    )
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_three_line_integration(page, capsys):
    model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", torch_dtype="float16", device_map="auto")
    tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-3.1-8B-Instruct")
    TIDE.calibrate(model, tokenizer, save_path="router.pt")
    engine = TIDE.TIDE(model, router_path="router.pt")
    output = engine.generate(tokenizer("Hello", return_tensors="pt").input_ids.cuda(), max_new_tokens=128)
    print(tokenizer.decode(output[0]))

    assert (page / "router.pt").is_file()
    assert engine.policy.exits
    assert engine.config.effective_mode == "exact"
    assert tokenizer.decode(output[0]) in capsys.readouterr().out
    engine.close()


@pytest.mark.parametrize("name", FAMILY)
def test_works_with_any_model(page, name):
    model = AutoModelForCausalLM.from_pretrained(name)
    original_file(page / "router.pt", layers=(0, 2))
    engine = TIDE.TIDE(model, "router.pt")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(engine.generate(ids, **GREEDY), model.generate(ids, **GREEDY))
    engine.close()


def test_every_family_of_the_pages_table_is_tested():
    named = ["llama", "llama4", "deepseek_v3", "qwen2", "qwen3", "mistral", "mixtral", "gemma", "gemma3", "gpt2", "gpt_neox"]
    named += ["phi", "phi3", "falcon", "opt"]
    assert set(named) <= set(FAMILIES)


def test_tuning_the_threshold(page, caplog):
    model, ids = build("llama"), torch.tensor([[5, 6, 7]])
    original_file(page / "router.pt", layers=(0, 2))
    expected = model.generate(ids, **GREEDY)

    engine = TIDE.TIDE(model, "router.pt", config=TIDEConfig(exit_threshold=0.95))
    assert torch.equal(engine.generate(ids, **GREEDY), expected)
    engine = TIDE.TIDE(model, "router.pt", config=TIDEConfig(exit_threshold=0.70))
    assert torch.equal(engine.generate(ids, **GREEDY), expected)

    caplog.clear()
    config = TIDEConfig(exit_threshold=0.85, min_layers=16)
    engine = TIDE.TIDE(model, "router.pt", config=config)
    assert "min_layers is 16 and all exits are at smaller depths (1, 3)" in caplog.text


def test_configuration_reference(page, caplog):
    config = TIDEConfig(
        exit_threshold=0.85,
        min_layers=8,
        checkpoint_interval=4,
        calibration_samples=2000,
        calibration_dataset="wikitext",
        convergence_threshold=0.98,
        router_bottleneck_dim=128,
        exit_strategy="identity",
        kv_cache_strategy="zero_pad",
        compaction_threshold=0.25,
    )
    original_file(page / "router.pt", layers=(9, 10))
    with caplog.at_level(logging.WARNING), TIDE.TIDE(build("llama", num_hidden_layers=12), "router.pt", config) as engine:
        assert engine.config.effective_mode == "fast"
        engine.generate(torch.tensor([[5, 6, 7]]), **GREEDY)
    assert len([record for record in caplog.records if "mode 'fast' was chosen" in record.message]) == 1


def test_monitoring_exit_stats(page, capsys):
    model, input_ids = build("llama"), torch.tensor([[5, 6, 7]])
    original_file(page / "router.pt", layers=(0, 2))
    engine = TIDE.TIDE(model, "router.pt", TIDEConfig(mode="fast", min_layers=0))
    output = engine.generate(input_ids, max_new_tokens=100, eos_token_id=None)

    stats = engine.last_stats
    print(stats.summary())
    print(f"Exit rate: {stats.exit_rate:.1%}")
    print(f"Exits per layer: {stats.exits_per_layer}")

    printed = capsys.readouterr().out
    assert output.shape == (1, 103)
    assert printed.startswith(f"Total tokens: 100, Exited: {stats.exited_tokens} ({stats.exit_rate:.1%})")
    assert f"  Ran all layers: {stats.remaining_tokens}" in printed
    assert set(stats.exits_per_layer) <= {0, 2}  # layers, as the page has them
    assert f"  Depth 3: {stats.exits_per_layer[2]} exits" in printed
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mixed_precision(page, dtype):
    model = AutoModelForCausalLM.from_pretrained("...", torch_dtype=dtype)
    original_file(page / "router.pt", layers=(0, 2))
    engine = TIDE.TIDE(model, "router.pt")
    assert engine.generate(torch.tensor([[5, 6, 7]]), **GREEDY).dtype == torch.long
    engine.close()


# ---- examples and tests -----------------------------------------------------------------------------------------------


def test_the_extra_of_the_pages_test_commands_is_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(name.startswith("pytest") for name in extras["test"])


def test_without_cuda_kernels_everything_runs(page, monkeypatch):
    monkeypatch.setitem(os.environ, "TIDE_NO_CUDA", "1")
    model, ids = build("llama"), torch.tensor([[5, 6, 7]])
    with TIDE.TIDE(model) as engine:
        assert torch.equal(engine.generate(ids, **GREEDY), model.generate(ids, **GREEDY))


# ---- speed ------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.real
def test_a_file_of_the_original_system_costs_nothing_where_its_drafts_are_wrong(embedded: Loaded, tmp_path):
    """Random routers are sure of wrong drafts; the text is the model's and takes no longer than `model.generate`."""
    model, tokenizer = embedded
    file = original_file(tmp_path / "router.pt", layers=tuple(range(3, 30, 4)), hidden=576, bottleneck=128)
    inputs = tokenizer("The wind turned to the north, and the boats", return_tensors="pt")
    options = dict(inputs, do_sample=False, max_new_tokens=16)
    with TIDE.TIDE(model, file) as engine:
        seconds: list[list[float]] = [[], []]
        for _ in range(6):
            texts = []
            for run, took in zip((model.generate, engine.generate), seconds, strict=True):
                began = time.process_time()
                texts.append(run(**options))
                took.append(time.process_time() - began)
            assert torch.equal(*texts)
    assert min(seconds[0]) / min(seconds[1]) >= 0.95
