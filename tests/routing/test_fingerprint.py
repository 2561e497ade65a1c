"""Fingerprints: the same for a model however it was loaded, another for every other model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from families import VOCAB, build
from TIDE import TIDE
from TIDE.routing.fingerprint import _hash_of_weights, fingerprint


class Words:
    """As much of a tokenizer as a fingerprint reads."""

    def __init__(self, words: str, chat_template: str | None = None) -> None:
        self.words, self.chat_template = words.split(), chat_template

    def get_vocab(self):
        return {word: index for index, word in enumerate(self.words)}


def test_a_fingerprint_says_what_the_model_is(each_kind):
    found = fingerprint(each_kind)
    assert found.architecture == type(each_kind).__name__
    assert found.hidden_dim == 64
    assert found.num_layers == each_kind.config.num_hidden_layers
    assert found.vocab_size == VOCAB
    assert found.tokenizer is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_copy_in_another_dtype_has_the_same_fingerprint(llama, dtype):
    with torch.no_grad():
        llama.lm_head.weight.mul_(1e-30)  # nothing of it is left in fp16 but the signs
    expected = fingerprint(llama)
    assert fingerprint(copy.deepcopy(llama).to(dtype)) == expected


def test_an_open_engine_changes_nothing(llama):
    expected = fingerprint(llama)
    with TIDE(llama):
        assert fingerprint(llama) == expected


@pytest.mark.parametrize("seed", range(5))
def test_changing_a_tenth_of_the_weights_changes_it(llama, seed):
    expected = fingerprint(llama)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in llama.parameters():
            other = torch.randn(parameter.shape, generator=generator) * parameter.std()
            parameter.copy_(torch.where(torch.rand(parameter.shape, generator=generator) < 0.1, other, parameter))
    assert fingerprint(llama).mismatch(expected) == ["weights"]


def test_every_parameter_is_looked_at(llama):
    expected = _hash_of_weights(llama)
    for name, parameter in llama.named_parameters():
        parameter.data.neg_()
        assert _hash_of_weights(llama) != expected, name
        parameter.data.neg_()
    assert _hash_of_weights(llama) == expected


def test_weights_on_the_meta_device_are_not_compared(llama):
    expected = fingerprint(llama)
    llama.model.norm.weight = torch.nn.Parameter(torch.empty(64, device="meta"))
    found = fingerprint(llama)
    assert found.weights is None and "weights not known" in found.describe()
    assert found.mismatch(expected) == expected.mismatch(found) == []
    assert found.mismatch(fingerprint(build("llama", hidden_size=32))) == ["hidden_dim"]


def test_quantized_weights_are_left_out(llama):
    expected = fingerprint(llama)
    quantized = torch.zeros(128, 64, dtype=torch.int8)
    llama.lm_head.weight = torch.nn.Parameter(quantized, requires_grad=False)
    assert fingerprint(llama).mismatch(expected) == ["weights"]
    for name, parameter in llama.named_parameters():
        if name != "lm_head.weight":
            parameter.data = parameter.data.to(torch.float8_e4m3fn)
    assert len(fingerprint(llama).weights) == 16


def test_other_models_differ_in_the_fields_that_say_so(llama):
    ours = fingerprint(llama)
    assert ours.mismatch(fingerprint(build("llama"))) == []
    assert ours.mismatch(fingerprint(build("qwen2"))) == ["architecture", "weights"]
    assert ours.mismatch(fingerprint(build("llama", num_hidden_layers=6))) == ["num_layers", "weights"]
    assert ours.mismatch(fingerprint(build("llama", hidden_size=32, vocab_size=96))) == ["hidden_dim", "vocab_size", "weights"]


def test_hostile_names_in_a_fingerprint_are_made_printable(llama):
    said = replace(fingerprint(llama), name="x" * 10_000, weights="\ud800", tokenizer="\x1b[31m").describe()
    assert said.isprintable() and len(said) < 1000


def test_a_tokenizer_is_its_words_and_its_chat_template(llama):
    known = fingerprint(llama, Words("a b c", "{{ x }}"))
    assert known == fingerprint(llama, Words("a b c", "{{ x }}"))
    assert known.mismatch(fingerprint(llama, Words("a c b", "{{ x }}"))) == ["tokenizer"]
    assert known.mismatch(fingerprint(llama, Words("a b c"))) == ["tokenizer"]
    assert known.mismatch(fingerprint(llama)) == []
    assert fingerprint(llama).mismatch(known) == []


@pytest.mark.parametrize("path", ["org/Small-1B", "/cache/hub/models--org--Small-1B/snapshots/0a1b2c"])
def test_the_name_of_a_model_of_the_hub_is_its_id(llama, path):
    llama.config._name_or_path = path
    assert fingerprint(llama).name == "org/Small-1B"


def test_a_folder_is_not_taken_for_a_hub_id(llama, tmp_path, monkeypatch):
    (tmp_path / "models" / "Small-1B").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    llama.config._name_or_path = "models/Small-1B"
    assert fingerprint(llama).name == "Small-1B"


@pytest.mark.parametrize("path", ["/home/someone/models/Small-1B/", "C:\\models\\Small-1B", "Small-1B", "./Small-1B"])
def test_a_name_is_never_a_path(llama, path):
    llama.config._name_or_path = path
    found = fingerprint(llama, Words("a b"))
    assert found.name == "Small-1B"
    assert found.describe() == (
        f"Small-1B (LlamaForCausalLM, 4 layers of 64, vocabulary 128, weights {found.weights}, tokenizer {found.tokenizer})"
    )
    assert found.mismatch(replace(found, name="other")) == []
