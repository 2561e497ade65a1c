"""Messages of a chat out of text: reasoning and tool calls, by transformers' parser and the tokenizer's response template.

    Hm. <call>{"name": "f"}</call> <call>{oh no</call>
        raw of a region            raw of a broken one

The parser of transformers raises an error at a region that it cannot read, and loses the rest of that piece of text. Here the
end of a region carries its raw text, with its markers; a region that cannot be read ends as `region_broken`, and is content.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from transformers import PreTrainedModel

from TIDE.server.answers import ChatMessage, FunctionCall, ToolCall

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
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


class CallParser:
    """Numbers the tool calls of an answer.

    Args:
        call_id: begins their ids.
    """

    def __init__(self, call_id: str) -> None:
        self.call_id = call_id
        self.calls = 0

    def call(self, name: str, arguments: Any) -> ToolCall:
        """Return the next call; arguments are JSON or its text."""
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.calls += 1
        index = self.calls - 1
        return ToolCall(index=index, id=f"call_{self.call_id}_{index}", function=FunctionCall(name=name, arguments=text))


class MessageParser(CallParser):
    """Turns the text of one answer into parts of a message, as it is written. A call that is none is content.

    Args:
        template: None: all of it is content.
        prompt: the text before the answer.
        tools: those the model may call.
    """

    def __init__(self, template: dict[str, Any] | None, prompt: str, tools: list[dict[str, Any]] | None, call_id: str) -> None:
        super().__init__(call_id)
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
        return [ChatMessage(tool_calls=[self.call(one["name"], one.get("arguments") or {})]) for one in functions if one]


def _content(text: str) -> list[ChatMessage]:
    return [ChatMessage(content=text)] if text else []


def joined(parts: list[ChatMessage]) -> ChatMessage:
    """Return parts of a message as one."""
    content = [part.content for part in parts if part.content is not None]
    reasoning = [part.reasoning_content for part in parts if part.reasoning_content is not None]
    calls = [ToolCall(id=call.id, function=call.function) for part in parts for call in part.tool_calls or ()]
    message = ChatMessage(role="assistant", content="".join(content) if content or not calls else None)
    if reasoning:
        message.reasoning_content = "".join(reasoning)
    if calls:
        message.tool_calls = calls
    return message


def region_parser(template: dict[str, Any], prompt: str, tools: list[dict[str, Any]] | None) -> Any:
    """Return a parser of the text after a prompt. Fields that its template requires may be missing: the text is what it is."""
    fields = {name: {**field, "optional": True} for name, field in template["fields"].items()}
    parser = _kind()({**template, "fields": fields}, prefix=prompt, tools=tools)
    parser._answer = len(parser._buffer)
    return parser


def without_calls(template: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a template by which calls are content; None: all is."""
    fields = {} if template is None else {name: field for name, field in template["fields"].items() if name != "tool_calls"}
    return {**template, "fields": fields} if template is not None and fields else None


@functools.cache
def _kind() -> type:
    from transformers.utils.chat_parsing import ResponseParser

    class RegionParser(ResponseParser):
        _from = 0  # where the region's open marker begins in the buffer
        _answer = 0  # where the answer begins; before it is text of the prompt

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, found: Any) -> None:
            self._from = found.start()
            super()._open_explicit(events, field, found)

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            raw = self._buffer[max(self._from, self._answer) : self._pos]
            count, field = len(events), self._current
            try:
                super()._close_current(events)
            except UNREADABLE:
                self._reset_to_implicit()
                events.append({"type": "region_broken", "field": field, "raw": raw})
            else:
                for event in events[count:]:
                    event["raw"] = raw

    return RegionParser
