"""The worker: the one thread that owns the engine.

    asyncio   submit ─►  inbox ─►  decoder: rows of the engine  ─►  deltas  ─►  queue of each call   asyncio
    asyncio   cancel ─►  inbox     one step, all rows               once a round

Nothing else touches the engine. If the model fails, the worker is at its end: every request gets an error, `problem` is the
reason, and /health is 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import ctypes
import functools
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from TIDE.engine.engine import TIDE
from TIDE.server.decoder import Decoder
from TIDE.server.errors import APIError, refused
from TIDE.server.job import Call, Delta, GenerationSpec, Job
from TIDE.server.metrics import Metrics
from TIDE.server.settings import ServerSettings

logger = logging.getLogger(__name__)
DEAD = "the model has failed and this server answers no more. It has to be started again."
IDLE_SECONDS = 1.0  # without a request, until free memory is given back
LEAVING = "this server is stopping. Ask another one, or again later."


class Worker:
    """Decodes jobs in a thread of its own. Its public methods are for the thread of asyncio.

    Attributes:
        problem: why nothing is answered any more; None: all is well.
        is_draining: open answers are finished, and no new ones are taken.
    """

    def __init__(self, engine: TIDE, tokenizer: Any, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine = engine
        self.tokenizer = copy.deepcopy(tokenizer)  # tokenizers are not made for two threads
        self.settings = settings
        self.decoder = Decoder(engine, settings, metrics)
        self.problem: str | None = None
        self.is_draining = False
        self._open: set[Job] = set()  # of asyncio
        self._inbox: queue.SimpleQueue[Sequence[Job] | None] = queue.SimpleQueue()  # new jobs; none: look again; None: stop
        self._thread = threading.Thread(target=self._run, name="tide-worker", daemon=True)

    # ---- asyncio -------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread; return when it is warm."""
        self._loop = asyncio.get_running_loop()
        self._warm: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._warm

    def submit(self, specs: Sequence[GenerationSpec]) -> Call:
        """Take on the answers of a request, or refuse them all."""
        if self.problem is not None or self.is_draining:
            raise APIError(503, DEAD if self.problem else LEAVING, headers={"Retry-After": "5"})
        self.check_count(len(specs), "n")
        if len(specs) > self.settings.most_answers - len(self._open):
            seconds = str(max(1, min(60, round(self.decoder.mean_seconds))))
            raise APIError(429, f"the queue is full. Ask again in {seconds} s.", headers={"Retry-After": seconds})
        call = Call(self.cancel, self.tokenizer, specs)
        self._open.update(call.jobs)
        self._inbox.put(call.jobs)
        return call

    def check_count(self, count: int, param: str) -> None:
        """Refuse a request for more answers than there can ever be."""
        if count > (limit := self.settings.most_answers):
            raise refused(f"one request may ask for {limit} answers at most, found {count}. Ask for fewer.", param)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Give up jobs that have not ended."""
        cancelled = [job for job in jobs if job in self._open]
        for job in cancelled:
            job.cancelled = True
            self._open.discard(job)
        if cancelled:
            self._inbox.put(())

    async def stop(self, seconds: float) -> None:
        """Finish open answers within `seconds`; those that are left then end with an error."""
        self.is_draining = True
        until = time.perf_counter() + seconds
        while self._open and self._thread.is_alive() and time.perf_counter() < until:
            await asyncio.sleep(0.02)
        self._inbox.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # the last deltas of the thread are delivered

    # ---- the thread ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self.decoder.warm_up()
            self._call_soon(self._warm.set_result, None)
            while self._take():
                self.decoder.run_round()
                self._send()
            self._call_soon(self._abandon, LEAVING)
        except Exception as problem:
            logger.exception("the worker failed: %s: %s", type(problem).__name__, problem)
            self.problem = type(problem).__name__
            self._send()
            self._call_soon(self._fail_to_start, problem)
            self._call_soon(self._abandon, DEAD)

    def _take(self) -> bool:
        """Read the inbox; wait for it if there is nothing to decode. False: the server stops."""
        is_idle = self.decoder.is_idle
        with contextlib.suppress(queue.Empty):
            while True:
                jobs = self._next() if is_idle else self._inbox.get_nowait()
                if jobs is None:
                    return False
                self.decoder.waiting.extend(jobs)
                is_idle = False
        return True

    def _next(self) -> Sequence[Job] | None:
        """Wait for the inbox; free memory is given back meanwhile."""
        try:
            return self._inbox.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            trim()
            return self._inbox.get()

    def _send(self) -> None:
        """Hand the deltas of the round to asyncio, all at once."""
        if deltas := self.decoder.take_outbox():
            self._call_soon(self._deliver, deltas)

    def _deliver(self, deltas: list[tuple[Job, Delta]]) -> None:
        """Put deltas into the queues of their calls; runs in asyncio's thread."""
        for job, delta in deltas:
            if delta.is_last:
                self._open.discard(job)
            if not job.cancelled:
                job.queue.put_nowait(delta)

    def _abandon(self, message: str) -> None:
        """End all open answers with an error; runs in asyncio's thread, after which nothing new is taken."""
        error = APIError(503, message)
        for job in self._open:
            self.decoder.metrics.count_end(job, "error")
            job.queue.put_nowait(Delta(job.index, error=error))
        self._open.clear()

    def _fail_to_start(self, problem: Exception) -> None:
        """Hand an error of the warm-up to `start`; runs in asyncio's thread."""
        if not self._warm.done():
            self._warm.set_exception(problem)

    def _call_soon(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function, *arguments)


def trim() -> None:
    """Give freed memory back to the system. glibc keeps it in pieces: hundreds of MB after a few long prompts at a time."""
    if (malloc_trim := _malloc_trim()) is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
