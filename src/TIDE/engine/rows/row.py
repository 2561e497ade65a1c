"""A row: one text being written.

    tokens      the prompt, then tokens that are final
    drafts      tokens that exits predicted and the full model has not verified yet

Tokens are appended, counted and ended in `extend`, and nowhere else; `resume` makes up for an interrupt there. What goes wrong
with one row ends that row only: see `fail`. All of this is on the host; `slot` says where the row's K/V are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import NamedTuple

import torch

from TIDE.engine.rows.logits_processors import Sampling
from TIDE.engine.rows.stop import StopRule
from TIDE.stats import ExitStats, Seconds


class Draft(NamedTuple):
    """A token and where it was decided."""

    token: int
    depth: int
    score: float | None = None  # of the router that let it out, where one was asked


class Kept(NamedTuple):
    """The distribution a token was chosen from, (vocabulary,) in fp32."""

    logits: torch.Tensor
    scores: torch.Tensor  # after the processors


class RoundResult(NamedTuple):
    """The outcome of a round for one row."""

    tokens: Sequence[Draft]  # accepted drafts, then the full model's token
    drafted: int = 0  # drafts that were verified
    accepted: int = 0
    first_step: int = 1  # number of the first token since the full model's last one
    scores: Sequence[float] = ()  # of the drafts that were verified, where routers gave any
    made: int = 0  # drafts, those included whose scores were too low
    levels: Sequence[int] = ()  # of a tree: its drafts at each depth


@dataclass(eq=False)
class Row:
    """One text and everything the host knows about it."""

    tokens: list[int]  # the prompt, then final tokens
    stop: StopRule
    num_layers: int
    index: int = 0  # in its request
    padding: Sequence[int] = ()  # ids of the columns before the text, which processors and criteria see
    embeds: torch.Tensor | None = None  # (prompt, hidden) the prompt as embeddings
    unseen: int = 0  # tokens of the prompt without ids: processors, criteria and the output leave them out
    sampling: Sampling = field(default_factory=Sampling)
    salt: str | None = None  # K/V are shared with rows of the same salt only
    shares: bool = False  # on the host also where the order of sums may show in a text
    seconds: InitVar[Seconds | None] = None  # of the request, shared by its rows
    arrival: int = field(init=False, default=0)  # its number among the rows of its batch
    drafts: list[Draft] = field(init=False, default_factory=list)
    wanted: int | None = field(init=False, default=None)  # drafts to make in this round; None: scores decide
    exits: int = field(init=False, default=0)  # final tokens that left early
    exits_in_a_row: int = field(init=False, default=0)  # since the full model decided a token
    decided: list[Draft] = field(init=False, default_factory=list)  # the new tokens, and where
    finished: bool = field(init=False, default=False)
    cut_short: bool = field(init=False, default=False)  # the model's context ended the text
    kept: dict[int, Kept] = field(init=False, default_factory=dict)  # where asked for, by size of the text before a token
    removed: bool = field(init=False, default=False)  # before it had ended
    error: Exception | None = field(init=False, default=None)  # that ended the text

    def __post_init__(self, seconds: Seconds | None) -> None:
        self.tokens = list(self.tokens)
        self.prompt = len(self.tokens)
        self._checked = self.prompt  # size of the text about which the stop rule was asked last
        self.slot = self.index
        self.stats = ExitStats(self.num_layers, seed=self.sampling.seed, seconds=seconds or Seconds())

    @property
    def size(self) -> int:
        """Tokens, drafts included."""
        return len(self.tokens) + len(self.drafts)

    @property
    def new_tokens(self) -> list[int]:
        """The tokens that were written, as far as they are final."""
        return self.tokens[self.prompt :]

    @property
    def is_closed(self) -> bool:
        """True if the newest draft ends the text, so that nothing is drafted behind it."""
        return bool(self.drafts) and self.stop.is_last(self, self.drafts[-1].token, self.size)

    def text(self, start: int, stop: int) -> list[int]:
        """Return the tokens at the positions [start, stop), drafts included."""
        final = len(self.tokens)
        if stop <= final:
            return self.tokens[start:stop]
        drafts = [draft.token for draft in self.drafts[max(0, start - final) : stop - final]]
        return self.tokens[start:] + drafts

    def shown(self, drafts: int = 0) -> list[int]:
        """Return the text as processors and criteria see it, with the first `drafts` drafts."""
        text = [*self.padding, *self.tokens, *(draft.token for draft in self.drafts[:drafts])]
        return text[self.unseen :]

    @property
    def counted_prompt(self) -> list[int]:
        """The prompt as penalties count it."""
        padding = self.padding if self.sampling.params.counts_padding else []
        return [*padding, *self.tokens[: self.prompt]][self.unseen :]

    def fail(self, error: Exception) -> None:
        """End the text with an error, which its request is told. Other rows go on."""
        self.error = error
        self.finished = True

    def extend(self, round_: RoundResult) -> int:
        """Append final tokens up to the end of the text and count what the round did; return how many were appended."""
        if not round_.drafted:
            return self._append(round_.tokens, round_.first_step)
        drafted = min(round_.drafted, self.stop.room(self))  # of a tree: its depth
        kept = self._append(round_.tokens, round_.first_step)
        if self.finished:
            drafted = min(drafted, kept)  # drafts past the end of the text are not counted
        if round_.levels:
            self.stats.count_tree(round_.levels)
        self.stats.count_drafts(round_.levels[:drafted] or (1,) * drafted, round_.accepted, round_.first_step)
        return kept

    def _append(self, tokens: Iterable[Draft], step: int) -> int:
        kept = 0
        for draft in tokens:
            if self.finished:  # another thread has removed it
                break
            self.decided.append(draft)
            self.tokens.append(draft.token)
            self.stats.count_token(draft.depth, step + kept)
            self.exits += draft.depth < self.num_layers
            kept += 1
            self._check_end()
        return kept

    def _check_end(self) -> None:
        """End the text if the stop rule says so about its newest token."""
        try:
            if self.stop.ends(self):
                self.finished = True
        except Exception as error:  # criteria may be the user's own
            self.fail(error)
        self._checked = len(self.tokens)

    def resume(self) -> None:
        """Go on after a step that may have been broken off between two tokens, or in the stop rule."""
        del self.decided[len(self.tokens) - self.prompt :]
        if self._checked < len(self.tokens) and not self.finished:
            self._check_end()


def total(rows: Sequence[Row], num_layers: int) -> ExitStats:
    """Return the counts of rows together. Their seconds are those of one request, which they share."""
    found = sum((row.stats for row in rows), start=ExitStats(num_layers))
    found.seconds = rows[0].stats.seconds if rows else Seconds()
    found.seed = rows[0].stats.seed if len(rows) == 1 else None
    return found


class _Counted(NamedTuple):
    """Exchanged as a whole, so that an interrupt leaves no request out and counts none twice."""

    over: ExitStats  # of requests that are over, together
    requests: tuple[tuple[Row, ...], ...]  # the others


class Counts:
    """The counts of an engine's requests. Rows that come and go are requests of their own.

    Attributes:
        running: rows of the requests that are running, without those that come and go.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.running: list[list[Row]] = []
        self._counted = _Counted(ExitStats(num_layers), ())
        self._lock = threading.Lock()

    def all(self) -> ExitStats:
        """Return the counts of all requests."""
        over, requests = self._counted
        return sum((total(rows, self.num_layers) for rows in requests), start=over)

    def begin(self, *rows: Row) -> None:
        """Count a request from now on."""
        with self._lock:
            over, requests = self._counted
            self._counted = _Counted(over, (*requests, rows))

    def end(self, *rows: Row) -> None:
        """Take down the counts of a request that is over, and let its rows go; nothing happens if that was done."""
        with self._lock:
            over, requests = self._counted
            if rows in requests:
                others = tuple(other for other in requests if other != rows)
                self._counted = _Counted(over + total(rows, self.num_layers), others)

    @contextmanager
    def counted(self, rows: list[Row]) -> Iterator[None]:
        """Count a request from its first step on, however it ends."""
        self.begin(*rows)
        self.running.append(rows)
        try:
            yield
        finally:
            self.running.remove(rows)
            self.end(*rows)

    def saw_step(self, rows: Sequence[Row], changed: Sequence[Row], seconds: float) -> None:
        """Count a step of rows that come and go."""
        with self._lock:
            for row in rows:
                row.stats.seconds.whole += seconds
        for row in changed:
            if row.finished:
                self.end(row)

    def remove(self, row: Row) -> None:
        """End a row that comes and goes before its text does."""
        with self._lock:
            if row.removed:
                raise ValueError("this row was removed before. Add its prompt again to go on with it.")
            if not row.finished:
                row.removed = row.finished = True
        self.end(row)
