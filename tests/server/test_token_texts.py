"""The text of each token in logprobs: together they are the answer, also where tokenizers strip the first space of a text."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from servers import bytewise
from TIDE.server.logprobs import Logprob, for_chat, for_text

WORDS = ["<unk>", "</s>", "▁hello", "▁world", "▁a", "lo", "!", *(f"<0x{byte:02X}>" for byte in range(256))]


def sentencepiece() -> PreTrainedTokenizerFast:
    """A tokenizer that decodes as Llama 2's does."""
    core = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")


def scored(*tokens: int) -> list[Logprob]:
    return [Logprob(token, -1.0, [(token, -1.0), (3, -2.0)]) for token in tokens]


def test_tokens_of_an_answer_keep_their_spaces():
    tokenizer = sentencepiece()
    assert tokenizer.decode([2, 3]) == "hello world"
    found = for_text(tokenizer, scored(2, 3, 6), 4)
    assert found.tokens == [" hello", " world", "!"] and found.text_offset == [4, 10, 16]
    assert found.top_logprobs[0] == {" hello": -1.0, " world": -2.0}
    chat = for_chat(tokenizer, scored(2, 3, 6)).content
    assert [one.token for one in chat] == [" hello", " world", "!"] and bytes(chat[1].bytes) == b" world"
    assert [one.token for one in chat[0].top_logprobs] == [" hello", " world"]


def test_the_first_token_of_a_prompt_begins_its_text():
    found = for_text(sentencepiece(), [2, *scored(3)], 0)
    assert found.tokens == ["hello", " world"] and found.text_offset == [0, 5]
    assert "".join(found.tokens) == sentencepiece().decode([2, 3])


@pytest.mark.parametrize("text", ["hello world", " a  b", "Łódź </s><user>x"])
def test_other_tokenizers_give_the_text_of_each_token_alone(text):
    tokenizer = bytewise()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert for_text(tokenizer, scored(*ids), 0).tokens == [tokenizer.decode([token]) for token in ids]


def test_special_tokens_and_bytes_have_a_text():
    tokenizer = sentencepiece()
    assert for_text(tokenizer, scored(1, WORDS.index("<0x41>"), WORDS.index("<0xC5>")), 0).tokens == ["</s>", "A", "\ufffd"]


def test_logprobs_spell_the_text_streamed_or_not(server):
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": ["hello world"]}}}
    body = dict(prompt="Hi", max_tokens=30, temperature=0, logprobs=2, response_format=form)
    (whole,) = server.post("/v1/completions", **body).json()["choices"]
    lines = server.post("/v1/completions", **body, stream=True).text.splitlines()
    chunks = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    for name in ("tokens", "text_offset"):
        streamed = [one for chunk in chunks for one in chunk["logprobs"][name]]
        assert streamed == whole["logprobs"][name]
    assert "".join(whole["logprobs"]["tokens"]) == '"hello world"</s>' == whole["text"] + "</s>"
    assert whole["logprobs"]["text_offset"] == list(range(14))
