"""Schemas that clients send, of formats and of tools: those that cannot be followed are errors of the request."""

from __future__ import annotations

import json

import pytest

from servers import bytewise
from TIDE.server.errors import APIError
from TIDE.server.forced_calls import forced_calls
from TIDE.server.grammar import Grammars
from TIDE.server.requests import ChatRequest, ResponseFormat

TOKENIZER = bytewise()
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER, len(TOKENIZER), [TOKENIZER.eos_token_id])


def follows(grammars, form: ResponseFormat, text: str) -> bool:
    """Whether a text is one of a format, and whole."""
    matcher = grammars.processor(form, 0).matcher
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def form(schema: object) -> ResponseFormat:
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def calls(*parameters: object) -> ResponseFormat:
    """The format of forced calls of tools a, b, …"""
    names = "abc"[: len(parameters)]
    own = [dict(name=name, parameters=one) for name, one in zip(names, parameters, strict=True)]
    tools = [{"type": "function", "function": one} for one in own]
    found = forced_calls(ChatRequest.model_validate(dict(messages=HI, tools=tools, tool_choice="required")))
    assert found is not None
    return found


def call(arguments: object, name: str = "a") -> str:
    return json.dumps([{"name": name, "arguments": arguments}])


def nested(levels: int) -> dict[str, object]:
    found: dict[str, object] = {}
    for _ in range(levels):
        found = {"type": "object", "properties": {"a": found}}
    return found


def test_the_schema_true_is_any_json_and_false_is_refused(grammars):
    assert follows(grammars, form(True), '[1, {"a": null}]')
    with pytest.raises(APIError, match="allows no answer at all") as caught:
        grammars.processor(form(False), 0)
    assert caught.value.param == "response_format"


def test_a_schema_that_llguidance_cannot_read_is_refused(grammars):
    with pytest.raises(APIError, match="this JSON schema cannot be followed: .*recursion limit") as caught:
        grammars.processor(
            ResponseFormat.model_construct(
                type="json_schema", json_schema=form({}).json_schema.model_copy(update={"schema_": nested(300)})
            ),
            0,
        )
    assert caught.value.status == 400


GIVEN_UP = {  # which llguidance reads, and gives up at the first token or later
    "itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "too many objects": {
        "anyOf": [{"type": "object", "properties": {"a": {"type": "integer"}, f"p{n}": {}}} for n in range(2000)]
    },
}


@pytest.mark.parametrize("name", GIVEN_UP)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_llguidance_gives_up_is_the_fault_of_the_request(server, monkeypatch, name, stream):
    alone = []
    monkeypatch.setattr(server.worker.decoder, "decode_alone", lambda **options: alone.append(options))
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": GIVEN_UP[name]}}
    body = dict(messages=HI, max_tokens=60, temperature=0, stream=stream)
    answer = server.post("/v1/chat/completions", **body, response_format=response_format)
    assert answer.status_code == 200 if answer.text.startswith("data: ") else answer.status_code == 400
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if '"error"' in line]
    error = json.loads(lines[0])["error"]
    assert error["code"] == 400 and error["message"].startswith("this JSON schema cannot be followed: llguidance gave up with")
    assert error["message"].endswith(". Make the schema simpler.") and "<state>" not in error["message"]
    assert not alone, "the model was not tried"


def test_a_tool_whose_schema_llguidance_gives_up_is_the_fault_of_the_request(server):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    answer = server.post("/v1/chat/completions", messages=HI, tools=[tool], tool_choice="required", max_tokens=90)
    assert answer.status_code == 400 and "llguidance gave up with" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("levels", [60, 300, 440])
@pytest.mark.parametrize("place", ["response_format", "tools", "chat_template_kwargs", "messages", "tool_calls"])
def test_json_that_is_nested_too_deep_is_refused_by_the_name_of_its_field(server, place, levels):
    deep = nested(levels)
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    fields = {
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}},
        "tools": {"tools": [tool], "tool_choice": "required"},
        "chat_template_kwargs": {"chat_template_kwargs": {"a": deep}},
        "messages": {"messages": [HI[0] | {"more": deep}]},
        "tool_calls": {"messages": [HI[0] | {"tool_calls": [deep]}]},
    }[place]
    answer = server.post("/v1/chat/completions", **{"messages": HI, "max_tokens": 1} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == ("messages" if place == "tool_calls" else place) and "nested" in error["message"]


def test_json_of_many_levels_is_taken(grammars):
    assert grammars.processor(form(nested(45)), 0) is not None
    assert grammars.processor(calls(nested(45)), 0) is not None


@pytest.mark.parametrize("definitions", [[], None, 3])
def test_definitions_that_are_none_are_no_fault_of_the_server(server, definitions):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$defs": definitions}}}
    answer = server.post("/v1/chat/completions", messages=HI, tools=[tool], tool_choice="required", max_tokens=2)
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(
    ("parameters", "good", "bad"),
    [
        ({"properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["y"]}}}, {"x": "y"}, {"x": "z"}),
        ({"properties": {"x": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"enum": ["y"]}}}, {"x": "y"}, {"x": "z"}),
        ({"properties": {"x": {"$ref": "#/properties/b"}, "b": {"enum": ["y"]}}}, {"x": "y"}, {"x": "z"}),
        ({"properties": {"x": {"$ref": "#"}}, "additionalProperties": False}, {"x": {"x": {}}}, {"x": [1]}),
        ({"properties": {"x": {"const": {"$ref": "#"}}}}, {"x": {"$ref": "#"}}, {"x": {"$ref": "#/$defs/a"}}),
        ({"properties": {"$ref": {"enum": ["#"]}}}, {"$ref": "#"}, {"$ref": "#/"}),
        ({"properties": {"enum": {"$ref": "#/$defs/const"}}, "$defs": {"const": {"enum": [1]}}}, {"enum": 1}, {"enum": 2}),
        ({"$id": "https://example.org/t", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": ["y"]}}},
         {"x": "y"}, {"x": "z"}),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"x": {"$ref": "#/definitions/A"}},
          "definitions": {"A": {"enum": ["y"]}}}, {"x": "y"}, {"x": "z"}),
    ],
    ids=["$defs", "definitions", "properties", "itself", "a constant", "a property", "names of keywords", "$id", "$schema"],
)  # fmt: skip
def test_references_of_a_tool_point_into_its_own_parameters(grammars, parameters, good, bad):
    found = calls({"type": "object"} | parameters)
    assert follows(grammars, found, call(good)) and not follows(grammars, found, call(bad))


def test_tools_may_define_the_same_name_differently(grammars):
    own = [{"type": "object", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": {"enum": [y]}}} for y in "yz"]
    before = json.dumps(own)
    found = calls(*own)
    assert follows(grammars, found, call({"x": "y"}, "a")) and follows(grammars, found, call({"x": "z"}, "b"))
    assert not follows(grammars, found, call({"x": "z"}, "a"))
    assert json.dumps(own) == before, "the request is left as it was"
