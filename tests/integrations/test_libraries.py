"""Models that others have changed: PEFT's adapters, quantized and offloaded weights. TIDE writes what they write themselves."""

from __future__ import annotations

import importlib.util
import logging
import warnings

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import TIDE
from families import build
from gguf_files import write_gguf
from policies import Everyone
from router_files import made
from TIDE.adapters.snapshot import ModelSnapshot
from TIDE.adapters.weights import is_quantized
from TIDE.engine import engine as engine_module
from TIDE.routing.policies import policy_for

has_numba = importlib.util.find_spec("numba") is not None
OPTIONS = dict(max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0)


def assert_writes_what_the_model_writes(engine, prompts):
    ids, mask = prompts
    expected = engine.model.generate(ids, attention_mask=mask, **OPTIONS)
    assert torch.equal(engine.generate(ids, attention_mask=mask, **OPTIONS), expected)
    assert engine.last_stats.drafted > 0
    return expected.tolist()


# ---- adapters ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


def lora(peft, *modules, seed=0):
    torch.manual_seed(seed)
    return peft.LoraConfig(r=4, target_modules=list(modules), init_lora_weights=False, task_type="CAUSAL_LM")


@pytest.mark.parametrize("modules", [("q_proj", "down_proj"), ("v_proj", "lm_head")])
def test_a_model_with_adapters_writes_what_it_writes_through_generate(modules, peft, llama, prompts):
    ids, mask = prompts
    without = llama.generate(ids, attention_mask=mask, **OPTIONS)
    adapted = peft.get_peft_model(llama, lora(peft, *modules)).eval()
    expected = adapted.generate(input_ids=ids, attention_mask=mask, **OPTIONS)
    assert not torch.equal(expected, without)
    with TIDE.TIDE(adapted, Everyone(2)) as engine:
        assert assert_writes_what_the_model_writes(engine, prompts) == expected.tolist()
        asked = dict(input_ids=ids, attention_mask=mask, custom_generate=TIDE.custom_generate, tide=engine)
        assert torch.equal(adapted.generate(**asked, **OPTIONS), expected)
        with adapted.disable_adapter():
            assert assert_writes_what_the_model_writes(engine, prompts) == without.tolist()
    assert torch.equal(adapted.generate(input_ids=ids, attention_mask=mask, **OPTIONS), expected)


@pytest.mark.parametrize("modules", [("q_proj",), ("lm_head", "up_proj"), ("lm_head",), ("embed_tokens",)])
def test_adapters_may_come_and_go_and_be_merged_while_there_is_an_engine(modules, peft, llama, prompts):
    with TIDE.TIDE(llama, Everyone(1, 3)) as engine:
        texts = [assert_writes_what_the_model_writes(engine, prompts)]
        adapted = peft.get_peft_model(llama, lora(peft, *modules)).eval()
        texts.append(assert_writes_what_the_model_writes(engine, prompts))
        adapted.add_adapter("other", lora(peft, *modules, seed=5))
        adapted.set_adapter("other")
        texts.append(assert_writes_what_the_model_writes(engine, prompts))
        adapted.merge_adapter()
        assert assert_writes_what_the_model_writes(engine, prompts) == texts[-1]
        adapted.unmerge_adapter()
        adapted.set_adapter("default")
        assert assert_writes_what_the_model_writes(engine, prompts) == texts[1]
        assert adapted.merge_and_unload() is llama
        assert assert_writes_what_the_model_writes(engine, prompts) == texts[1]
        assert engine.runner.name == "numba" or not has_numba, "a model that may be fused again is"
    assert len({str(text) for text in texts}) == 3


def test_graphs_would_notice_what_is_done_to_adapters(peft, llama):
    """A graph repeats what was done when it was captured, so its owner asks whether the model's parts are unchanged."""
    adapted = peft.get_peft_model(llama, lora(peft, "q_proj")).eval()
    adapted.add_adapter("other", lora(peft, "q_proj"))
    scaled = llama.model.layers[1].self_attn.q_proj

    def changed(change):
        parts = ModelSnapshot(llama)
        assert parts.matches(llama)
        change()
        return not parts.matches(llama)

    assert changed(lambda: adapted.set_adapter("other"))
    assert changed(adapted.base_model.disable_adapter_layers)
    assert changed(adapted.base_model.enable_adapter_layers)
    assert changed(lambda: scaled.set_scale("other", 3.0))
    assert changed(adapted.merge_adapter)


def test_adapters_that_change_prompts_are_refused(peft, llama, plain, tmp_path):
    adapted = peft.get_peft_model(llama, peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")).eval()
    for use in (TIDE.TIDE, lambda model: TIDE.calibrate(model, plain, tmp_path / "r.safetensors")):
        with pytest.raises(ValueError, match=r"adapter 'default' is .*PROMPT_TUNING.*Expected adapters inside them"):
            use(adapted)


def test_adapters_that_only_the_wrapper_feeds_are_refused(peft, llama):
    adapted = peft.get_peft_model(llama, lora(peft, "q_proj")).eval()
    adapted.peft_config["default"].peft_type = peft.PeftType.XLORA
    with pytest.raises(ValueError, match=r"adapter 'default' is .*XLORA: it works from outside"):
        TIDE.TIDE(adapted)


@pytest.mark.parametrize("kind", ["norms", "the last norm"])
def test_adapters_around_norms_run_as_they_are(kind, peft, llama, prompts):
    settings = dict(target_modules=["norm"]) if kind == "the last norm" else {}
    adapted = peft.get_peft_model(llama, peft.LNTuningConfig(task_type="CAUSAL_LM", **settings)).eval()
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "ln_tuning" in name:
                weight.mul_(1 + torch.rand(weight.shape, generator=torch.Generator().manual_seed(1)))
    with TIDE.TIDE(adapted, Everyone(2)) as engine:
        assert_writes_what_the_model_writes(engine, prompts)


def test_a_conversation_starts_anew_when_adapters_are_switched(peft, llama):
    adapted = peft.get_peft_model(llama, lora(peft, "k_proj", "v_proj")).eval()
    ids = torch.randint(3, 100, (1, 20), generator=torch.Generator().manual_seed(4))
    with TIDE.TIDE(adapted) as engine:
        conversation = TIDE.Conversation(engine)
        for _ in range(2):
            expected = llama.generate(ids, **OPTIONS)[0, ids.shape[1] :].tolist()
            assert list(conversation.stream(ids, **OPTIONS)) == expected
        with adapted.disable_adapter():
            other = llama.generate(ids, **OPTIONS)[0, ids.shape[1] :].tolist()
            assert list(conversation.stream(ids, **OPTIONS)) == other != expected


def test_an_adapted_model_is_analyzed_as_it_is(peft, writer, plain):
    adapted = peft.get_peft_model(build("llama", max_position_embeddings=1024), lora(peft, "o_proj")).eval()
    found = [TIDE.analyze(model, plain, samples=2, heads=False, quick=True).rows for model in (adapted, writer)]
    assert found[0] != found[1]


# ---- quantized --------------------------------------------------------------------------------------------------------------


def test_a_gguf_file_runs_fused_like_any_other_model(plain, llama, prompts, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(tmp_path / "tiny.gguf", llama, plain)
    model, tokenizer = TIDE.load_model(tmp_path / "tiny.gguf", device="cpu")
    assert tokenizer.vocab_size == llama.config.vocab_size
    torch.testing.assert_close(model.lm_head.weight, llama.lm_head.weight, rtol=0, atol=0.01)
    with TIDE.TIDE(model, Everyone(2)) as engine:
        assert engine.runner.name == "numba" or not has_numba
        assert_writes_what_the_model_writes(engine, prompts)


def test_weights_quantized_by_torchao_stay_so(llama, prompts):
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(llama, torchao.Int8WeightOnlyConfig())
    kept = type(llama.model.layers[0].mlp.up_proj.weight)
    assert is_quantized(llama) and not is_quantized(build("llama"))
    with TIDE.TIDE(llama, Everyone(2)) as engine:
        assert engine.runner.name == "modules"
        assert_writes_what_the_model_writes(engine, prompts)
    assert type(llama.model.layers[0].mlp.up_proj.weight) is kept is not nn.Parameter


@pytest.mark.parametrize("bits", [4, 8])
def test_weights_quantized_by_bitsandbytes_stay_so(bits, prompts, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    build("llama", intermediate_size=128).save_pretrained(tmp_path)  # with AVX-512 it wants whole blocks of 64
    asked = BitsAndBytesConfig(load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=asked, dtype=torch.float32, device_map={"": "cpu"}
    ).eval()
    kind = bitsandbytes.nn.Linear4bit if bits == 4 else bitsandbytes.nn.Linear8bitLt
    assert type(model.model.layers[0].mlp.up_proj) is kind and is_quantized(model)
    with warnings.catch_warnings(), TIDE.TIDE(model, Everyone(2)) as engine:
        warnings.simplefilter("ignore")  # it says on every call that it casts
        assert engine.runner.name == "modules"
        assert_writes_what_the_model_writes(engine, prompts)


class Together(nn.Linear):
    """Rounds what it is given to 4 bits of the largest number in it: a token's result depends on those beside it."""

    def forward(self, x):
        step = x.abs().max() / 8
        return super().forward((x / step).round() * step)


def test_a_model_whose_tokens_are_not_alone_is_named(llama, monkeypatch, caplog):
    llama.model.layers[2].mlp.up_proj.__class__ = Together
    monkeypatch.setattr(engine_module, "is_quantized", lambda model: True)
    with caplog.at_level(logging.WARNING), TIDE.TIDE(llama) as engine:
        assert engine.generate(torch.tensor([[5, 6, 7]]), **OPTIONS).shape == (1, 13)
    assert "layer 2 (LlamaDecoderLayer) of this quantized LlamaForCausalLM gives a token other states" in caplog.text


# ---- elsewhere --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu", "disk", "some on disk"])
def test_offloaded_models_run_as_they_are(place, llama, prompts, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    if place == "cpu":
        accelerate.cpu_offload(llama, execution_device="cpu")
    elif place == "disk":
        accelerate.disk_offload(llama, tmp_path, execution_device="cpu")
    else:
        parts = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
        layers = {f"model.layers.{layer}": "disk" if layer > 1 else "cpu" for layer in range(4)}
        accelerate.dispatch_model(llama, {**parts, **layers}, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    with TIDE.TIDE(llama, Everyone(2)) as engine:
        assert engine.runner.name == "modules"
        assert_writes_what_the_model_writes(engine, prompts)
    made("memory").save(tmp_path / "own.safetensors")
    with TIDE.TIDE(llama, tmp_path / "own.safetensors") as engine:  # its weights cannot be compared, its sizes fit
        assert_writes_what_the_model_writes(engine, prompts)


# ---- exchanged --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["layer", "embedding", "norm"])
def test_an_exchanged_layer_embedding_or_norm_is_noticed(which, llama, prompts):
    other = build("llama")
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(1 + torch.rand(weight.shape, generator=torch.Generator().manual_seed(3)))
    with TIDE.TIDE(llama, Everyone(0, 2)) as engine:
        before = assert_writes_what_the_model_writes(engine, prompts)
        if which == "layer":
            llama.model.layers[1] = other.model.layers[1]
        elif which == "embedding":
            llama.model.embed_tokens = other.model.embed_tokens
        else:
            llama.model.norm = other.model.norm
        assert assert_writes_what_the_model_writes(engine, prompts) != before


@pytest.mark.parametrize("how", ["exchanged", "changed in place"])
def test_exits_follow_an_lm_head(how, llama, prompts):
    """On a CPU exits have a copy of it in 8 bits."""
    ids, _ = prompts
    config = TIDE.TIDEConfig(mode="fast", exit_threshold=0.0, max_exit_share=1.0)
    other = torch.randn(llama.lm_head.weight.shape, generator=torch.Generator().manual_seed(2))
    with TIDE.TIDE(llama) as engine:
        policy = policy_for(made("lens"), engine.adapter)
    with TIDE.TIDE(llama, policy, config) as engine:
        before = engine.generate(ids[2:], **OPTIONS)
        if how == "exchanged":
            llama.lm_head = nn.Linear(*other.shape[::-1], bias=False)
        with torch.no_grad():
            llama.lm_head.weight.copy_(other)
        after = engine.generate(ids[2:], **OPTIONS)
    with TIDE.TIDE(llama) as engine:
        policy = policy_for(made("lens", llama), engine.adapter)
    with TIDE.TIDE(llama, policy, config) as engine:
        expected = engine.generate(ids[2:], **OPTIONS)
    assert torch.equal(after, expected) and not torch.equal(after, before)
