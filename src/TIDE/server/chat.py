"""/v1/chat/completions: messages in, a message out."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from TIDE.server.answers import Answer, ChatAnswer, ChatChoice, ChatChunk, ChatDelta, ChatLogprobs, ChatMessage, Reason
from TIDE.server.errors import APIError, refused
from TIDE.server.forced_calls import ForcedCallParser, forced_calls
from TIDE.server.job import Call, Delta, GenerationSpec
from TIDE.server.logprobs import for_chat
from TIDE.server.parsing import MessageParser, joined, without_calls
from TIDE.server.reply import Reply, unless_gone
from TIDE.server.requests import ChatRequest, ResponseFormat
from TIDE.server.service import Service, note

Parser = MessageParser | ForcedCallParser
NO_CALL_FORMAT = (
    "tools with tool_choice 'auto' need a tokenizer with a response template, which tells calls from text; this model's has "
    "none. Send tool_choice 'required' or a function's name for a call that follows the tools' schemas, or 'none' for text."
)


async def chat(service: Service, request: Request, body: ChatRequest) -> Response:
    """Answer a chat, at once or as it is written."""
    service.check_model(body.model)
    calls = forced_calls(body)
    _check(body, service.template, is_forced=calls is not None)
    ids = await unless_gone(request, service.prompts.run(service.prompts.of_messages, body))
    service.prompts.room(ids, body.asked_tokens, "messages", body.asked_tokens_in)
    note(request, model=service.names[0], stream=bool(body.stream), prompt_tokens=len(ids))
    specs = await asyncio.to_thread(_specs, service, body, ids, calls)
    # before there is anything that could be left running
    parsers = await service.prompts.run(_parsers, service, body, ids, calls is not None)
    return await ChatReply(service, body, service.worker.submit(specs), len(ids), parsers).response(request)


def _specs(service: Service, body: ChatRequest, ids: list[int], calls: ResponseFormat | None) -> list[GenerationSpec]:
    """Return the answers of a request; those that must call a tool follow the format of calls."""
    if calls is None:
        return service.specs(body, [ids], keeps_special=service.template is not None and not body.has_format)
    try:
        return service.specs(body.model_copy(update={"response_format": calls}), [ids])
    except APIError as problem:
        problem.param = "tools" if problem.param == "response_format" else problem.param
        raise


def _check(body: ChatRequest, template: dict[str, Any] | None, is_forced: bool) -> None:
    if body.top_logprobs and not body.logprobs:
        raise refused("top_logprobs goes with logprobs=true only.", "top_logprobs")
    if body.stream_options and not body.stream:
        raise refused("stream_options goes with stream=true only.", "stream_options")
    if body.tools and template is None and body.tool_choice != "none" and not is_forced:
        raise refused(NO_CALL_FORMAT, "tools")
    if body.tool_choice == "auto" and not body.tools:
        raise refused("tool_choice goes with tools only.", "tool_choice")


def _parsers(service: Service, body: ChatRequest, ids: list[int], is_forced: bool) -> list[Parser]:
    """Return a parser for each answer."""
    call_ids = [uuid.uuid4().hex[:24] for _ in range(body.n or 1)]
    if is_forced:
        return [ForcedCallParser(call_id) for call_id in call_ids]
    template = None if body.has_format else service.template  # a format holds from the first token: there is no reasoning
    prompt = "" if template is None else service.prompts.tokenizer.decode(ids)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    if not tools or body.tool_choice == "none":
        template = without_calls(template)
    return [MessageParser(template, prompt, tools, call_id) for call_id in call_ids]


class ChatReply(Reply):
    """The messages of one request; each answer has a parser."""

    whole, chunk = ChatAnswer, ChatChunk

    def __init__(self, service: Service, body: ChatRequest, call: Call, prompt_tokens: int, parsers: list[Parser]) -> None:
        super().__init__(service, body, call, prompt_tokens, "chatcmpl")
        self.parsers = parsers

    def begin(self) -> list[Answer]:
        usage = self.usage if self.body.sends_usage_always else None
        message = ChatMessage(role="assistant", content="")
        return [self.chunk_of([ChatDelta(index=job.index, delta=message, finish_reason=None)], usage) for job in self.call.jobs]

    def parts(self, delta: Delta) -> list[ChatDelta]:
        messages = self._parsed(delta) or ([] if self.is_silent(delta) else [ChatMessage()])
        return [ChatDelta(index=delta.index, delta=message, finish_reason=None) for message in messages]

    def choice(self, deltas: list[Delta]) -> ChatChoice:
        messages = [message for delta in deltas for message in self._parsed(delta)]  # as they are streamed
        return ChatChoice(index=deltas[0].index, message=joined(messages), logprobs=None, finish_reason="stop")

    def _parsed(self, delta: Delta) -> list[ChatMessage]:
        return self.parsers[delta.index].feed(delta.text, is_last=delta.is_last)

    def reason(self, delta: Delta) -> Reason | None:
        return "tool_calls" if delta.reason == "stop" and self.parsers[delta.index].calls else delta.reason

    def logprobs(self, delta: Delta) -> ChatLogprobs:
        return for_chat(self.tokenizer, delta.logprobs)
