"""Answers that must call a tool, by schema; the model is a random one that knows nothing of tools."""

from __future__ import annotations

import json

import pytest
from openai import OpenAI

from levels import daily
from TIDE.server.forced_calls import ForcedCallParser
from TIDE.server.parsing import joined

CITY = {"$ref": "#/$defs/City"}
WEATHER = {
    "type": "object",
    "properties": {"city": CITY, "days": {"enum": [1, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Łódź", "Rome"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
TWO = '[{"name": "a", "arguments": {"x": "} ]"}}, {"name": "b", "arguments": {}}]'


def parsed(text: str, size: int):
    parser = ForcedCallParser("id")
    parts = [part for place in range(0, len(text), size) for part in parser.feed(text[place : place + size])]
    return joined([*parts, *parser.feed("", is_last=True)])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_are_read_as_they_become_whole(size):
    message = parsed(TWO, size)
    assert [(call.id, call.function.name) for call in message.tool_calls] == [("call_id_0", "a"), ("call_id_1", "b")]
    assert json.loads(message.tool_calls[0].function.arguments) == {"x": "} ]"}
    assert message.content is None


def test_a_call_that_did_not_end_is_shown_as_it_was_written():
    message = parsed(TWO[:60], 7)
    assert [call.function.name for call in message.tool_calls] == ["a"] and '"name": "b"' in message.content


@pytest.mark.parametrize("seed", daily(range(4), range(1)))
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_an_answer_calls_a_tool_with_arguments_of_its_schema(server, choice, seed):
    asked = dict(messages=[{"role": "user", "content": "Hi"}], tools=TOOLS, tool_choice=choice, seed=seed, max_tokens=600)
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", **asked).choices[0]
        chunks = list(client.chat.completions.create(model="tiny", stream=True, **asked))
    written = whole.message.tool_calls
    assert written and (choice == "required" or [call.function.name for call in written] == ["weather"])
    for call in written:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "time":
            assert arguments == {}
        else:
            assert call.function.name == "weather"
            assert arguments["city"] in ("Łódź", "Rome") and arguments["days"] in (1, 7)
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [call.function.model_dump() for call in streamed] == [call.function.model_dump() for call in written]
    reasons = {whole.finish_reason, chunks[-1].choices[0].finish_reason}
    assert reasons == {"tool_calls"} or (choice == "required" and reasons == {"length"}), "a random model may call for ever"
