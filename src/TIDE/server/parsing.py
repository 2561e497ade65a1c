"""Messages of a chat out of text: reasoning and tool calls, by transformers' parser and the tokenizer's response template."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedModel

from TIDE.server.answers import ChatMessage, FunctionCall, ToolCall

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
    """Turns the text of one answer into parts of a message, as it is written.

    Args:
        template: None: all of it is content.
        prompt: the text before the answer.
        tools: those the model may call.
        call_id: begins the ids of tool calls.
    """

    def __init__(self, template: dict[str, Any] | None, prompt: str, tools: list[dict[str, Any]] | None, call_id: str) -> None:
        self.call_id = call_id
        self.calls = 0
        self._parser: Any = None
        self._raw = ""  # text of a region that is not read yet
        if template is not None:
            from transformers.utils.chat_parsing import ResponseParser

            self._parser = ResponseParser(template, prefix=prompt, tools=tools)

    def feed(self, text: str, is_last: bool = False) -> list[ChatMessage]:
        """Return what a piece of text adds to the message."""
        if self._parser is None:
            return [ChatMessage(content=text)] if text else []
        try:
            events = self._parser.feed(text) if text else []
            if is_last:
                events = [*events, *self._parser.finalize()[1]]
        except (ValueError, KeyError):  # a tool call that is none: it is shown as it was written
            self._parser = None
            return [ChatMessage(content=self._raw + text)]
        return [part for event in events if (part := self._part(event)) is not None]

    def _part(self, event: dict[str, Any]) -> ChatMessage | None:
        field = event.get("field")
        self._raw = self._raw + event["text"] if event.get("dirty") else ""
        if event["type"] == "region_close" and field == "tool_calls":
            return self._call(event["value"])
        if event["type"] != "region_chunk" or event.get("dirty") or not event.get("text"):
            return None
        if field in REASONING:
            return ChatMessage(reasoning_content=event["text"])
        return ChatMessage(content=event["text"]) if field == "content" else None

    def _call(self, value: dict[str, Any]) -> ChatMessage | None:
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.calls += 1
        call = ToolCall(
            index=self.calls - 1,
            id=f"call_{self.call_id}_{self.calls - 1}",
            function=FunctionCall(name=function["name"], arguments=text),
        )
        return ChatMessage(tool_calls=[call])


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
