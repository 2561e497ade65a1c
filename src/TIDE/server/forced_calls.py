"""Answers that must call a tool (`tool_choice` `required`, or a function's name): a JSON list of calls, by a schema.

The schema holds for every model, so these need no response template. The list is `[{"name": …, "arguments": {…}}, …]`.
"""

from __future__ import annotations

import json
from typing import Any

from TIDE.server.answers import ChatMessage, ToolCall
from TIDE.server.errors import refused
from TIDE.server.parsing import CallParser
from TIDE.server.requests import ChatRequest, JSONSchema, NamedTool, ResponseFormat, Tool

NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")  # of a schema: names to schemas
VALUES = ("const", "enum", "default", "examples")  # of a schema: they hold JSON, not schemas


def forced_calls(asked: ChatRequest) -> ResponseFormat | None:
    """Return the format of an answer that must call a tool; None: it need not."""
    choice, tools = asked.tool_choice, asked.tools or []
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise refused("tool_choice goes with tools only.", "tool_choice")
    if asked.response_format is not None and asked.response_format.type != "text":
        raise refused("an answer is a tool call or has a response_format, not both. Leave one out.", "tool_choice")
    if isinstance(choice, NamedTool):
        tools = [tool for tool in tools if tool.function.name == choice.function.name]
        if not tools:
            known = ", ".join(repr(tool.function.name) for tool in asked.tools or ())[:300]
            raise refused(f"tool_choice names {choice.function.name[:100]!r}; the tools are {known}.", "tool_choice")
    schema = _schema(tools, is_one=isinstance(choice, NamedTool))
    return ResponseFormat(type="json_schema", json_schema=JSONSchema(schema=schema))


def _schema(tools: list[Tool], is_one: bool) -> dict[str, Any]:
    """Return the schema of a list of calls. Parameters of each tool have a place of their own, where its references point."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, tool in enumerate(tools):
        place = f"#/$defs/tool_{number}"
        own = {name: value for name, value in (tool.function.parameters or NO_ARGUMENTS).items() if name != "$id"}
        definitions[f"tool_{number}"] = _moved(own, place)
        properties = {"name": {"const": tool.function.name}, "arguments": {"$ref": place}}
        calls.append({"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False})
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return found | ({"maxItems": 1} if is_one else {})


def _moved(schema: Any, place: str) -> Any:
    """Return a schema whose references to its own parts hold when it stands at a place inside another."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            found[name] = {key: _moved(own, place) for key, own in value.items()}
        else:
            found[name] = value if name in VALUES else _moved(value, place)
    own = found.get("$ref")
    if isinstance(own, str) and (own == "#" or own.startswith("#/")):
        found["$ref"] = place + own[1:]
    return found


class ForcedCallParser(CallParser):
    """Turns the text of one answer, a list of calls, into parts of a message: each call when it is whole."""

    def __init__(self, call_id: str) -> None:
        super().__init__(call_id)
        self._text = ""  # not read yet

    def feed(self, text: str, is_last: bool = False) -> list[ChatMessage]:
        """Return what a piece of text adds to the message."""
        self._text += text
        found = []
        while (call := self._next()) is not None:
            found.append(ChatMessage(tool_calls=[call]))
        if is_last and self._text.strip(" ]"):  # a call that did not end is shown as it was written
            found.append(ChatMessage(content=self._text))
        return found

    def _next(self) -> ToolCall | None:
        begin = self._text.find("{")
        if begin < 0:
            return None
        try:
            call, length = json.JSONDecoder().raw_decode(self._text[begin:])
        except (json.JSONDecodeError, RecursionError):
            return None
        self._text = self._text[begin + length :]
        return self.call(call["name"], json.dumps(call["arguments"], ensure_ascii=False))
