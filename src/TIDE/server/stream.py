"""Answers that are sent while they are written: server-sent events, and clients that go away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse

from TIDE.server.answers import Answer
from TIDE.server.errors import INTERNAL, APIError
from TIDE.server.job import Burst, Call
from TIDE.server.service import note

logger = logging.getLogger(__name__)
T = TypeVar("T")
GONE = APIError(499, "the client went away.")


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """Return what `work` gives, or give it up when the client goes away."""
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
def given_up_on_error(request: Request, call: Call) -> Iterator[None]:
    """Give up the answers of a request if what is done inside fails."""
    try:
        yield
    except BaseException:
        call.cancel()
        note(request, call)
        raise


async def collected(request: Request, call: Call) -> list[list[Burst]]:
    """Return the bursts of each answer, when all have ended."""
    found: list[list[Burst]] = [[] for _ in call.jobs]

    async def collect() -> None:
        async for burst in call.bursts():
            found[burst.index].append(burst)

    try:
        await unless_gone(request, collect())
    finally:
        call.cancel()
        note(request, call)
    return found


async def streamed(
    request: Request, call: Call, first: list[Answer], chunks: Callable[[Burst], list[Answer]], last: Callable[[], list[Answer]]
) -> StreamingResponse:
    """Return a response that sends chunks as bursts come. An error before the first of them is the request's."""
    bursts = call.bursts()
    with given_up_on_error(request, call):
        burst = await unless_gone(request, anext(bursts, None))
    return StreamingResponse(_events(request, call, burst, bursts, first, chunks, last), media_type="text/event-stream")


async def _events(
    request: Request,
    call: Call,
    burst: Burst | None,
    bursts: AsyncIterator[Burst],
    first: list[Answer],
    chunks: Callable[[Burst], list[Answer]],
    last: Callable[[], list[Answer]],
) -> AsyncIterator[str]:
    try:
        yield "".join(map(_event, (*first, *(() if burst is None else chunks(burst)))))
        async for more in bursts:
            if sent := chunks(more):
                yield "".join(map(_event, sent))
        yield "".join(map(_event, last())) + "data: [DONE]\n\n"
    except Exception as problem:
        if not isinstance(problem, APIError):
            logger.exception("a stream broke off: %s: %s", type(problem).__name__, problem)
        error = problem if isinstance(problem, APIError) else APIError(500, INTERNAL)
        note(request, error=error.message)
        yield f"data: {json.dumps(error.body)}\n\ndata: [DONE]\n\n"
    finally:
        call.cancel()
        note(request, call)


def _event(chunk: Answer) -> str:
    return f"data: {chunk.as_json}\n\n"
