"""Models by name, folder or file: what is wrong is said before anything is loaded, and options go to transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import TIDE


def test_a_local_folder_is_loaded_ready_to_use(folder):
    model, tokenizer = TIDE.load_model(folder, device="cpu")
    assert not model.training
    assert model.dtype == torch.float32
    assert tokenizer.padding_side == "left"
    assert TIDE.load_model(folder, dtype=torch.float16, device="cpu").model.dtype == torch.float16
    with TIDE.TIDE(model) as engine:
        assert engine.generate(
            **tokenizer("hello", return_tensors="pt", return_token_type_ids=False), max_new_tokens=3
        ).shape == (1, 4)


def test_a_model_that_the_hub_does_not_give_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        OSError, match="cannot load 'no/such-model': expected 'default', a folder with a model, a .gguf file, or a hub id"
    ):
        TIDE.load_model("no/such-model")


@pytest.mark.parametrize("name", ["/no/such", "./such", "no/such/model", "none.gguf"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr("TIDE.hub.hub_trouble", lambda: pytest.fail("the hub was asked"))
    with pytest.raises(FileNotFoundError, match=f"there is no {name}. Give a folder with a model, a .gguf file, a hub id"):
        TIDE.load_model(name)


def test_a_file_that_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="model.safetensors is a file, but not a .gguf file. Give a folder with a model"):
        TIDE.load_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("name", [None, 3, torch.nn.Linear(1, 1)])
def test_a_name_of_another_type_is_refused(name):
    with pytest.raises(TypeError, match=f"name must be a str or a Path, found {type(name).__name__}. Give a folder"):
        TIDE.load_model(name)


def test_a_gpu_that_is_not_there_is_refused_before_the_model_is_read(folder, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("TIDE.models.load._read", lambda *_: pytest.fail("the model was read"))
    with pytest.raises(
        ValueError, match=r"there is no device 'cuda': torch .* sees 0 CUDA GPUs. Leave device out, or give 'cpu'"
    ):
        TIDE.load_model(folder, device="cuda")


@pytest.mark.parametrize("options", [dict(torch_dtype=torch.bfloat16), dict(torch_dtype="bfloat16"), dict(dtype="bfloat16")])
def test_a_dtype_has_two_names_and_may_be_a_word(folder, options):
    assert TIDE.load_model(folder, device="cpu", **options).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (dict(dtype=torch.float32, torch_dtype=torch.float32), "dtype and torch_dtype are the same setting"),
        (dict(device="cpu", device_map="auto"), "device and device_map both say where the model goes"),
        (dict(gguf_file="model.gguf"), "load_model takes no gguf_file. Load the model with transformers"),
        (dict(dtype="bfloat"), "dtype must be a torch dtype, its name or 'auto', found 'bfloat'"),
    ],
)
def test_options_that_contradict_each_other_are_refused(folder, options, complaint):
    with pytest.raises((TypeError, ValueError), match=complaint):
        TIDE.load_model(folder, **options)


def test_other_options_go_to_transformers(folder, monkeypatch):
    models, tokenizers = {}, {}
    for auto, seen in ((AutoModelForCausalLM, models), (AutoTokenizer, tokenizers)):
        read = auto.from_pretrained
        monkeypatch.setattr(auto, "from_pretrained", lambda *a, read=read, seen=seen, **o: seen.update(o) or read(*a, **o))
    options = dict(attn_implementation="eager", device_map="cpu")
    model = TIDE.load_model(folder, revision="main", token="secret", **options).model
    assert model.config._attn_implementation == "eager"
    assert models.items() >= dict(options, revision="main", token="secret").items()
    assert tokenizers.items() >= dict(revision="main", token="secret").items() and not options.keys() & tokenizers


def test_a_model_can_be_quantized_as_it_is_loaded(folder):
    torchao = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    from TIDE.adapters.weights import is_quantized

    assert is_quantized(
        TIDE.load_model(folder, device="cpu", quantization_config=TorchAoConfig(torchao.Int8WeightOnlyConfig())).model
    )


def test_the_revision_of_an_earlier_download_is_looked_for(monkeypatch):
    sought = {}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: sought.update(options) or "nowhere")
    with pytest.raises(OSError, match="cannot load"):
        TIDE.load_model("some/model", revision="v2", cache_dir="here")
    assert sought == dict(local_files_only=True, revision="v2", cache_dir="here")
