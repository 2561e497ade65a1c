"""A job: one answer, from its prompt to its last token. A call: the answers of one request.

The worker's thread reads the tokens of a job's row and turns them into deltas, one a round. A call takes the deltas of its jobs
out of one queue, on the side of asyncio. A job may also have its prompt scored, before its answer or instead of one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from TIDE.engine.engine import TIDE
from TIDE.engine.rows.row import Row
from TIDE.server.answers import Details, Reason, Timings, WrittenToken
from TIDE.server.errors import APIError, of_row
from TIDE.server.logprobs import Logprob, logprobs_of
from TIDE.server.scoring import PromptScorer
from TIDE.server.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class GenerationSpec:
    """A prompt and how one answer to it is generated.

    Attributes:
        options: keywords of `engine.add`; None: nothing is written, the prompt is scored only.
        logprobs: alternatives that each token comes with; None: no logprobs.
        keeps_special: special tokens are part of the text, for a parser.
        min_tokens: stop strings that are complete by then do not count.
        scores: alternatives that each token of the prompt comes with; None: it is not scored.
    """

    ids: list[int]
    options: dict[str, Any] | None
    stops: Sequence[str] = ()
    logprobs: int | None = None
    exits: bool = True
    keeps_special: bool = False
    min_tokens: int = 0
    scores: int | None = None


@dataclass
class Times:
    """When things happened, by the clock of `time.perf_counter`."""

    arrived: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0


class DecodedToken(NamedTuple):
    """A token of an answer: its text before stop strings are cut off, and where it was decided."""

    id: int
    text: str
    depth: int
    score: float | None


@dataclass
class Delta:
    """The part of an answer that a round added; with a reason or an error it is the last one.

    Attributes:
        count: tokens of the answer so far.
        scores: of the prompt, all in one delta.
    """

    index: int
    count: int = 0
    text: str = ""
    tokens: list[DecodedToken] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    scores: list[Logprob | int] = field(default_factory=list)
    reason: Reason | None = None
    error: APIError | None = None

    @property
    def is_last(self) -> bool:
        return self.reason is not None or self.error is not None


class Job:
    """One answer.

    Attributes:
        tokens: written so far, up to the one that completed a stop string.
        row: in the engine, once it has one.
        cancelled: nobody waits for it any more.
        queue: for its deltas, of the thread of asyncio.
    """

    def __init__(self, spec: GenerationSpec, index: int, queue: asyncio.Queue[Delta], tokenizer: Any) -> None:
        self.spec = spec
        self.index = index
        self.queue = queue
        self.times = Times()
        self.row: Row | None = None
        self.tokens = 0
        self.cancelled = False
        self._scorer: PromptScorer | None = None
        self._text = Detokenizer(tokenizer, spec.ids, spec.keeps_special)
        self._stops = StopStrings(spec.stops)

    def score(self, engine: TIDE) -> Delta | None:
        """Score a piece of the prompt; return the scores of all of it once there are."""
        assert self.spec.scores is not None
        if self._scorer is None:
            self._scorer = PromptScorer(engine, self.spec.ids, self.spec.scores)
        self._scorer.score_piece()
        if not self._scorer.is_done:
            return None
        found, self._scorer = self._scorer.found, None
        return Delta(self.index, scores=found, reason="length" if self.spec.options is None else None)

    def read(self) -> Delta | None:
        """Return what the row has got since the last time; None: nothing."""
        row = self.row
        assert row is not None
        new = row.tokens[row.prompt + self.tokens :]
        if not new and not row.finished:
            return None
        delta = Delta(self.index, self.tokens)
        ends = row.finished and bool(new) and new[-1] in row.stop.end_tokens
        for number, token in enumerate(new):
            delta.count = self.tokens + 1
            self._add(delta, token, is_text=not (ends and number == len(new) - 1))
            if self._stops.found:
                delta.reason = "stop"
                return delta
        if row.error is not None:
            delta.error = of_row(row.error)
        elif row.finished:
            delta.text += self._stops.add(self._text.rest(), self._may_stop)
            delta.reason = "stop" if ends or self._stops.found else "length"
            delta.text += self._stops.rest()
        return delta

    def _add(self, delta: Delta, token: int, is_text: bool) -> None:
        assert self.row is not None
        place = self.row.prompt + self.tokens
        decided = self.row.decided[self.tokens]
        self.tokens += 1
        written = self._text.add(token) if is_text else ""
        delta.text += self._stops.add(written, self._may_stop)
        delta.tokens.append(DecodedToken(token, written, decided.depth, decided.score))
        if self.spec.logprobs is not None:
            delta.logprobs += logprobs_of(self.row.kept.pop(place).logits[None], [token], self.spec.logprobs)

    @property
    def _may_stop(self) -> bool:
        return self.tokens > self.spec.min_tokens

    def details(self, tokens: list[DecodedToken], is_last: bool) -> Details:
        """Return what TIDE did: for some tokens, with the counts of the whole answer behind the last."""
        assert self.row is not None
        found = Details(tokens=[WrittenToken(**token._asdict()) for token in tokens], num_layers=self.row.num_layers)
        if is_last:
            stats, times = self.row.stats, self.times
            found.drafted, found.accepted, found.layers_run = stats.drafted, stats.accepted, stats.layers_run
            found.seed = stats.seed
            found.timings = Timings(
                queue=times.started - times.arrived,
                prompt=times.first - times.started,
                decode=times.last - times.first,
                tokens_per_second=self.tokens / max(times.last - times.started, 1e-9),
            )
        return found


class Call:
    """The answers of one request.

    Args:
        cancel: gives up jobs that have not ended.
    """

    def __init__(self, cancel: Callable[[Sequence[Job]], None], tokenizer: Any, specs: Sequence[GenerationSpec]) -> None:
        self._cancel = cancel
        self._queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._kept: deque[Delta] = deque()  # that came while prompts were scored
        self.jobs = [Job(spec, index, self._queue, tokenizer) for index, spec in enumerate(specs)]

    async def scores(self) -> list[list[Logprob | int]]:
        """Return the scores of prompts, in the order of their jobs, once there are all. What is written meanwhile is kept."""
        found: dict[int, list[Logprob | int]] = {}
        wanted = [job.index for job in self.jobs if job.spec.scores is not None]
        while len(found) < len(wanted):
            delta = await self._next()
            self._kept.append(delta)
            if delta.scores:
                found[delta.index] = delta.scores
        return [found[index] for index in wanted]

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield what is written, until all answers have ended. An error of one is the error of the request."""
        left = len(self.jobs)
        while left:
            delta = self._kept.popleft() if self._kept else await self._next()
            left -= delta.is_last
            yield delta

    async def _next(self) -> Delta:
        delta = await self._queue.get()
        if delta.error is not None:
            raise delta.error
        return delta

    def cancel(self) -> None:
        """Give up what is not written yet."""
        self._cancel(self.jobs)

    @property
    def completion_tokens(self) -> int:
        return sum(job.tokens for job in self.jobs)
