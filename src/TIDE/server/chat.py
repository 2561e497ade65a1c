"""/v1/chat/completions: messages in, a message out."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from TIDE.server.answers import Answer, ChatAnswer, ChatChoice, ChatChunk, ChatDelta, ChatMessage, Reason, Usage
from TIDE.server.errors import APIError, refused
from TIDE.server.forced_calls import ForcedCallParser, forced_calls
from TIDE.server.job import Ask, Burst, Call
from TIDE.server.logprobs import for_chat
from TIDE.server.parsing import MessageParser, joined
from TIDE.server.regions import without_calls
from TIDE.server.requests import ChatRequest, ResponseFormat
from TIDE.server.service import Service, new_id, note
from TIDE.server.stream import collected, streamed, unless_gone

Parser = MessageParser | ForcedCallParser
NO_CALL_FORMAT = (
    "tools with tool_choice 'auto' need a tokenizer with a response template, which tells calls from text; this model's has "
    "none. Send tool_choice 'required' or a function's name for a call that follows the tools' schemas, or 'none' for text."
)


async def chat(service: Service, request: Request, asked: ChatRequest) -> Response:
    """Answer a chat, at once or as it is written."""
    service.check_model(asked.model)
    calls = forced_calls(asked)
    _check(asked, service.template, is_forced=calls is not None)
    ids = await unless_gone(request, service.tokenizing(service.prompts.of_messages, asked))
    service.prompts.room(ids, asked.asked_tokens, "messages", asked.asked_tokens_in)
    note(request, model=service.names[0], stream=bool(asked.stream), prompt_tokens=len(ids))
    asks = await asyncio.to_thread(_asks, service, asked, ids, calls)
    # before there is anything that could be left running
    parsers = await service.tokenizing(_parsers, service, asked, ids, calls is not None)
    reply = _Reply(service, asked, service.worker.submit(asks), len(ids), parsers)
    if asked.stream:
        return await streamed(request, reply.call, reply.begin(), reply.chunks, reply.end)
    return reply.whole(await collected(request, reply.call)).response()


def _asks(service: Service, asked: ChatRequest, ids: list[int], calls: ResponseFormat | None) -> list[Ask]:
    """Return the answers of a request; those that must call a tool follow the format of calls."""
    limits = asked.asked_tokens, asked.asked_logprobs
    if calls is None:
        return service.asks(asked, [ids], *limits, keeps_special=service.template is not None and not asked.has_format)
    try:
        return service.asks(asked.model_copy(update={"response_format": calls}), [ids], *limits)
    except APIError as problem:
        problem.param = "tools" if problem.param == "response_format" else problem.param
        raise


def _check(asked: ChatRequest, template: dict[str, Any] | None, is_forced: bool) -> None:
    if asked.top_logprobs and not asked.logprobs:
        raise refused("top_logprobs goes with logprobs=true only.", "top_logprobs")
    if asked.stream_options and not asked.stream:
        raise refused("stream_options goes with stream=true only.", "stream_options")
    if asked.tools and template is None and asked.tool_choice != "none" and not is_forced:
        raise refused(NO_CALL_FORMAT, "tools")
    if asked.tool_choice == "auto" and not asked.tools:
        raise refused("tool_choice goes with tools only.", "tool_choice")


def _parsers(service: Service, asked: ChatRequest, ids: list[int], is_forced: bool) -> list[Parser]:
    """Return a parser for each answer."""
    own_ids = [uuid.uuid4().hex[:24] for _ in range(asked.n or 1)]
    if is_forced:
        return [ForcedCallParser(own_id) for own_id in own_ids]
    template = None if asked.has_format else service.template  # a format holds from the first token: there is no reasoning
    prompt = "" if template is None else service.prompts.tokenizer.decode(ids)
    tools = [tool.model_dump(exclude_none=True) for tool in asked.tools or ()]
    if not tools or asked.tool_choice == "none":
        template = without_calls(template)
    return [MessageParser(template, prompt, tools, own_id) for own_id in own_ids]


class _Reply:
    """The answers of one request, as they are sent."""

    def __init__(self, service: Service, asked: ChatRequest, call: Call, prompt_tokens: int, parsers: list[Parser]) -> None:
        self.service = service
        self.asked = asked
        self.call = call
        self.prompt_tokens = prompt_tokens
        self.parsers = parsers
        self.id = new_id("chatcmpl")
        self.created = int(time.time())
        self.counts = [0] * len(call.jobs)  # tokens of each answer, as far as they were sent

    @property
    def usage(self) -> Usage:
        return Usage.of(self.prompt_tokens, sum(self.counts))

    def whole(self, bursts: list[list[Burst]]) -> ChatAnswer:
        choices = [self._choice(own) for own in bursts]
        name = self.service.names[0]
        return ChatAnswer(id=self.id, created=self.created, model=name, choices=choices, usage=self.usage)

    def _choice(self, bursts: list[Burst]) -> ChatChoice:
        last = bursts[-1]
        self.counts[last.index] = last.count
        parser = self.parsers[last.index]
        parts = [part for burst in bursts for part in parser.feed(burst.text, is_last=burst.is_last)]  # as they are streamed
        choice = ChatChoice(index=last.index, message=joined(parts), logprobs=None, finish_reason=self._reason(last) or "stop")
        if self.asked.logprobs:
            choice.logprobs = for_chat(self.service.tokenizer, [one for burst in bursts for one in burst.logprobs])
        if self.asked.tide.details:
            tokens = [token for burst in bursts for token in burst.tokens]
            choice.tide = self.call.jobs[last.index].details(tokens, is_last=True)
        return choice

    def _reason(self, burst: Burst) -> Reason | None:
        called = burst.reason == "stop" and self.parsers[burst.index].calls
        return "tool_calls" if called else burst.reason

    def begin(self) -> list[Answer]:
        deltas = [
            ChatDelta(index=job.index, delta=ChatMessage(role="assistant", content=""), finish_reason=None)
            for job in self.call.jobs
        ]
        return [self._chunk([delta]) for delta in deltas]

    def chunks(self, burst: Burst) -> list[Answer]:
        """Return a chunk for each part of the message that a burst adds; the last one has what is said of tokens."""
        self.counts[burst.index] = burst.count
        parts = self.parsers[burst.index].feed(burst.text, is_last=burst.is_last)
        wants_tokens = burst.tokens and (self.asked.logprobs or self.asked.tide.details)
        if not parts and not wants_tokens and not burst.is_last:
            return []
        deltas = [ChatDelta(index=burst.index, delta=part, finish_reason=None) for part in parts or [ChatMessage()]]
        last = deltas[-1]
        if self.asked.logprobs:
            last.logprobs = for_chat(self.service.tokenizer, burst.logprobs)
        if self.asked.tide.details:
            last.tide = self.call.jobs[burst.index].details(burst.tokens, burst.is_last)
        last.finish_reason = self._reason(burst)
        return [self._chunk([delta]) for delta in deltas]

    def end(self) -> list[Answer]:
        if not self.asked.sends_usage:
            return []
        return [ChatChunk(id=self.id, created=self.created, model=self.service.names[0], choices=[], usage=self.usage)]

    def _chunk(self, choices: list[ChatDelta]) -> ChatChunk:
        chunk = ChatChunk(id=self.id, created=self.created, model=self.service.names[0], choices=choices)
        if self.asked.sends_usage:
            chunk.usage = self.usage if self.asked.sends_usage_always else None
        return chunk
