"""A run: what is recorded of an answer, and what a file keeps of it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from characters import TEMPLATE, characters
from families import build
from TIDE.engine.engine import TIDE
from TIDE.integrations.record import _texts, record
from TIDE.run import Run


def test_a_file_keeps_everything(chat, tmp_path):
    chat.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == chat


def test_files_written_before_tokens_could_be_special_still_load(run, tmp_path):
    held = run.as_dict()
    for token in held["tokens"]:
        del token["special"]
    assert held["version"] == 1
    (tmp_path / "run.json").write_text(json.dumps(held))
    assert Run.load(tmp_path / "run.json") == run


NO_RUN = {
    "{": "found no JSON",
    "\xff": "found no JSON",
    '{"contenders": []}': "found results of tide bench, which are read as they are",
    '[{"role": "user", "content": "Hello."}]': "found a chat that tide chat saved",
    '{"tokens": [], "version": 2}': "found a run of version 2",
    "3": "found JSON of another kind",
}


@pytest.mark.parametrize("content", NO_RUN)
def test_a_file_that_is_no_run_is_refused_with_its_kind(tmp_path, content):
    (tmp_path / "a.json").write_text(content, "latin-1")
    with pytest.raises(ValueError, match="expected what tide generate --save writes") as problem:
        Run.load(tmp_path / "a.json")
    assert str(problem.value).endswith(f"{NO_RUN[content]}.")


def test_a_damaged_run_is_refused(run, tmp_path):
    for changes in ({"tokens": [1]}, {"acceptance_by_step": None}, {"colour": "red"}):
        (tmp_path / "run.json").write_text(json.dumps(run.as_dict() | changes))
        with pytest.raises(ValueError, match="is a damaged run: it has other fields than tide generate --save writes"):
            Run.load(tmp_path / "run.json")


def test_agreement_is_the_share_of_tokens_that_match_the_full_model(run):
    assert run.agreement == 1 - 1 / len(run.tokens)
    assert dataclasses.replace(run, tokens=()).agreement == 0.0


def test_special_tokens_are_recorded_as_such():
    tokenizer = characters(TEMPLATE)
    with TIDE(build("llama"), None) as engine:
        plain = record(engine, tokenizer, "hello", max_new_tokens=6, do_sample=False)
        assert not any(token.special for token in plain.tokens if not token.text.startswith("<"))
        written = next(token.text for token in plain.tokens if not token.special)
        tokenizer.add_tokens([written], special_tokens=True)  # as ends of turns often are: in no named role
        marked = record(engine, tokenizer, "hello", max_new_tokens=6, do_sample=False)
    assert [token.text for token in marked.tokens] == [token.text for token in plain.tokens]
    assert all(token.special for token in marked.tokens if token.text == written)


def of_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are bytes, so that an emoji is four of them."""
    core = Tokenizer(models.BPE({byte: place for place, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core)


def of_words() -> PreTrainedTokenizerFast:
    """A tokenizer that drops the space before a word that is decoded alone, as SentencePiece does."""
    core = Tokenizer(models.WordLevel({"▁the": 0, "▁sea": 1, "▁moon": 2}, unk_token="▁the"))
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.parametrize(
    ("text", "expected"), [("a 🍳!", ["a", " ", "", "", "", "🍳", "!"]), ("é", ["", "é"])], ids=["an emoji", "an accent"]
)
def test_a_character_of_several_tokens_belongs_to_the_last_of_them(text, expected):
    tokenizer = of_bytes()
    ids = tokenizer(text)["input_ids"]
    assert list(_texts(tokenizer, ids, ids)) == [(own, own) for own in expected]


def test_half_a_character_at_the_end_is_shown_as_such():
    tokenizer = of_bytes()
    ids = tokenizer("aé")["input_ids"][:-1]
    assert [own for own, _ in _texts(tokenizer, ids, ids)] == ["a", "\ufffd"]


def test_tokens_keep_the_spaces_between_them():
    tokenizer = of_words()
    assert tokenizer.decode([1]) == "sea"  # so it has to be decoded with what stands before it
    assert list(_texts(tokenizer, [0, 1, 1], [0, 2, 1])) == [("the", "the"), (" sea", " moon"), (" sea", " sea")]
