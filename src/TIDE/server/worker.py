"""The worker: the one thread that owns the engine.

    asyncio   submit ─►  inbox ─►  waiting ─►  rows of the engine  ─►  bursts  ─►  queue of each call   asyncio
    asyncio   cancel ─►  inbox                  one step, all rows      once a round

Prompts that are scored have a place among the rows while they are, and a piece of one of them runs between two steps.
Nothing else touches the engine. An error of one row ends that answer. If a step fails, the row that joined last is taken for
the reason and ends with an error; the others go on from their texts. If none is left and the model fails on a prompt of our
own, the worker is at its end: every request gets an error, `problem` says why, and /health with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from TIDE.engine.engine import TIDE
from TIDE.server.errors import INTERNAL, APIError, of_row, refused
from TIDE.server.job import Ask, Burst, Call, Job
from TIDE.server.metrics import Metrics
from TIDE.server.settings import ServerSettings
from TIDE.server.trim import trim

logger = logging.getLogger(__name__)
DEAD = "the model has failed and this server answers no more. It has to be started again."
IDLE_SECONDS = 1.0  # without a request, until free memory is given back
LEAVING = "this server is stopping. Ask another one, or again later."
WARM_UP: tuple[tuple[str, dict[str, Any]], ...] = (  # what compiled code is made for before the first request
    ("greedy", dict(do_sample=False)),
    ("sampled", dict(do_sample=True, temperature=1.0, top_k=20, top_p=0.9, presence_penalty=0.1, seed=0)),
    ("with logprobs", dict(do_sample=False, return_dict_in_generate=True, output_logits=True)),
)


class Worker:
    """Decodes jobs on an engine in a thread of its own. Its methods are for the thread of asyncio.

    Attributes:
        problem: why nothing is answered any more; None: all is well.
        is_draining: what is there is finished, and nothing new is taken.
    """

    def __init__(self, engine: TIDE, tokenizer: Any, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine = engine
        self.tokenizer = copy.deepcopy(tokenizer)  # tokenizers are not made for two threads
        self.settings = settings
        self.metrics = metrics
        self.problem: str | None = None
        self.is_draining = False
        self._open: set[Job] = set()  # of asyncio
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._scoring: list[Job] = []  # the first of them runs
        self._running: list[Job] = []
        self._outbox: list[tuple[Job, Burst]] = []
        self._recent = 1.0  # mean seconds of an answer
        self._thread = threading.Thread(target=self._run, name="tide-worker", daemon=True)

    # ---- asyncio -------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the thread; return when it is warm."""
        self._loop = asyncio.get_running_loop()
        self._warm: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._warm

    def submit(self, asks: Sequence[Ask]) -> Call:
        """Take on the answers of a request, or refuse them all."""
        self._check_open()
        self.check_count(len(asks), "n")
        if len(asks) > self.settings.most_answers - len(self._open):
            seconds = str(max(1, min(60, round(self._recent))))
            raise APIError(429, f"the queue is full. Ask again in {seconds} s.", headers={"Retry-After": seconds})
        call = Call(self.cancel, self.tokenizer, asks)
        self._open.update(call.jobs)
        self._inbox.put(lambda: self._waiting.extend(call.jobs))
        return call

    def check_count(self, count: int, param: str) -> None:
        """Refuse a request for more answers than there can ever be."""
        if count > (most := self.settings.most_answers):
            raise refused(f"one request may ask for {most} answers at most, found {count}. Ask for fewer.", param)

    def cancel(self, jobs: Sequence[Job]) -> None:
        """Give up jobs that have not ended."""
        given_up = [job for job in jobs if job in self._open]
        for job in given_up:
            job.cancelled = True
            self._open.discard(job)
        if given_up:
            self._inbox.put(lambda: None)  # wakes the thread

    def _check_open(self) -> None:
        if self.problem is not None or self.is_draining:
            raise APIError(503, DEAD if self.problem else LEAVING, headers={"Retry-After": "5"})

    async def stop(self, seconds: float) -> None:
        """Finish what is there, within `seconds`; what is left then ends with an error."""
        self.is_draining = True
        until = time.perf_counter() + seconds
        while self._open and self._thread.is_alive() and time.perf_counter() < until:
            await asyncio.sleep(0.02)
        self._inbox.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)  # for what the thread has said last

    # ---- the thread ----------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._warm_up()
            self._call_soon(self._warm.set_result, None)
            while self._take():
                self._admit()
                self._end_late()
                if self._scoring:
                    self._score()
                if self._running:
                    self._step()
                self._send()
            self._call_soon(self._abandon, LEAVING)
        except Exception as problem:
            logger.exception("the worker failed: %s: %s", type(problem).__name__, problem)
            self.problem = type(problem).__name__
            self._send()
            self._call_soon(self._fail_to_start, problem)
            self._call_soon(self._abandon, DEAD)

    def _warm_up(self) -> None:
        """Compile and capture what requests need, so that the first of them does not wait for it."""
        self.engine.warm_up(self.settings.max_rows)
        for name, options in WARM_UP:
            began = time.perf_counter()
            self._decode_alone(**options)
            logger.info("warm-up: %s, %.1f s", name, time.perf_counter() - began)

    def _decode_alone(self, **options: Any) -> None:
        """Write a few tokens of no meaning while there are no other rows."""
        row = self.engine.add(self._prompt(list(range(8))), max_new_tokens=8, eos_token_id=None, **options)
        while not row.finished:
            self.engine.step()

    def _take(self) -> bool:
        """Do what asyncio has asked for; wait for it if there is nothing else to do. False: the server stops."""
        is_idle = not self._running and not self._scoring and not self._waiting
        with contextlib.suppress(queue.Empty):
            while True:
                asked = self._next() if is_idle else self._inbox.get_nowait()
                if asked is None:
                    return False
                asked()
                is_idle = False
        return True

    def _next(self) -> Callable[[], None] | None:
        """Wait for asyncio; free memory is given back meanwhile."""
        try:
            return self._inbox.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            trim()
            return self._inbox.get()

    def _admit(self) -> None:
        """Give rows to those who wait, and take them from those who are gone."""
        for job in [job for job in (*self._running, *self._scoring) if job.cancelled]:
            self._end(job, "abort")
        while self._waiting and len(self._running) + len(self._scoring) < self.settings.max_rows:
            job = self._waiting.popleft()
            if job.cancelled:
                self.metrics.ended(job, "abort")
                continue
            job.times.started = time.perf_counter()
            self.metrics.started(job)
            if job.ask.scores is None:
                self._add_row(job)
            else:
                self._scoring.append(job)

    def _add_row(self, job: Job) -> None:
        assert job.ask.options is not None
        try:
            job.row = self.engine.add(self._prompt(job.ask.ids), exits=job.ask.exits, **job.ask.options)
        except Exception as problem:
            self._fail(job, error := of_row(problem))
            self._check_model(error)
        else:
            self._running.append(job)

    def _end_late(self) -> None:
        limit = time.perf_counter() - self.settings.request_seconds
        late = [job for job in (*self._running, *self._scoring, *self._waiting) if job.times.arrived < limit]
        if not late:
            return
        self._waiting = deque(job for job in self._waiting if job not in late)
        words = f"the answer took longer than {self.settings.request_seconds:g} s."
        for job in late:
            advice = "Ask for fewer tokens." if job.ask.options is not None else "Send a shorter prompt."
            self._fail(job, APIError(408, f"{words} {advice}", headers={"x-should-retry": "false"}))

    def _score(self) -> None:
        """Score a piece of a prompt. Behind the last one, the answer begins."""
        job = self._scoring[0]
        try:
            burst = job.score(self.engine)
        except Exception as problem:
            self._fail(job, error := of_row(problem))
            self._check_model(error)
            return
        if burst is None:
            return
        self._outbox.append((job, burst))
        if burst.is_last:
            self._end(job, burst.reason or "error")
        else:
            self._scoring.remove(job)
            self._add_row(job)

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as problem:
            self._blame(problem)
            return
        now, tokens, depths = time.perf_counter(), 0, Counter[int]()
        for job in list(self._running):
            before = job.tokens
            try:
                burst = job.read()
            except Exception as problem:
                logger.exception("an answer cannot be read: %s: %s", type(problem).__name__, problem)
                self._fail(job, APIError(500, INTERNAL))
                continue
            if burst is None:
                continue
            tokens += job.tokens - before
            self._time(job, before, now)
            self._outbox.append((job, burst))
            depths.update(token.depth for token in burst.tokens)
            if burst.is_last:
                self._end(job, burst.reason or "error")
        for depth, count in depths.items():
            self.metrics.depth.labels(self.metrics.model, str(depth)).inc(count)
        self.metrics.generation_tokens.inc(tokens)
        self.metrics.iteration.observe(tokens)
        used, there = self.engine.cache_use
        self.metrics.cache.set(used / there if there else 0.0)

    def _blame(self, problem: Exception) -> None:
        """End the answer that most likely made a step fail."""
        logger.error("a step failed: %s: %s", type(problem).__name__, problem)
        error = APIError(500, INTERNAL)
        self._fail(max(self._running, key=lambda job: job.times.started), error)
        self._check_model(error)

    def _check_model(self, error: APIError) -> None:
        """After an error that is not the client's, see whether the model still works, unless other rows will show it."""
        if error.status >= 500 and not self._running:
            self._decode_alone(do_sample=False)

    def _time(self, job: Job, before: int, now: float) -> None:
        """Note when tokens came."""
        if not before and job.tokens:
            job.times.first = now
            self.metrics.first_token.observe(now - job.times.arrived)
        elif job.tokens > before:
            self.metrics.between.observe(now - job.times.last)
        job.times.last = now

    def _end(self, job: Job, reason: str) -> None:
        """Take a job out, and its row."""
        for jobs in (self._running, self._scoring):
            if job in jobs:
                jobs.remove(job)
        if job.row is not None and not job.row.finished:
            self.engine.remove(job.row)
        if job.row is not None:
            job.row.kept.clear()
        self._recent += 0.1 * (time.perf_counter() - job.times.arrived - self._recent)
        self.metrics.ended(job, reason)

    def _fail(self, job: Job, error: APIError) -> None:
        self._outbox.append((job, Burst(job.index, error=error)))
        self._end(job, "error")

    def _send(self) -> None:
        """Hand what the round wrote to asyncio, all at once."""
        self.metrics.running.set(len(self._running) + len(self._scoring))
        self.metrics.waiting.set(len(self._waiting))
        if self._outbox:
            sent, self._outbox = self._outbox, []
            self._call_soon(self._deliver, sent)

    def _deliver(self, sent: list[tuple[Job, Burst]]) -> None:
        """Put bursts into the queues of their calls; runs in asyncio's thread."""
        for job, burst in sent:
            if burst.is_last:
                self._open.discard(job)
            if not job.cancelled:
                job.bursts.put_nowait(burst)

    def _abandon(self, words: str) -> None:
        """End whatever is left with an error; runs in asyncio's thread, after which nothing new is taken."""
        error = APIError(503, words)
        for job in self._open:
            self.metrics.ended(job, "error")
            job.bursts.put_nowait(Burst(job.index, error=error))
        self._open.clear()

    def _fail_to_start(self, problem: Exception) -> None:
        """Hand an error of the warm-up to `start`; runs in asyncio's thread."""
        if not self._warm.done():
            self._warm.set_exception(problem)

    def _call_soon(self, function: Callable[..., object], *given: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *given)

    def _prompt(self, ids: list[int]) -> dict[str, torch.Tensor]:
        """Return a prompt for the engine. The mask says that all of it is text, padding tokens too. It is on the host, where
        it does not wait for a round."""
        own = torch.tensor([ids])
        return dict(input_ids=own, attention_mask=torch.ones_like(own))
