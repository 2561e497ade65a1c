"""The jobs of a worker, from the queue to their last token.

    waiting  ─►  scoring (prompts whose logprobs are requested)  ─►  running (rows of the engine)  ─►  deltas

A scored prompt counts as a row, and a piece of one of them runs between two steps. An error of one row ends that answer. If a
step fails, the row that joined last is taken for the reason and ends with an error; the others go on from their texts. If none
is left and the model fails on a prompt of our own, that error is raised: it is the end of the worker.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from typing import Any

import torch

from TIDE.engine.engine import TIDE
from TIDE.server.errors import INTERNAL, APIError, of_row
from TIDE.server.job import Delta, Job
from TIDE.server.metrics import Metrics
from TIDE.server.settings import ServerSettings

logger = logging.getLogger(__name__)
WARM_UP: tuple[tuple[str, dict[str, Any]], ...] = (  # code is compiled for these before the first request
    ("greedy", dict(do_sample=False)),
    ("sampled", dict(do_sample=True, temperature=1.0, top_k=20, top_p=0.9, presence_penalty=0.1, seed=0)),
    ("with logprobs", dict(do_sample=False, return_dict_in_generate=True, output_logits=True)),
)


class Decoder:
    """Decodes jobs on an engine. Only the worker's thread calls it.

    Attributes:
        scoring: jobs whose prompt is scored; the first of them runs.
        outbox: deltas that have not been sent yet.
        mean_seconds: of recent answers.
    """

    def __init__(self, engine: TIDE, settings: ServerSettings, metrics: Metrics) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = metrics
        self.waiting: deque[Job] = deque()
        self.scoring: list[Job] = []
        self.running: list[Job] = []
        self.outbox: list[tuple[Job, Delta]] = []
        self.mean_seconds = 1.0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.scoring and not self.running

    def warm_up(self) -> None:
        """Compile and capture code before the first request, which would wait for it."""
        self.engine.warm_up(self.settings.max_rows)
        for name, options in WARM_UP:
            began = time.perf_counter()
            self.decode_alone(**options)
            logger.info("warm-up: %s, %.1f s", name, time.perf_counter() - began)

    def decode_alone(self, **options: Any) -> None:
        """Write a few tokens of no meaning while there are no other rows."""
        row = self.engine.add(_prompt(list(range(8))), max_new_tokens=8, eos_token_id=None, **options)
        while not row.finished:
            self.engine.step()

    def run_round(self) -> None:
        """Admit jobs, end those that were cancelled or are late, score a piece of a prompt and decode a step."""
        self._admit()
        self._end_late()
        if self.scoring:
            self._score()
        if self.running:
            self._step()

    def take_outbox(self) -> list[tuple[Job, Delta]]:
        """Return the deltas since the last call, and report how many jobs there are."""
        self.metrics.family("num_requests_running").set(len(self.running) + len(self.scoring))
        self.metrics.family("num_requests_waiting").set(len(self.waiting))
        deltas, self.outbox = self.outbox, []
        return deltas

    def _admit(self) -> None:
        for job in [job for job in (*self.running, *self.scoring) if job.cancelled]:
            self._end(job, "abort")
        while self.waiting and len(self.running) + len(self.scoring) < self.settings.max_rows:
            job = self.waiting.popleft()
            if job.cancelled:
                self.metrics.count_end(job, "abort")
                continue
            job.times.started = time.perf_counter()
            self.metrics.count_start(job)
            if job.spec.scores is None:
                self._add_row(job)
            else:
                self.scoring.append(job)

    def _add_row(self, job: Job) -> None:
        assert job.spec.options is not None
        try:
            job.row = self.engine.add(_prompt(job.spec.ids), exits=job.spec.exits, **job.spec.options)
        except Exception as problem:
            self._fail(job, of_row(problem))
        else:
            self.running.append(job)

    def _end_late(self) -> None:
        limit = time.perf_counter() - self.settings.request_seconds
        late = [job for job in (*self.running, *self.scoring, *self.waiting) if job.times.arrived < limit]
        if not late:
            return
        self.waiting = deque(job for job in self.waiting if job not in late)
        reason = f"the answer took longer than {self.settings.request_seconds:g} s."
        for job in late:
            advice = "Ask for fewer tokens." if job.spec.options is not None else "Send a shorter prompt."
            self._fail(job, APIError(408, f"{reason} {advice}", headers={"x-should-retry": "false"}))

    def _score(self) -> None:
        """Score a piece of a prompt. After the last piece, the answer begins."""
        job = self.scoring[0]
        try:
            delta = job.score(self.engine)
        except Exception as problem:
            self._fail(job, of_row(problem))
            return
        if delta is not None:
            self._put(job, delta)
            if not delta.is_last:
                self.scoring.remove(job)
                self._add_row(job)

    def _step(self) -> None:
        try:
            self.engine.step()
        except Exception as problem:
            logger.error("a step failed: %s: %s", type(problem).__name__, problem)
            self._fail(max(self.running, key=lambda job: job.times.started), APIError(500, INTERNAL))
            return
        now, tokens, depths = time.perf_counter(), 0, Counter[int]()
        for job in list(self.running):
            before = job.tokens
            try:
                delta = job.read()
            except Exception as problem:
                logger.exception("an answer cannot be read: %s: %s", type(problem).__name__, problem)
                self._fail(job, APIError(500, INTERNAL), is_models=False)
                continue
            if delta is not None:
                tokens += job.tokens - before
                self._time(job, before, now)
                self._put(job, delta)
                depths.update(token.depth for token in delta.tokens)
        for depth, count in depths.items():
            self.metrics.family("depth_tokens", depth).inc(count)
        self.metrics.family("generation_tokens").inc(tokens)
        self.metrics.family("iteration_tokens_total").observe(tokens)
        used, total = self.engine.cache_use
        self.metrics.family("kv_cache_usage_perc").set(used / total if total else 0.0)

    def _time(self, job: Job, before: int, now: float) -> None:
        """Note when tokens came; the job had `before` of them."""
        if not before and job.tokens:
            job.times.first = now
            self.metrics.family("time_to_first_token_seconds").observe(now - job.times.arrived)
        elif job.tokens > before:
            self.metrics.family("inter_token_latency_seconds").observe(now - job.times.last)
        job.times.last = now

    def _put(self, job: Job, delta: Delta) -> None:
        self.outbox.append((job, delta))
        if delta.is_last:
            self._end(job, delta.reason or "error")

    def _end(self, job: Job, reason: str) -> None:
        """Take out a job and its row."""
        for jobs in (self.running, self.scoring):
            if job in jobs:
                jobs.remove(job)
        if job.row is not None and not job.row.finished:
            self.engine.remove(job.row)
        if job.row is not None:
            job.row.kept.clear()
        self.mean_seconds += 0.1 * (time.perf_counter() - job.times.arrived - self.mean_seconds)
        self.metrics.count_end(job, reason)

    def _fail(self, job: Job, error: APIError, is_models: bool = True) -> None:
        """End a job with an error. If it may be the model's, and no other row will show it, see whether the model works."""
        self._put(job, Delta(job.index, error=error))
        if is_models and error.status >= 500 and not self.running:
            self.decode_alone(do_sample=False)


def _prompt(ids: list[int]) -> dict[str, torch.Tensor]:
    """Return a prompt for the engine, on the host, where it does not wait for a round. Padding tokens are text, too."""
    input_ids = torch.tensor([ids])
    return dict(input_ids=input_ids, attention_mask=torch.ones_like(input_ids))
