"""Folders with EAGLE-3 heads: which reading is taken, what is refused, and the line that says why."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from httpx import Request, Response
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from eagle_heads import a_head, config_of, fitted, original, tensors_of, with_vocabulary, write
from families import build
from TIDE import TIDE, RouterFile, TIDEConfig
from TIDE.adapters.adapter import ModelAdapter
from TIDE.routing.eagle3.imported import read_folder
from TIDE.routing.source import load_router

IDS = "eagle_aux_hidden_state_layer_ids"


def tried(folder, model) -> RouterFile:
    adapter = ModelAdapter(model)
    try:
        return load_router(folder).for_model(adapter)
    finally:
        adapter.close()


# ---- readings ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep():
    """A model of eight layers, for which EAGLE-3 has depths of its own: 2, 4, 5."""
    return build("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def known(deep):
    """Tensors of a head that knows the model at depths 1, 3, 6 and carries its normed output from draft to draft."""
    return fitted(deep, (1, 3, 6), norm_output=True)


@pytest.mark.parametrize("ids", [[0, 2, 5], [1, 3, 6]], ids=["outputs", "inputs"])
def test_layer_ids_theta_and_norm_output_are_settled_by_agreement(ids, deep, known, tmp_path, caplog):
    config = config_of("original", eagle_config={IDS: ids}, rope_theta=1e6)  # neither base nor norm_output is right
    file = tried(write(tmp_path, config, original(known)), deep)
    sizes = file.exits[0].sizes
    assert (sizes.depths, sizes.rope_theta, sizes.norm_output) == ((1, 3, 6), 10000.0, True)
    assert len(file.facts["readings"]) == 8
    assert "Its configuration can be read in 8 ways" in caplog.text
    assert "rope_theta 10000.0 instead of 1000000.0" in caplog.text and "norm_output True instead of False" in caplog.text
    assert file.exits[0].figures["agreement_by_step"][2] > 0.5
    assert file.fingerprint is not None and file.fingerprint.num_layers == 8


def test_what_the_configuration_says_is_kept_where_nothing_is_clearly_better(deep, tmp_path):
    config = config_of("original", eagle_config={IDS: [0, 2, 5]}, rope_theta=1e6)
    sizes = tried(write(tmp_path, config, original(tensors_of())), deep).exits[0].sizes
    assert (sizes.depths, sizes.rope_theta, sizes.norm_output) == ((1, 3, 6), 1e6, False)


def test_without_layer_ids_the_depths_are_those_of_eagle3(deep, tmp_path):
    assert tried(write(tmp_path, config_of("speculators"), tensors_of()), deep).exits[0].sizes.depths == (2, 4, 5)


def test_a_head_of_another_model_is_told_from_its_own(deep, tmp_path, caplog):
    tried(a_head(tmp_path, [1, 3, 6]), deep)
    assert "It was probably made for another model. The text stays right." in caplog.text


def test_shapes_win_over_the_configuration(deep, tmp_path):
    wrong = dict(head_dim=80, num_key_value_heads=4, intermediate_size=7, hidden_size=99, draft_vocab_size=5)
    head = read_folder(a_head(tmp_path, [1, 3, 6], **wrong)).exits[0].head
    assert (head.sizes.head_dim, head.sizes.kv_heads, head.sizes.inner_dim, head.sizes.hidden_dim) == (16, 2, 96, 64)
    assert head.sizes.vocabulary == 128


def test_an_embedding_that_is_the_models_own_is_no_hindrance(deep, tmp_path):
    own = deep.get_input_embeddings().weight.detach()
    folder = write(tmp_path, config_of("original"), original(tensors_of()) | {"embed_tokens.weight": own.bfloat16()})
    assert tried(folder, deep).strategy == "eagle3"


def test_a_tried_head_is_saved_and_loaded_as_a_router_file(deep, known, tmp_path):
    file = tried(write(tmp_path / "head", config_of("original", **{IDS: [1, 3, 6]}), original(known)), deep)
    file.save(tmp_path / "router.safetensors")
    again = RouterFile.load(tmp_path / "router.safetensors")
    assert again.as_dict() == file.as_dict()
    assert again.exits[0].sizes == file.exits[0].sizes
    for name, tensor in file.exits[0].head.state_dict().items():
        assert torch.equal(tensor, again.exits[0].head.state_dict()[name])
    another = build("llama", num_hidden_layers=8)
    torch.nn.init.normal_(another.lm_head.weight)
    with pytest.raises(ValueError, match="They differ in"):
        TIDE(another, tmp_path / "router.safetensors")


def test_a_head_in_8_bits_still_agrees(deep, known, tmp_path):
    config = config_of("speculators", **{IDS: [1, 3, 6]}, norm_output=True)
    tried(write(tmp_path / "head", config, known), deep).save(tmp_path / "router.safetensors", compress=True)
    start = torch.tensor([[1]])
    with TIDE(deep, tmp_path / "router.safetensors", TIDEConfig(exit_threshold=0.0)) as engine:
        options = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert torch.equal(engine.generate(start, **options), deep.generate(start, **options))


def test_an_untried_head_is_not_saved(tmp_path):
    with pytest.raises(ValueError, match="expected a head of strategy 'eagle3', found UntriedHead"):
        load_router(a_head(tmp_path)).save(tmp_path / "router.safetensors")


# ---- what is refused --------------------------------------------------------------------------------------------------------


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
    "two norms": (tensors_of(fc_norm=True, norm_before_fc=True), {}, "it norms states before fc together"),
    "norm_before_fc": (tensors_of(), {"norm_before_fc": True}, "it lacks the tensor input_norm.weight"),
    "quantization": (tensors_of(), {"quantization_config": {"bits": 4}}, "holds quantized weights"),
    "another kind": (tensors_of(), {"speculators_model_type": "dflash"}, "a draft model of the kind 'dflash'"),
    "no block": (tensors_of(), {"speculators_model_type": "eagle3"}, "it lacks transformer_layer_config"),
}


@pytest.mark.invariant(10)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_used_is_refused_in_a_line(case, tmp_path):
    tensors, config, said = REFUSED[case]
    write(tmp_path, config_of("original", **config), original(tensors))
    with pytest.raises(ValueError, match=said) as error:
        read_folder(tmp_path)
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)
    assert str(error.value).rsplit(". ", 1)[1].startswith(("Give", "Get")), "and says what to do next"


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
    for text, said in (("{", "expected JSON"), ("[1]", "expected names and values, found list")):
        (folder / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            read_folder(folder)


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
        assert engine.policy.file.facts["source"] == "my-org/head"
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


@pytest.mark.parametrize("name", ["bloom", "gpt2", "opt", "opt-projected"])
def test_models_that_change_embeddings_before_their_first_layer_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="this model changes them before its first layer"):
        tried(a_head(tmp_path), build(name))


# ---- export -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_an_exported_head_is_the_one_that_is_read_again(layout, deep, tmp_path):
    some = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:40]
    tensors = with_vocabulary(tensors_of(40, fc_norm=True), some)
    config = config_of("original", **{IDS: [1, 3, 6]}, norm_output=True)
    file = tried(write(tmp_path / "in", config, original(tensors)), deep)
    file.export(tmp_path / "out", layout, "my-org/my-model")
    again = tried(tmp_path / "out", deep)
    assert again.exits[0].sizes == file.exits[0].sizes
    assert torch.equal(again.vocabulary, file.vocabulary)
    for name, tensor in file.exits[0].head.state_dict().items():
        assert torch.equal(tensor, again.exits[0].head.state_dict()[name]), name


def test_names_and_fields_are_those_that_servers_look_for(deep, tmp_path):
    file = tried(a_head(tmp_path / "in", [1, 3, 6]), deep)
    file.export(tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config[IDS] == [1, 3, 6], "depths, as vLLM counts"
    assert config["eagle_config"][IDS] == [0, 2, 5], "outputs of layers, as SGLang counts"
    assert config["tie_word_embeddings"] is False and config["draft_vocab_size"] == config["vocab_size"] == 128
    assert set(load_file(tmp_path / "vllm" / "model.safetensors")) == set(original(tensors_of()))
    file.export(tmp_path / "speculators", "speculators", "my-org/my-model")
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["transformer_layer_config"]["head_dim"] == 16
    assert config["speculators_config"]["verifier"] == dict(name_or_path="my-org/my-model", architectures=["LlamaForCausalLM"])
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert set(load_file(tmp_path / "speculators" / "model.safetensors")) == set(tensors_of())


def test_what_a_layout_cannot_say_is_refused_with_the_reason(deep, tmp_path):
    from router_files import made

    new = tmp_path / "new"
    for strategy, said in (("memory", "a memory head joins .*, and its exits at depths 1, 2, 3 are inside the model"),):
        with pytest.raises(ValueError, match=f"cannot be exported for vllm: {said}"):
            made(strategy).export(new)
    for strategy in ("lens", "identity"):
        with pytest.raises(ValueError, match="Export an EAGLE-3 head"):
            made(strategy).export(new)
    untried = load_router(a_head(tmp_path / "untried", [1, 3, 6]))
    with pytest.raises(ValueError, match="its head was not tried on its model"):
        untried.export(new)
    file = tried(a_head(tmp_path / "residual", [1, 3, 6], layout="speculators", norm_before_residual=True), deep)
    with pytest.raises(ValueError, match="SGLang does not know norm_before_residual"):
        file.export(new, "sglang")
    with pytest.raises(ValueError, match="layout must be one of"):
        file.export(new, "tensorrt")
    last = tried(a_head(tmp_path / "last", [1, 3, 8]), deep)
    with pytest.raises(ValueError, match="SGLang hands out states between layers only"):
        last.export(new, "sglang")
    gemma = tried(a_head(tmp_path / "gemma"), build("gemma3"))
    with pytest.raises(ValueError, match="Gemma3ForCausalLM hands out no states"):
        gemma.export(new)
    assert not new.exists()
    with pytest.raises(FileExistsError, match="expected a folder that is new or empty"):
        file.export(tmp_path / "residual")


def test_a_folder_with_a_router_file_is_that_file(llama, tmp_path):
    from router_files import made

    made("memory").save(tmp_path / "router.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert load_router(tmp_path).strategy == "memory"
