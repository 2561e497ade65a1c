"""An EAGLE-3 head computes what the reference computes: for prompts, drafts, and accepted tokens that are fed again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle_heads import DIM, FLAGS, Reference, config_of, original, tensors_of, with_vocabulary, write
from TIDE.routing.eagle3.files import read_files
from TIDE.routing.eagle3.read import read_head
from TIDE.routing.memory import HeadMemory

DATA = Path(__file__).parent / "data"
LAYERS, LENGTH = 8, 14
DEPTHS = (2, 4, 5)  # those of EAGLE-3 for eight layers
OF_31 = ("fc_norm", "norm_output")
CLOSE = dict(rtol=1e-4, atol=1e-5)


class Text:
    """Random states of a text."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.embedded = torch.randn(LENGTH, DIM, generator=generator)
        self.parts = [torch.randn(LENGTH, DIM, generator=generator) * 3 for _ in DEPTHS]

    def show(self, memory: HeadMemory, start: int, stop: int, deep: bool) -> None:
        places = zip(DEPTHS, self.parts, strict=True) if deep else [(0, self.embedded)]
        for depth, states in places:
            memory.observe(depth, 0, start, states[start:stop])


def read(folder, flags, **more):
    tensors = tensors_of(**flags)
    head, _ = read_head(read_files(write(folder, config_of("speculators", **flags | more), tensors)))
    return head.read_as(head.readings[0]), Reference(tensors, flags)


@pytest.mark.parametrize("flags", [(), *[(flag,) for flag in FLAGS], OF_31, FLAGS[1:]])
def test_prompts_drafts_and_accepted_tokens_equal_the_reference(flags, tmp_path):
    head, reference = read(tmp_path, dict.fromkeys(flags, True))
    text, memory = Text(), HeadMemory(head, 0, LAYERS, 1)
    text.show(memory, 0, 6, deep=False)
    text.show(memory, 0, 5, deep=True)
    known = 5
    for drafted, accepted in ((4, 2), (3, 3), (1, 0)):
        expected = reference.drafts(text.embedded, text.parts, known, drafted)
        for number in range(drafted):
            text.show(memory, known + number, known + number + 1, deep=False)
            found = head.logits(memory.guess([0], [known + number]))
            torch.testing.assert_close(found, expected[number : number + 1], **CLOSE)
        for deep in (False, True):  # a deep pass shows all states of its tokens
            text.show(memory, known, known + 1 + drafted, deep)
        memory.forget(0, known + 1 + accepted)
        known += 1 + accepted


@pytest.mark.parametrize("flags", [(), OF_31])
def test_a_whole_text_at_once_equals_the_reference(flags, tmp_path):
    head, reference = read(tmp_path, dict.fromkeys(flags, True))
    text = Text()
    guesses = head.unroll(text.embedded[None], torch.cat(text.parts, -1)[None], 3)
    for known in (1, 2, 7):
        expected = reference.drafts(text.embedded, text.parts, known, 3)
        for step in range(3):
            torch.testing.assert_close(head.logits(guesses[step][:, known + step]), expected[step : step + 1], **CLOSE)


def test_the_first_token_is_not_there_for_the_others(tmp_path):
    """It has no token before it, so EAGLE-3 has no entry for it."""
    head, _ = read(tmp_path, {})
    text, found = Text(), []
    for first in (0.0, 5.0):
        text.embedded[0] = first
        memory = HeadMemory(head, 0, LAYERS, 1)
        text.show(memory, 0, 6, deep=False)
        text.show(memory, 0, 5, deep=True)
        found.append(memory.guess([0], [5]))
    assert torch.equal(*found)


@pytest.mark.parametrize("theta", [10000.0, 5e5])
def test_the_base_of_the_rotary_embedding_is_the_heads_own(theta, tmp_path):
    block = config_of("speculators")["transformer_layer_config"] | {"rope_theta": theta}
    head, reference = read(tmp_path, {}, transformer_layer_config=block)
    reference.theta = theta
    text, memory = Text(), HeadMemory(head, 0, LAYERS, 1)
    text.show(memory, 0, 10, deep=False)
    text.show(memory, 0, 9, deep=True)
    expected = reference.drafts(text.embedded, text.parts, 9, 1)
    torch.testing.assert_close(head.logits(memory.guess([0], [9])), expected, **CLOSE)


def test_a_scaled_rotary_embedding_is_that_of_transformers(tmp_path):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    block = config_of("speculators")["transformer_layer_config"] | {"rope_scaling": rope, "rope_theta": 5e5}
    head, _ = read(tmp_path, {}, transformer_layer_config=block)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope | {"rope_theta": 5e5})
    positions = torch.arange(40)[None]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    found = head.angles(positions, torch.float32)
    for own, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(own[:, 0], theirs)


def test_both_layouts_and_both_kinds_of_files_say_the_same(tmp_path):
    ids = torch.tensor([70, 3, 9, 100, 12, 127, 0, 64])
    tensors = with_vocabulary(tensors_of(len(ids)), ids)
    there = [
        write(tmp_path / "a", config_of("speculators"), tensors),
        write(tmp_path / "b", config_of("original"), original(tensors)),
        write(tmp_path / "c", config_of("original"), original(tensors), "bin"),
        write(tmp_path / "d", config_of("original"), {f"model.{name}": one for name, one in original(tensors).items()}),
    ]
    found = [read_head(read_files(folder)) for folder in there]
    assert [one.vocabulary.tolist() for one in found] == [sorted(ids.tolist())] * 4
    for one in found[1:]:
        for name, tensor in found[0].head.state_dict().items():
            assert torch.equal(tensor, one.head.state_dict()[name]), name
    rows = found[0].head.lm_head.weight
    assert torch.equal(rows[found[0].vocabulary.tolist().index(100)], tensors["lm_head.weight"][3])


def test_a_file_of_the_package_speculators_gives_its_logits():
    """Written by `data/speculators_head.py`: with fc_norm, norm_output, norm_before_residual and a draft vocabulary."""
    head, vocabulary = read_head(read_files(DATA / "speculators-eagle3"))
    given = load_file(DATA / "speculators-eagle3-logits.safetensors")
    assert len(head.readings) == 1 and len(vocabulary) == 48 and head.embedding is not None
    head = head.read_as(head.readings[0])
    assert head.sizes.depths == (1, 2, 4) and head.sizes.norm_before_residual and head.sizes.norm_output
    for step, found in enumerate(unrolled(head, given, load_file(DATA / "speculators-eagle3" / "model.safetensors"))):
        torch.testing.assert_close(found, given[f"logits.{step}"][:, : found.shape[1]], **CLOSE)


def unrolled(head, given, tensors):
    """Logits of drafts as the package numbers them: position i has the states of token i and the id of the next."""
    length = given["ids"].shape[1]
    embedded = tensors["embed_tokens.weight"][torch.nn.functional.pad(given["ids"], (1, 0))]
    guesses = head.unroll(embedded, torch.nn.functional.pad(given["states"], (0, 0, 0, 1)), 3)
    return [head.logits(own[:, 1 + step : 1 + length]) for step, own in enumerate(guesses)]
