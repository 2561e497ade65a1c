"""Messages of a chat out of text: reasoning and tool calls, by transformers' parser and the tokenizer's response template."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedModel

from TIDE.server.answers import ChatMessage, FunctionCall, ToolCall
from TIDE.server.regions import region_parser

REASONING = ("reasoning_content", "reasoning", "thinking")


def response_template(tokenizer: Any, model: PreTrainedModel) -> dict[str, Any] | None:
    """Return how messages of a model are written: by its tokenizer, or what transformers knows of its family."""
    own = getattr(tokenizer, "response_template", None)
    if own is not None:
        return dict(own)
    try:
        from transformers.cli.serving.utils import get_response_template
    except ImportError:  # an older transformers, or one without what its own server needs
        return None
    found: dict[str, Any] | None = get_response_template(tokenizer, model)
    return found


class MessageParser:
    """Turns the text of one answer into parts of a message, as it is written. A call that is none is content.

    Args:
        template: None: all of it is content.
        prompt: the text before the answer.
        tools: those the model may call.
        call_id: begins the ids of tool calls.
    """

    def __init__(self, template: dict[str, Any] | None, prompt: str, tools: list[dict[str, Any]] | None, call_id: str) -> None:
        self.call_id = call_id
        self.calls = 0
        self._parser = None if template is None else region_parser(template, prompt, tools)

    def feed(self, text: str, is_last: bool = False) -> list[ChatMessage]:
        """Return what a piece of text adds to the message."""
        if self._parser is None:
            return [ChatMessage(content=text)] if text else []
        events = self._parser.feed(text) if text else []
        if is_last:
            events = [*events, *self._parser.finalize()[1]]
        return [part for event in events for part in self._parts(event)]

    def _parts(self, event: dict[str, Any]) -> list[ChatMessage]:
        kind, field, text = event["type"], event.get("field"), event.get("text")
        if kind == "region_close" and field == "tool_calls":
            return self._calls(event["value"]) or _content(event["raw"])
        if kind == "region_broken":
            return _content(event["raw"])
        if kind != "region_chunk" or event.get("dirty") or not text:
            return []
        if field in REASONING:
            return [ChatMessage(reasoning_content=text)]
        return _content(text) if field == "content" else []

    def _calls(self, value: Any) -> list[ChatMessage]:
        """Return the calls of a region, one or a list of them; none if any of them is not a call."""
        values = value if isinstance(value, list) else [value]
        functions = [one.get("function") if isinstance(one, dict) else None for one in values]
        if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions):
            return []
        return [ChatMessage(tool_calls=[self._call(one)]) for one in functions if one is not None]

    def _call(self, function: dict[str, Any]) -> ToolCall:
        arguments = function.get("arguments") or {}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.calls += 1
        return ToolCall(
            index=self.calls - 1,
            id=f"call_{self.call_id}_{self.calls - 1}",
            function=FunctionCall(name=function["name"], arguments=text),
        )


def _content(text: str) -> list[ChatMessage]:
    return [ChatMessage(content=text)] if text else []


def joined(parts: list[ChatMessage]) -> ChatMessage:
    """Return parts of a message as one."""
    content = [part.content for part in parts if part.content is not None]
    reasoning = [part.reasoning_content for part in parts if part.reasoning_content is not None]
    calls = [call.model_copy(update={"index": None}) for part in parts for call in part.tool_calls or ()]
    found = ChatMessage(role="assistant", content="".join(content) if content or not calls else None)
    if reasoning:
        found.reasoning_content = "".join(reasoning)
    if calls:
        found.tool_calls = [ToolCall(id=call.id, function=call.function) for call in calls]
    return found
