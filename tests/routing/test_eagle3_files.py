"""Folders with EAGLE-3 heads: which reading is taken, and how they are saved and exported."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle_heads import a_head, config_of, fitted, original, tensors_of, tried, with_vocabulary, write
from families import build
from TIDE import TIDE, RouterFile, TIDEConfig
from TIDE.routing.eagle3.export import export
from TIDE.routing.eagle3.head import frequencies
from TIDE.routing.eagle3.imported import read_folder
from TIDE.routing.source import load_router

IDS = "eagle_aux_hidden_state_layer_ids"


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


def test_the_configuration_decides_where_no_reading_is_clearly_better(deep, tmp_path):
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


def test_a_kind_of_null_is_no_kind(tmp_path):
    config = config_of("original", **{IDS: [1, 3, 6]}) | {"speculators_model_type": None}
    folder = write(tmp_path, config, original(tensors_of()))
    assert read_folder(folder).facts["origin"] == "EAGLE-3 head, original layout"


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


# ---- export -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_an_exported_head_is_the_one_that_is_read_again(layout, deep, tmp_path):
    some = torch.randperm(128, generator=torch.Generator().manual_seed(1))[:40]
    tensors = with_vocabulary(tensors_of(40, fc_norm=True), some)
    config = config_of("original", **{IDS: [1, 3, 6]}, norm_output=True)
    file = tried(write(tmp_path / "in", config, original(tensors)), deep)
    export(file, tmp_path / "out", layout, "my-org/my-model")
    again = tried(tmp_path / "out", deep)
    assert again.exits[0].sizes == file.exits[0].sizes
    assert torch.equal(again.vocabulary, file.vocabulary)
    for name, tensor in file.exits[0].head.state_dict().items():
        assert torch.equal(tensor, again.exits[0].head.state_dict()[name]), name


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        (dict(rope_type="linear", factor=2.0), 4096),
        (
            dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=512,
            ),
            4096,
        ),
        (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=512), 4096),
        (dict(rope_type="yarn", factor=4.0), 512),
    ],
    ids=["linear", "llama3", "yarn", "yarn by its own context"],
)
def test_an_exported_head_has_the_models_context_unless_its_rope_depends_on_its_own(rope, context, tmp_path):
    head = a_head(tmp_path / "head", [2, 4, 5], max_position_embeddings=512, rope_scaling=rope)
    before = frequencies(load_router(head).exits[0].head.sizes)
    file = tried(head, build("llama", num_hidden_layers=8, max_position_embeddings=4096))
    export(file, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "config.json").read_text())["max_position_embeddings"] == context
    after = frequencies(load_router(tmp_path / "new").exits[0].head.sizes)
    assert torch.equal(before[0], after[0]) and before[1] == after[1], "it turns as before"


def test_names_and_fields_are_those_that_servers_look_for(deep, tmp_path):
    file = tried(a_head(tmp_path / "in", [1, 3, 6]), deep)
    export(file, tmp_path / "vllm")
    config = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config[IDS] == [1, 3, 6], "depths, as vLLM counts"
    assert config["eagle_config"][IDS] == [0, 2, 5], "outputs of layers, as SGLang counts"
    assert config["tie_word_embeddings"] is False and config["draft_vocab_size"] == config["vocab_size"] == 128
    assert set(load_file(tmp_path / "vllm" / "model.safetensors")) == set(original(tensors_of()))
    export(file, tmp_path / "speculators", "speculators", "my-org/my-model")
    config = json.loads((tmp_path / "speculators" / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and config["transformer_layer_config"]["head_dim"] == 16
    assert config["speculators_config"]["verifier"] == dict(name_or_path="my-org/my-model", architectures=["LlamaForCausalLM"])
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert set(load_file(tmp_path / "speculators" / "model.safetensors")) == set(tensors_of())


@pytest.mark.parametrize(
    ("name", "known"),
    [("my-org/my-model", None), ("/models/my-model", "the last part of its path, 'my-model'"), ("", "none")],
)
def test_speculators_name_the_model_in_full_or_are_refused(name, known, tmp_path):
    """vLLM loads model and tokenizer by that name."""
    model = build("llama", num_hidden_layers=8)
    model.config._name_or_path = name
    tried(a_head(tmp_path / "in", [1, 3, 6]), model).save(tmp_path / "head.safetensors")
    file = RouterFile.load(tmp_path / "head.safetensors")
    if known is not None:
        with pytest.raises(ValueError, match=rf"of that this file has {known}\. Give its hub id or path \(--model, model=\)"):
            export(file, tmp_path / "new", "speculators")
        assert not (tmp_path / "new").exists()
    export(file, tmp_path / "new", "speculators", None if known is None else "a/b")
    verifier = json.loads((tmp_path / "new" / "config.json").read_text())["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == (name if known is None else "a/b")
    export(file, tmp_path / "vllm")  # a layout that does not name it


def test_heads_that_a_layout_cannot_hold_are_refused_with_the_reason(deep, tmp_path):
    from router_files import made

    new = tmp_path / "new"
    for strategy, said in (("memory", "a memory head joins .*, and its exits at depths 1, 2, 3 are inside the model"),):
        with pytest.raises(ValueError, match=f"cannot be exported for vllm: {said}"):
            export(made(strategy), new)
    for strategy in ("lens", "identity"):
        with pytest.raises(ValueError, match="Make an EAGLE-3 head: tide calibrate MODEL --strategy eagle3"):
            export(made(strategy), new)
    untried = load_router(a_head(tmp_path / "untried", [1, 3, 6]))
    with pytest.raises(ValueError, match="its head was not tried on its model"):
        export(untried, new)
    file = tried(a_head(tmp_path / "residual", [1, 3, 6], layout="speculators", norm_before_residual=True), deep)
    with pytest.raises(ValueError, match="SGLang does not know norm_before_residual"):
        export(file, new, "sglang")
    with pytest.raises(ValueError, match="layout must be one of"):
        export(file, new, "tensorrt")
    last = tried(a_head(tmp_path / "last", [1, 3, 8]), deep)
    with pytest.raises(ValueError, match="SGLang hands out states between layers only"):
        export(last, new, "sglang")
    assert not new.exists()
    with pytest.raises(FileExistsError, match="expected a folder that is new or empty"):
        export(file, tmp_path / "residual")


def of(architecture, deep, folder):
    """A head for a model of another class, as far as a file says."""
    file = tried(a_head(folder, [1, 3, 6]), deep)
    return replace(file, fingerprint=replace(file.fingerprint, architecture=architecture, name="a/b"))


@pytest.mark.parametrize(
    ("architecture", "servers"),
    [
        ("LlamaForCausalLM", {"vllm", "sglang", "speculators"}),
        ("Starcoder2ForCausalLM", {"vllm", "speculators"}),
        ("Gemma3ForCausalLM", {"sglang"}),
        ("Gemma2ForCausalLM", set()),
        ("GPTNeoXForCausalLM", set()),
    ],
)
def test_a_head_is_written_for_servers_that_take_its_model_only(architecture, servers, deep, tmp_path, caplog):
    file = of(architecture, deep, tmp_path / "in")
    caplog.clear()
    for layout in ("vllm", "sglang", "speculators"):
        if layout in servers:
            export(file, tmp_path / layout, layout)
            continue
        with pytest.raises(
            ValueError, match=f"hands out no states of {architecture} for EAGLE-3 heads. Serve it with"
        ) as error:
            export(file, tmp_path / layout, layout)
        assert not (tmp_path / layout).exists()
        other = next(iter(servers & {"vllm", "sglang"}), None)
        assert str(error.value).endswith(f" or use --layout {other}." if other else "tide serve.")
    assert not caplog.records


def test_a_head_for_a_model_that_the_table_does_not_know_is_written_with_a_warning(deep, tmp_path, caplog):
    export(of("OtherForCausalLM", deep, tmp_path / "in"), tmp_path / "new", "sglang")
    assert "it is not known here whether SGLang hands out states of OtherForCausalLM" in caplog.text
    assert (tmp_path / "new" / "config.json").exists()


def test_a_folder_with_a_router_file_is_that_file(llama, tmp_path):
    from router_files import made

    made("memory").save(tmp_path / "router.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert load_router(tmp_path).strategy == "memory"
