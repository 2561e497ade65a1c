"""Reasoning and tool calls, by the response template of a tokenizer."""

from __future__ import annotations

import json

import pytest

from servers import bytewise, tiny
from TIDE.models.gguf import Loaded
from TIDE.server.parsing import MessageParser, joined

TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<bot>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "</s>", "content": "text"},
    },
}
CALL = '<call>{"name": "weather", "arguments": {"city": "Łódź"}}</call>'
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def parsed(text: str, size: int = 1000, prompt: str = "<user>Hi<bot>"):
    parser = MessageParser(TEMPLATE, prompt, None, "id")
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.feed("", is_last=True)
    return joined(parts), parser


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_parts_of_a_message_are_found_whatever_the_pieces(size):
    message, parser = parsed(f"<think>Let me see.</think>I will look.{CALL}{CALL}", size)
    assert message.reasoning_content == "Let me see." and message.content == "I will look."
    assert [call.function.name for call in message.tool_calls] == ["weather", "weather"] and parser.calls == 2
    assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Łódź"}
    assert [call.id for call in message.tool_calls] == ["call_id_0", "call_id_1"]


def test_reasoning_that_the_prompt_has_opened_goes_on():
    message, _ = parsed("So.</think>Yes.", prompt="<bot><think>")
    assert (message.reasoning_content, message.content) == ("So.", "Yes.")


def test_a_message_of_calls_has_no_content():
    assert parsed(CALL)[0].content is None
    assert parsed("")[0].content == ""


@pytest.mark.parametrize("size", [1, 1000])
def test_a_call_that_cannot_be_read_is_shown_as_it_was_written(size):
    message, parser = parsed("<call>{oh no</call> well", size)
    assert parser.calls == 0 and "oh no" in message.content


def test_without_a_template_all_is_content():
    parser = MessageParser(None, "", None, "id")
    assert joined([*parser.feed("a"), *parser.feed(CALL), *parser.feed("", is_last=True)]).content == "a" + CALL


def test_a_chat_with_tools_ends_in_a_call(another, monkeypatch):
    """The model is made to write the call, byte by byte."""
    loaded = Loaded(tiny().model, bytewise(response_template=TEMPLATE))
    server = another(model=loaded, router=None)
    body = dict(messages=[{"role": "user", "content": "Hi"}], tools=[TOOL], max_tokens=100, temperature=0)
    text = f"<think>Hm</think>{CALL}"
    wanted = loaded.tokenizer(text, add_special_tokens=False)["input_ids"] + [loaded.tokenizer.eos_token_id]
    grammars = server.app.state.service.grammars
    monkeypatch.setattr(grammars, "processor", lambda asked, prompt: Writes(wanted, prompt))
    whole = server.post("/v1/chat/completions", **body).json()["choices"][0]
    with server.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] is None
    assert whole["message"]["reasoning_content"] == "Hm"
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Łódź"}'} and call["type"] == "function"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    (streamed,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert streamed["function"] == call["function"] and streamed["index"] == 0
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


class Writes:
    """A processor that allows one text only."""

    def __init__(self, wanted: list[int], prompt: int) -> None:
        self.wanted, self.prompt = wanted, prompt

    def __call__(self, ids, scores):
        found = scores - 1e9
        found[0, self.wanted[ids.shape[1] - self.prompt]] = 0.0
        return found
