"""Folders that are no EAGLE-3 heads, or not ones for a model: each is refused in a line that says why."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace

import pytest
import torch
from httpx import Request, Response
from huggingface_hub.errors import RepositoryNotFoundError

from eagle_heads import a_head, config_of, original, tensors_of, tried, with_vocabulary, write
from families import build
from TIDE import TIDE
from TIDE.routing.eagle3.imported import read_folder

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def deep():
    """A model of eight layers, for which EAGLE-3 has depths of its own: 2, 4, 5."""
    return build("llama", num_hidden_layers=8)


class Hostile:
    """Makes a folder where it is unpickled."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def without(name):
    return {key: one for key, one in tensors_of().items() if key != name}


def changed(name, tensor):
    return tensors_of() | {name: tensor}


Q = "layers.0.self_attn.q_proj.weight"
OUT_OF_RANGE = with_vocabulary(tensors_of(8), torch.arange(8)) | {"d2t": torch.full((8,), 200)}
REFUSED = {
    "missing LM head": (without("lm_head.weight"), {}, "it lacks the tensor lm_head.weight"),
    "missing fc": (without("fc.weight"), {}, "it lacks the tensor fc.weight"),
    "a model": ({"layers.0.mlp.up_proj.weight": torch.zeros(4, 4)}, {}, "it lacks the tensor fc.weight, and 11 others"),
    "biases": (changed("layers.0.self_attn.q_proj.bias", torch.zeros(64)), {}, "its products have biases"),
    "query norms": (changed("layers.0.self_attn.q_norm.weight", torch.ones(16)), {}, "it norms queries and keys"),
    "two layers": (changed("layers.1.mlp.up_proj.weight", torch.zeros(96, 64)), {}, "it has more than one layer"),
    "P-EAGLE": (changed("mask_hidden", torch.zeros(1, 1, 192)), {}, "it drafts all tokens at once"),
    "unknown": (changed("router.weight", torch.zeros(4)), {}, "tensors that no EAGLE-3 head has: router.weight"),
    "quantized": (changed("fc.weight", torch.zeros(64, 192, dtype=torch.int8)), {}, "in fp32, bf16 or fp16, found torch.int8"),
    "not finite": (changed("norm.weight", torch.full((64,), torch.nan)), {}, "norm.weight holds weights that are not finite"),
    "EAGLE-1": (changed("layers.0.self_attn.q_proj.weight", torch.zeros(64, 64)), {}, "as that of EAGLE-1 and 2 does"),
    "other keys": (changed("layers.0.self_attn.k_proj.weight", torch.zeros(32, 64)), {}, "read states of different sizes"),
    "two memories": (changed("fc.weight", torch.zeros(64, 128)), {}, "reads 2 states of a token"),
    "fc": (changed("fc.weight", torch.zeros(64, 100)), {}, r"expected fc.weight to read states of 64, found \(64, 100\)"),
    "d2t out of range": (OUT_OF_RANGE, {}, "expected different token ids from 0 to 127 in d2t, found 200 to 207"),
    "d2t too short": (changed("d2t", torch.zeros(5, dtype=torch.long)), {}, "each of the 128 rows of lm_head.weight, found 5"),
    "d2t of fractions": (changed("d2t", torch.zeros(128)), {}, "expected d2t as a list of whole numbers"),
    "another width": (tensors_of(), {"target_hidden_size": 128}, "its states have 64 numbers and those of its model 128"),
    "gelu": (tensors_of(), {"hidden_act": "gelu"}, "the activation of its MLP is 'gelu', not silu"),
    "rope": (tensors_of(), {"rope_scaling": {"rope_type": "longrope"}}, "found 'longrope'"),
    "heads": (tensors_of(), {"num_attention_heads": 5}, "5 heads do not fit queries of 64"),
    "no heads": (tensors_of(), {"num_attention_heads": None}, "expected num_attention_heads in config.json, found None"),
    "layer ids": (tensors_of(), {IDS: [1, 2]}, r"reads 3 states of a token, and config.json names the layers \[1, 2\]"),
    "wrong layer ids": (tensors_of(), {IDS: ["a"]}, "expected a list of layers"),
    "fc_norm": (tensors_of(), {"fc_norm": True}, "expected 3 norms fc_norm of one size before fc, found 0"),
    "biases of fc_norm": (
        tensors_of(fc_norm=True) | {"fc_norm.0.bias": torch.zeros(64)},
        {},
        r"its products have biases \(fc_norm.0.bias\)",
    ),
    "other parts of fc_norm": (
        tensors_of(fc_norm=True) | {"fc_norm.0.gate.weight": torch.ones(64)},
        {},
        "tensors that no EAGLE-3 head has: fc_norm.0.gate.weight",
    ),
    "more of fc_norm": (
        tensors_of(fc_norm=True) | {"fc_norm.3.weight": torch.ones(64)},
        {},
        "expected 3 norms fc_norm of one size before fc, found 4",
    ),
    "two norms": (tensors_of(fc_norm=True, norm_before_fc=True), {}, "it norms states before fc together"),
    "norm_before_fc": (tensors_of(), {"norm_before_fc": True}, "it lacks the tensor input_norm.weight"),
    "quantization": (tensors_of(), {"quantization_config": {"bits": 4}}, "holds quantized weights"),
    "another kind": (tensors_of(), {"speculators_model_type": "dflash"}, "a draft model of the kind 'dflash'"),
    "scalar queries": (changed(Q, torch.tensor(1.0)), {}, r"q_proj.weight with numbers along 2 axes, found \(\)"),
    "scalar LM head": (changed("lm_head.weight", torch.tensor(1.0)), {}, "expected lm_head.weight with numbers along 2 axes"),
    "flat LM head": (changed("lm_head.weight", torch.ones(64)), {}, "expected lm_head.weight with numbers along 2 axes"),
    "empty LM head": (changed("lm_head.weight", torch.ones(0, 64)), {}, r"along 2 axes, found \(0, 64\)"),
    "empty maps": (
        changed("lm_head.weight", torch.ones(0, 64)) | {"d2t": torch.zeros(0, dtype=torch.long)},
        {},
        "along . axes",
    ),
    "scalar t2d": (changed("t2d", torch.tensor(True)), {}, r"expected t2d with numbers along 1 axes, found \(\)"),
    "empty norm": (changed("norm.weight", torch.ones(0)), {}, r"expected norm.weight with numbers along 1 axes, found \(0,\)"),
    "eagle_config list": (tensors_of(), {"eagle_config": [1]}, r"expected names and values as eagle_config, found \[1\]"),
    "eagle_config word": (tensors_of(), {"eagle_config": "x"}, "expected names and values as eagle_config, found 'x'"),
    "rope word": (tensors_of(), {"rope_scaling": "linear"}, "expected names and values as rope_scaling, found 'linear'"),
    "rope list": (tensors_of(), {"rope_parameters": [1, 2]}, "expected names and values as rope_parameters"),
    "linear": (tensors_of(), {"rope_scaling": {"rope_type": "linear"}}, "cannot be computed .*factor"),
    "yarn": (tensors_of(), {"rope_scaling": {"rope_type": "yarn"}}, "cannot be computed"),
    "llama3": (tensors_of(), {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "cannot be computed .*low_freq_factor"),
    "factor": (tensors_of(), {"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "cannot be computed"),
    "no factor": (tensors_of(), {"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "not finite|cannot be computed"),
    "eps word": (
        tensors_of(),
        {"rms_norm_eps": "abc"},
        "expected a number above 0 as rms_norm_eps in config.json, found 'abc'",
    ),
    "eps NaN": (tensors_of(), {"rms_norm_eps": float("nan")}, "expected a number above 0 as rms_norm_eps .*, found nan"),
    "theta word": (tensors_of(), {"rope_theta": "abc"}, "expected a number above 0 as rope_theta in config.json, found 'abc'"),
    "theta below 0": (tensors_of(), {"rope_theta": -5.0}, "expected a number above 0 as rope_theta in config.json, found -5.0"),
    "context": (tensors_of(), {"max_position_embeddings": "x"}, "expected a number above 0 as max_position_embeddings"),
    "architectures": (
        tensors_of(),
        {"architectures": 5, "num_hidden_layers": 3, "draft_vocab_size": None},
        "holds 5 of 3 layers: expected an EAGLE-3 head of one",
    ),
    "two of a name": (
        tensors_of() | {"model.fc.weight": torch.zeros(64, 192)},
        {},
        "expected fc.weight once, found it with other values as model.fc.weight",
    ),
    "no block": (tensors_of(), {"speculators_model_type": "eagle3"}, "it lacks transformer_layer_config"),
}


@pytest.mark.invariant(10)
@pytest.mark.parametrize("case", REFUSED)
def test_a_folder_that_is_no_head_is_refused_in_a_line(case, tmp_path):
    tensors, config, said = REFUSED[case]
    write(tmp_path, config_of("original", **config), original(tensors))
    with pytest.raises(ValueError, match=said) as error:
        read_folder(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert str(error.value).rsplit(". ", 1)[1].startswith(("Give", "Get")), "and says what to do next"


LONG = "\x1b[2J" + 10_000 * "x\n"


@pytest.mark.parametrize(
    "name", ["hidden_act", "speculators_model_type", "num_attention_heads", "max_position_embeddings", IDS]
)
def test_an_error_repeats_little_of_a_folder_on_one_line(name, tmp_path):
    write(tmp_path, config_of("original", **{name: LONG}), original(tensors_of()))
    with pytest.raises(ValueError, match="Give|Get") as caught:
        read_folder(tmp_path)
    assert len(str(caught.value)) < 700 + len(str(tmp_path)) and str(caught.value).isprintable()


def test_hostile_truncated_and_mislabelled_files_are_refused(tmp_path):
    folder = a_head(tmp_path / "head")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for content in (whole[:1000], b"", b"\x80\x04hello", pickle.dumps({"fc.weight": 1})):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match="model.safetensors was not loaded: it is truncated, damaged"):
            read_folder(folder)
    weights.unlink()
    pickled = folder / "pytorch_model.bin"
    torch.save({"fc.weight": Hostile(tmp_path / "made")}, pickled)
    with pytest.raises(ValueError, match="pytorch_model.bin was not loaded: .* or holds more than tensors"):
        read_folder(folder)
    assert not (tmp_path / "made").exists()
    torch.save([1, 2], pickled)
    with pytest.raises(ValueError, match="expected tensors by name, found list"):
        read_folder(folder)
    pickled.write_bytes(whole)  # safetensors under the name of a pickle
    with pytest.raises(ValueError, match="pytorch_model.bin was not loaded"):
        read_folder(folder)
    pickled.unlink()
    with pytest.raises(FileNotFoundError, match="there are no weights in .*: expected model.safetensors or pytorch_model.bin"):
        read_folder(folder)
    for text, said in (
        ("{", "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[1]", "expected names and values, found list"),
    ):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_folder(folder)


@pytest.mark.parametrize(
    ("name", "tensor", "said"),
    [
        (0, torch.zeros(1), "expected tensors by name, found Tensor as 0"),
        ("fc.weight", torch.ones(64, 192).to_sparse(), "expected fc.weight with all its numbers"),
        ("fc.weight", torch.zeros(64, 192, device="meta"), "expected fc.weight with all its numbers"),
        ("lm_head.weight", torch.zeros(1).expand(3_000_000, 3_000_000), "expected lm_head.weight with all its numbers"),
    ],
    ids=["number as name", "sparse", "meta", "expanded"],
)
def test_pickled_tensors_without_numbers_are_refused(name, tensor, said, tmp_path):
    write(tmp_path, config_of("original"), original(tensors_of()) | {name: tensor}, "bin")
    with pytest.raises(ValueError, match=f"pytorch_model.bin was not loaded: {said}.*Get it again") as error:
        read_folder(tmp_path)
    assert "\n" not in str(error.value)


def test_a_tensor_that_comes_twice_with_the_same_values_is_one(tmp_path):
    tensors = original(tensors_of())
    write(tmp_path, config_of("original"), tensors | {"model.fc.weight": tensors["fc.weight"].clone()})
    assert torch.equal(read_folder(tmp_path).exits[0].head.fc.weight, tensors["fc.weight"])


@pytest.mark.parametrize(("name", "value"), [("eps", float("nan")), ("eps", None), ("rope_theta", -5.0)])
def test_a_head_with_numbers_that_are_none_is_not_saved(name, value, deep, tmp_path):
    file = tried(a_head(tmp_path / "head"), deep)
    head = file.exits[0].head
    head.sizes = replace(head.sizes, **{name: value})
    with pytest.raises(ValueError, match=f"expected a number above 0 as {name}, found"):
        file.save(tmp_path / "router.safetensors")


def test_a_folder_without_anything_and_a_hub_out_of_reach_are_said(llama, tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="there is no router file and no EAGLE-3 head in .*: expected"):
        TIDE(llama, tmp_path)
    monkeypatch.setattr("TIDE.routing.source.hub_trouble", lambda: "HF_HUB_OFFLINE is set")
    with pytest.raises(
        OSError, match="cannot load exits from 'nobody/eagle3-head': there is no such file or folder here, the hub"
    ):
        TIDE(llama, "nobody/eagle3-head")
    with pytest.raises(FileNotFoundError, match="there is no router file nowhere/router.safetensors"):
        TIDE(llama, "nowhere/router.safetensors")


def a_model(folder):
    """The configuration of a model, as it is beside its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(architectures=["Qwen3ForCausalLM"], num_hidden_layers=36)))
    return folder


def test_a_model_is_not_taken_for_a_head(tmp_path):
    with pytest.raises(ValueError, match="holds Qwen3ForCausalLM of 36 layers: expected an EAGLE-3 head of one"):
        read_folder(a_model(tmp_path / "model"))


def test_a_head_of_the_hub_is_fetched_and_a_model_is_not(llama, tmp_path, monkeypatch):
    asked = []
    there = {"my-org/head": a_head(tmp_path / "head"), "my-org/model": a_model(tmp_path / "model")}

    def download(name, allow_patterns, local_files_only):
        asked.append((name, allow_patterns))
        if name not in there:
            raise RepositoryNotFoundError("404\nlong story", response=Response(404, request=Request("GET", "https://hub")))
        return str(there[name])

    monkeypatch.setattr("TIDE.routing.source.hub_trouble", lambda: None)
    monkeypatch.setattr("TIDE.routing.source.snapshot_download", download)
    with TIDE(llama, "my-org/head") as engine:
        assert engine.file.facts["source"] == "my-org/head"
    with pytest.raises(ValueError, match="Give the head, not its model"):
        TIDE(llama, "my-org/model")
    assert ["*.bin" in patterns for _, patterns in asked] == [False, True, False]
    with pytest.raises(OSError, match="cannot load exits from 'my-org/none': there is no such repository, or it is not public"):
        TIDE(llama, "my-org/none")


def test_heads_for_other_models_are_refused_with_both_sizes(deep, tmp_path):
    table = torch.randn(128, 64)
    cases = {
        "states of 32, this model has states of 64": (config_of("original", dim=32), tensors_of(dim=32)),
        "a vocabulary of 100 tokens, this model has 128": (config_of("original"), tensors_of(100)),
        "a vocabulary of 500 tokens, this model has 128": (
            config_of("original"),
            with_vocabulary(tensors_of(8), torch.arange(8), 500),
        ),
        "sees states of the depths 2, 16, 29, this model has 8 layers": (
            config_of("speculators", **{IDS: [2, 16, 29]}),
            tensors_of(),
        ),
        "an embedding of its own, which is not that of this model": (
            config_of("original"),
            tensors_of() | {"embed_tokens.weight": table},
        ),
        "has an embedding of its own": (config_of("original"), tensors_of() | {"embed_tokens.weight": table[:, :32].clone()}),
    }
    for number, (said, (config, tensors)) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=said) as error:
            tried(write(tmp_path / str(number), config, tensors), deep)
        assert "\n" not in str(error.value) and "or calibrate one" in str(error.value)


@pytest.mark.parametrize("factor", [0.0, -1.0])
def test_an_embedding_without_content_or_sign_of_the_models_own_is_another_one(factor, deep, tmp_path):
    own = factor * deep.get_input_embeddings().weight.detach()
    folder = write(tmp_path, config_of("original"), original(tensors_of()) | {"embed_tokens.weight": own})
    with pytest.raises(ValueError, match="has an embedding of its own, which is not that of this model"):
        tried(folder, deep)


@pytest.mark.parametrize("name", ["bloom", "gpt2", "opt", "opt-projected"])
def test_models_that_change_embeddings_before_their_first_layer_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="this model changes them before its first layer"):
        tried(a_head(tmp_path), build(name))
