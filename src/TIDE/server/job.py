"""A job: one answer, from its prompt to its last token. A call: the answers of one request.

The worker's thread reads the tokens of a job's row and turns them into bursts: what a round added. A call takes the bursts of
its jobs out of one queue, on the side of asyncio. A job may also have its prompt scored, before its answer or instead of one.
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
from TIDE.server.logprobs import Logprob, logprob_of
from TIDE.server.scoring import PromptScorer
from TIDE.server.text import Detokenizer, StopStrings


@dataclass(frozen=True)
class Ask:
    """The answer that is asked for.

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


class Written(NamedTuple):
    """A token of an answer: its text before stop strings are cut off, and where it was decided."""

    id: int
    text: str
    depth: int
    score: float | None


@dataclass
class Burst:
    """The part that a round added to an answer; with a reason or an error it is the last one.

    Attributes:
        count: tokens of the answer so far.
        scores: of the prompt, all in one burst.
    """

    index: int
    count: int = 0
    text: str = ""
    tokens: list[Written] = field(default_factory=list)
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
        bursts: the queue that it writes to, of the thread of asyncio.
    """

    def __init__(self, ask: Ask, index: int, bursts: asyncio.Queue[Burst], tokenizer: Any) -> None:
        self.ask = ask
        self.index = index
        self.bursts = bursts
        self.times = Times()
        self.row: Row | None = None
        self.tokens = 0
        self.cancelled = False
        self._scorer: PromptScorer | None = None
        self._text = Detokenizer(tokenizer, ask.ids, ask.keeps_special)
        self._stops = StopStrings(ask.stops)

    def score(self, engine: TIDE) -> Burst | None:
        """Score a piece of the prompt; return the scores of all of it once there are."""
        assert self.ask.scores is not None
        if self._scorer is None:
            self._scorer = PromptScorer(engine, self.ask.ids, self.ask.scores)
        self._scorer.score_piece()
        if not self._scorer.is_done:
            return None
        found, self._scorer = self._scorer.found, None
        return Burst(self.index, scores=found, reason="length" if self.ask.options is None else None)

    def read(self) -> Burst | None:
        """Return what the row has got since the last time; None: nothing."""
        row = self.row
        assert row is not None
        new = row.tokens[row.prompt + self.tokens :]
        if not new and not row.finished:
            return None
        burst = Burst(self.index, self.tokens)
        ends = row.finished and bool(new) and new[-1] in row.stop.end_tokens
        for number, token in enumerate(new):
            burst.count = self.tokens + 1
            self._add(burst, token, is_text=not (ends and number == len(new) - 1))
            if self._stops.found:
                burst.reason = "stop"
                return burst
        if row.error is not None:
            burst.error = of_row(row.error)
        elif row.finished:
            burst.text += self._stops.add(self._text.rest(), self._may_stop)
            burst.reason = "stop" if ends or self._stops.found else "length"
            burst.text += self._stops.rest()
        return burst

    def _add(self, burst: Burst, token: int, is_text: bool) -> None:
        assert self.row is not None
        place = self.row.prompt + self.tokens
        decided = self.row.decided[self.tokens]
        self.tokens += 1
        written = self._text.add(token) if is_text else ""
        burst.text += self._stops.add(written, self._may_stop)
        burst.tokens.append(Written(token, written, decided.depth, decided.score))
        if self.ask.logprobs is not None:
            burst.logprobs.append(logprob_of(self.row.kept.pop(place).logits, token, self.ask.logprobs))

    @property
    def _may_stop(self) -> bool:
        return self.tokens > self.ask.min_tokens

    def details(self, tokens: list[Written], is_last: bool) -> Details:
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

    def __init__(self, cancel: Callable[[Sequence[Job]], None], tokenizer: Any, asks: Sequence[Ask]) -> None:
        self._cancel = cancel
        self._queue: asyncio.Queue[Burst] = asyncio.Queue()
        self._kept: deque[Burst] = deque()  # that came while prompts were scored
        self.jobs = [Job(ask, index, self._queue, tokenizer) for index, ask in enumerate(asks)]

    async def scores(self) -> list[list[Logprob | int]]:
        """Return the scores of prompts, in the order of their jobs, once there are all. What is written meanwhile is kept."""
        found: dict[int, list[Logprob | int]] = {}
        wanted = [job.index for job in self.jobs if job.ask.scores is not None]
        while len(found) < len(wanted):
            burst = await self._next()
            self._kept.append(burst)
            if burst.scores:
                found[burst.index] = burst.scores
        return [found[index] for index in wanted]

    async def bursts(self) -> AsyncIterator[Burst]:
        """Yield what is written, until all answers have ended. An error of one is the error of the request."""
        left = len(self.jobs)
        while left:
            burst = self._kept.popleft() if self._kept else await self._next()
            left -= burst.is_last
            yield burst

    async def _next(self) -> Burst:
        burst = await self._queue.get()
        if burst.error is not None:
            raise burst.error
        return burst

    def cancel(self) -> None:
        """Give up what is not written yet."""
        self._cancel(self.jobs)

    @property
    def completion_tokens(self) -> int:
        return sum(job.tokens for job in self.jobs)
