"""Replies: the answers of a request, sent at once or as server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse

from TIDE.server.answers import Answer, ChatAnswer, ChatChunk, ChatLogprobs, Reason, TextAnswer, TextLogprobs, Usage
from TIDE.server.errors import INTERNAL, APIError
from TIDE.server.job import Call, Delta
from TIDE.server.requests import ChatRequest, CompletionRequest
from TIDE.server.service import Service, note

logger = logging.getLogger(__name__)
T = TypeVar("T")
GONE = APIError(499, "the client went away.")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, or give it up when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise GONE
        return task.result()
    finally:
        task.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@contextlib.contextmanager
def cancelled_on_error(request: Request, call: Call) -> Iterator[None]:
    """Give up the answers of a request if the block fails."""
    try:
        yield
    except BaseException:
        call.cancel()
        note(request, call)
        raise


class Reply(ABC):
    """The answers of one request, as they are sent.

    Args:
        kind: begins the id.

    Attributes:
        facts: fields of every object that is sent.
        counts: tokens of each answer, as far as they were sent.
    """

    whole: type[ChatAnswer | TextAnswer]
    chunk: type[ChatChunk | TextAnswer]

    def __init__(
        self, service: Service, body: ChatRequest | CompletionRequest, call: Call, prompt_tokens: int, kind: str
    ) -> None:
        self.body = body
        self.call = call
        self.prompt_tokens = prompt_tokens
        self.tokenizer = service.tokenizer
        self.facts: dict[str, Any] = dict(id=f"{kind}-{uuid.uuid4().hex}", created=int(time.time()), model=service.names[0])
        self.counts = [0] * len(call.jobs)

    async def response(self, request: Request) -> Response:
        """Send the answers when all have ended, or as they are written. An error before the first delta is the request's."""
        if not self.body.stream:
            return (await self._collected(request)).response()
        deltas = self.call.deltas()
        with cancelled_on_error(request, self.call):
            first = await unless_gone(request, anext(deltas, None))
        return StreamingResponse(self._events(request, first, deltas), media_type="text/event-stream")

    async def _collected(self, request: Request) -> Answer:
        answers: list[list[Delta]] = [[] for _ in self.call.jobs]

        async def collect() -> None:
            async for delta in self.call.deltas():
                answers[delta.index].append(delta)

        try:
            await unless_gone(request, collect())
        finally:
            self.call.cancel()
            note(request, self.call)
        return self.whole(**self.facts, choices=self.choices(answers), usage=self.usage)

    async def _events(self, request: Request, first: Delta | None, deltas: AsyncIterator[Delta]) -> AsyncIterator[str]:
        try:
            yield "".join(map(_event, (*self.begin(), *(() if first is None else self._chunks(first)))))
            async for delta in deltas:
                if chunks := self._chunks(delta):
                    yield "".join(map(_event, chunks))
            yield (_event(self.chunk_of([], self.usage)) if self.body.sends_usage else "") + "data: [DONE]\n\n"
        except Exception as problem:
            if not isinstance(problem, APIError):
                logger.exception("a stream broke off: %s: %s", type(problem).__name__, problem)
            error = problem if isinstance(problem, APIError) else APIError(500, INTERNAL)
            note(request, error=error.message)
            yield f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n"
        finally:
            self.call.cancel()
            note(request, self.call)

    def chunk_of(self, choices: list[Any], usage: Usage | None) -> Answer:
        facts = self.facts | (dict(usage=usage) if self.body.sends_usage else {})
        return self.chunk(**facts, choices=choices)

    def _chunks(self, delta: Delta) -> list[Answer]:
        """Return a chunk for each part of the answer that a delta adds; the last one has the fields of its tokens."""
        self.counts[delta.index] = delta.count
        if choices := self.parts(delta):
            self._complete(choices[-1], delta)
        return [self.chunk_of([choice], self.usage if self.body.sends_usage_always else None) for choice in choices]

    def choices(self, answers: list[list[Delta]]) -> list[Any]:
        """Return a choice for all deltas of each answer."""
        choices = []
        for deltas in answers:
            last = deltas[-1]
            tokens = [token for delta in deltas for token in delta.tokens]
            logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
            self.counts[last.index] = last.count
            choices.append(self._complete(self.choice(deltas), replace(last, tokens=tokens, logprobs=logprobs)))
        return choices

    def _complete(self, choice: Any, delta: Delta) -> Any:
        """Add all but the text to a choice, and return it."""
        choice.finish_reason = self.reason(delta)
        if self.body.asked_logprobs is not None:
            choice.logprobs = self.logprobs(delta)
        if self.body.tide.details:
            choice.tide = self.call.jobs[delta.index].details(delta.tokens, delta.is_last)
        return choice

    def is_silent(self, delta: Delta) -> bool:
        """Return True if a delta adds nothing to an answer besides its text."""
        has_tokens = delta.tokens and (self.body.asked_logprobs is not None or self.body.tide.details)
        return not delta.is_last and not has_tokens

    @property
    def usage(self) -> Usage:
        return Usage.of(self.prompt_tokens, sum(self.counts))

    def reason(self, delta: Delta) -> Reason | None:
        return delta.reason

    @abstractmethod
    def begin(self) -> list[Answer]:
        """Return the chunks before the first delta."""

    @abstractmethod
    def parts(self, delta: Delta) -> list[Any]:
        """Return the choices that a delta adds to the stream."""

    @abstractmethod
    def choice(self, deltas: list[Delta]) -> Any:
        """Return the choice with the text of a whole answer."""

    @abstractmethod
    def logprobs(self, delta: Delta) -> ChatLogprobs | TextLogprobs: ...


def _event(chunk: Answer) -> str:
    return f"data: {chunk.as_json}\n\n"
