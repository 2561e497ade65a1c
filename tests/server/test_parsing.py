"""Reasoning and tool calls by the response template of a tokenizer. Text is never lost, and streamed it is the same message."""

from __future__ import annotations

import json

import pytest

from servers import Running, bytewise, tiny
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


def parsed(text: str, size: int = 1000, prompt: str = "<user>Hi<bot>", template=TEMPLATE, tools=None):
    parser = MessageParser(template, prompt, tools, "id")
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


def test_without_a_template_all_is_content():
    assert parsed(f"a{CALL}", template=None, prompt="")[0].content == f"a{CALL}"


HI = [{"role": "user", "content": "Hi"}]
THOUGHT = "<think>Let me see.</think>"
QWEN = {
    "start_anchor": "<bot>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close_pattern": r"\s*</s>", "content": "text", "optional": False},
    },
}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("<call>{oh no</call> well", "<call>{oh no</call> well", None, 0),
        (f"{THOUGHT}Hello <call>{{oh no</call> well", "Hello <call>{oh no</call> well", "Let me see.", 0),
        (f"{CALL}<call>{{oh no</call>", "<call>{oh no</call>", None, 1),
        (f"<call>{{oh no</call>{CALL}", "<call>{oh no</call>", None, 1),
        (f"{THOUGHT}{CALL}<call>{{oh", "<call>{oh", "Let me see.", 1),
        ('<call>["a"]</call> rest', '<call>["a"]</call> rest', None, 0),
        ('<call>{"arguments": {}}</call> rest', '<call>{"arguments": {}}</call> rest', None, 0),
        ('<call>{"name": 3}</call>', '<call>{"name": 3}</call>', None, 0),
        (f"<call>{'[' * 5000}</call>.", f"<call>{'[' * 5000}</call>.", None, 0),
        (f"{THOUGHT}<call>", "<call>", "Let me see.", 0),
    ],
)
def test_a_call_that_is_none_is_content_as_it_was_written(text, content, reasoning, calls, size):
    message, parser = parsed(text, size)
    assert (message.content, message.reasoning_content, parser.calls) == (content, reasoning, calls)
    assert len(message.tool_calls or ()) == calls


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_between_patterns_are_read_and_text_after_them_is_kept(size):
    good = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
    text = f"Hm.\n{good}\n<tool_call>\n<function=f>\n<parameter=x>"
    message, _ = parsed(text, size, "<bot>", QWEN, [TOOL])
    assert message.content == "Hm." and len(message.tool_calls) == 2, "markup that is cut off is read as far as it goes"
    assert json.loads(message.tool_calls[0].function.arguments) == {"x": "1"}


def test_text_that_the_prompt_has_begun_is_not_sent_again():
    assert parsed(" no</call>.", prompt="<bot><call>{oh")[0].content == " no</call>."
    assert parsed(".", prompt="<bot><call>{oh no</call>")[0].content == "."


def test_a_message_may_lack_fields_that_its_template_requires():
    message, _ = parsed(THOUGHT, prompt="<bot>", template=QWEN)
    assert (message.reasoning_content, message.content) == ("Let me see.", "")


@pytest.fixture(scope="module")
def served():
    """A server whose template opens the reasoning, and a way to make its model write a text."""
    template = "<s>{% for m in messages %}<user>{{ m.content }}{% endfor %}<bot>{% if think %}<think>{% endif %}"
    running = Running(Loaded(tiny().model, bytewise(template, response_template=TEMPLATE)))
    yield running
    running.close()


def answers(served, **body):
    """The choice of an answer, and the message that its stream is made of."""
    body = dict(messages=HI, max_tokens=150, temperature=0, **body)
    (whole,) = served.post("/v1/chat/completions", **body).json()["choices"]
    with served.http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as answer:
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    streamed = {name: "".join(delta.get(name) or "" for delta in deltas) for name in ("content", "reasoning_content")}
    streamed["calls"] = [call["function"] for delta in deltas for call in delta.get("tool_calls", [])]
    assert chunks[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    message = whole["message"]
    assert streamed == {
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [call["function"] for call in message.get("tool_calls", [])],
    }
    return whole


class Writes:
    """A processor that allows one text only."""

    def __init__(self, wanted: list[int], prompt: int) -> None:
        self.wanted, self.prompt = wanted, prompt

    def __call__(self, ids, scores):
        found = scores - 1e9
        found[0, self.wanted[ids.shape[1] - self.prompt]] = 0.0
        return found


def writes(served, monkeypatch, text: str) -> None:
    service = served.app.state.service
    wanted = service.tokenizer(text, add_special_tokens=False)["input_ids"] + [service.tokenizer.eos_token_id]
    monkeypatch.setattr(service.grammars, "processor", lambda asked, prompt: Writes(wanted, prompt))


@pytest.mark.parametrize("asked", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=["no tools", "none"])
def test_without_tools_to_call_a_call_is_content(served, monkeypatch, asked):
    writes(served, monkeypatch, f"{THOUGHT}Hm. {CALL}")
    choice = answers(served, **asked)
    assert choice["message"]["content"] == f"Hm. {CALL}" and choice["message"]["reasoning_content"] == "Let me see."
    assert "tool_calls" not in choice["message"] and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("after", "content"), [("", None), ("<call>{oh no</call>", "<call>{oh no</call>")])
def test_an_answer_ends_in_a_call_whatever_comes_after_it(served, monkeypatch, after, content):
    writes(served, monkeypatch, f"{THOUGHT}{CALL}{after}")
    choice = answers(served, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == content
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Łódź"}'} and call["type"] == "function"


def test_an_answer_with_a_format_is_content_where_the_template_opens_the_reasoning(served):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["<think>", "<call>"]}}}
    choice = answers(served, response_format=form, chat_template_kwargs={"think": True})
    assert choice["message"]["content"] in ('"<think>"', '"<call>"') and "reasoning_content" not in choice["message"]
    assert choice["finish_reason"] == "stop"
