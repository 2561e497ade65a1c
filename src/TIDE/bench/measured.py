"""The results of a benchmark, as numbers for a file and as a table for the terminal.

tok/s        new tokens by seconds, prompt included, of a round of all groups: median, lowest and highest round
x generate   tok/s over those of the first contender, which is named
1st token    seconds to the first token, median
p50, p95     milliseconds of a token after the first one, as a reader sees them arrive
accepted     share of drafts that the full model agreed with
depth        layers run before a token was decided, mean
layers/tok   layers run per new token, those of rejected drafts included, counted by hooks on the model's own layers
tok/pass     tokens per pass through the last layer, by the same hooks
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch

from TIDE.bench.arrivals import Arrivals, percentile
from TIDE.disturbance import Load, notice
from TIDE.stats import ExitStats

HEAD = ["", "tok/s", "(lowest-highest)", "x {first}", "1st token s", "p50 ms", "p95 ms", "accepted", "depth"]
HEAD += ["layers/tok", "tok/pass", "GiB"]
LEGEND = """x {first}: speed over that of {first}; p50, p95: time of a token after the first one, median and 95th percentile
accepted: drafts that the full model agreed with; depth: layers run before a token was decided, of {layers}
layers/tok: layers run per new token, those of rejected drafts included; tok/pass: tokens per pass through the last layer"""


class Timed(NamedTuple):
    """One timed run."""

    ids: torch.Tensor
    seconds: float
    joules: float | None
    peak_gib: float | None
    load: Load


@dataclass(frozen=True)
class Layers:
    """Counts of hooks in one request of one row.

    Attributes:
        per_token: (layer, token) pairs per new token, those of the prompt left out.
        of: layers of the model.
        drafted, accepted: by the widths of passes: what a pass has beside its own token is a draft or is caught up.
        wrong: what an engine's own numbers say differently; None: nothing.
    """

    new_tokens: int
    per_token: float
    tokens_per_pass: float
    of: int
    drafted: int
    accepted: int
    wrong: str | None


@dataclass
class Measured:
    """A contender and its measurements; empty where it could not run.

    Attributes:
        tried: settings -> seconds, where one was chosen.
        seconds, tokens: of every timed run, by group.
        loads: of every timed run.
        texts: of the last run, by group and row.
    """

    name: str
    title: str
    setting: str = ""
    tried: dict[str, float] = field(default_factory=dict)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    texts: dict[int, list[list[int]]] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    peak_gib: float | None = None
    stats: ExitStats | None = None
    layers: Layers | None = None

    def saw(self, arrivals: Arrivals) -> None:
        """Keep the times of a run's tokens."""
        self.firsts += [] if arrivals.first is None else [arrivals.first]
        self.gaps += arrivals.gaps

    def add(self, group: int, timed: Timed, texts: list[list[int]], stats: ExitStats | None) -> None:
        """Keep a timed run."""
        self.seconds.setdefault(group, []).append(timed.seconds)
        self.tokens[group] = sum(map(len, texts))
        self.texts[group] = texts
        self.loads.append(timed.load)
        self.joules += [] if timed.joules is None else [timed.joules]
        self.peak_gib = max((gib for gib in (self.peak_gib, timed.peak_gib) if gib is not None), default=None)
        if stats is not None:
            self.stats = stats if self.stats is None else self.stats + stats

    def speeds(self, among: list[int]) -> list[float]:
        """Return the tokens per second of each round over some groups."""
        rounds = min((len(self.seconds[group]) for group in among), default=0)
        tokens = sum(self.tokens[group] for group in among)
        return [tokens / sum(self.seconds[group][turn] for group in among) for turn in range(rounds)]

    @property
    def acceptance(self) -> float | None:
        """The share of drafts accepted: by an engine's counts, or by hooks where transformers drafts. Mode fast checks none."""
        if self.name == "fast":
            return None
        if self.stats is not None:
            return self.stats.accepted / self.stats.drafted if self.stats.drafted else None
        drafts = self.layers is not None and self.setting and self.layers.drafted > 0
        return self.layers.accepted / self.layers.drafted if drafts and self.layers is not None else None

    def joules_per_token(self) -> float | None:
        done = sum(self.tokens[group] * len(own) for group, own in self.seconds.items())
        return sum(self.joules) / done if self.joules and done else None


@dataclass
class Results:
    """All measurements; contenders that could not run, or whose layers could not be counted, with the reason.

    Attributes:
        wanted_first: the contender that the others were to be compared with; if it is lost, the next one takes its place.
        layers: of the model.
    """

    wanted_first: str
    groups: int
    rows: int
    max_new_tokens: int
    rounds: int
    layers: int
    without_joules: str | None
    measured: dict[str, Measured] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    uncounted: dict[str, str] = field(default_factory=dict)

    @property
    def timed(self) -> list[Measured]:
        """Contenders with at least one timed run, in the order in which they were asked for."""
        return [own for own in self.measured.values() if own.seconds]

    @property
    def wrong_layers(self) -> dict[str, str]:
        """Contenders whose layers did not run as they reported, with the difference."""
        return {own.name: own.layers.wrong for own in self.timed if own.layers is not None and own.layers.wrong is not None}

    def as_dict(self) -> dict[str, Any]:
        facts = {"groups": self.groups, "rows": self.rows, "max_new_tokens": self.max_new_tokens, "rounds": self.rounds}
        missing = {"absent": self.absent, "uncounted": self.uncounted, "without_joules": self.without_joules}
        first = {"first": self.timed[0].name if self.timed else None, "disturbed": self._disturbed()}
        return facts | first | {"contenders": [self._row(own) for own in self.timed]} | missing

    def _row(self, own: Measured) -> dict[str, Any]:
        first = self.timed[0]
        shared = [group for group in own.seconds if group in first.seconds]
        speeds, baseline = own.speeds(list(own.seconds)), first.speeds(shared)
        stats, texts = own.stats, [(own.texts[group], first.texts[group]) for group in shared]
        return {
            "contender": own.name,
            "title": own.title,
            "setting": own.setting,
            "tried": own.tried,
            "groups": len(own.seconds),
            "new_tokens": sum(own.tokens.values()),
            "tokens_per_second": median(speeds),
            "lowest": min(speeds),
            "highest": max(speeds),
            "speedup": median(own.speeds(shared)) / median(baseline) if baseline else None,
            "first_token_seconds": median(own.firsts) if own.firsts else None,
            "token_seconds_p50": percentile(own.gaps, 0.5),
            "token_seconds_p95": percentile(own.gaps, 0.95),
            "acceptance": own.acceptance,
            "exit_rate": None if stats is None else stats.exit_rate,
            "mean_depth": None if stats is None else stats.mean_depth,
            "layers_per_token": None if own.layers is None else own.layers.per_token,
            "tokens_per_pass": None if own.layers is None else own.layers.tokens_per_pass,
            "layers_as_reported": None if own.layers is None or stats is None else own.layers.wrong is None,
            "peak_gib": own.peak_gib,
            "joules_per_token": own.joules_per_token(),
            "same_texts": sum(row == other for one, two in texts for row, other in zip(one, two, strict=True)),
            "texts": sum(len(one) for one, _ in texts),
            "seconds": own.seconds,
        }

    def table(self) -> str:
        """Return the measurements for the terminal, then what could not be measured."""
        if not self.timed:
            return "\n".join(self._missing())
        rows = [self._row(own) for own in self.timed]
        first = {"first": rows[0]["contender"], "layers": self.layers}
        cells = [[*(cell.format_map(first) for cell in HEAD), *(["J/tok"] if self.without_joules is None else []), "same text"]]
        cells += [self._cells(row) for row in rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [_line(line, widths) for line in cells]
        wrong = [f"{name}: layers did NOT run as reported: {how}." for name, how in self.wrong_layers.items()]
        legend = LEGEND.format_map(first)
        return "\n".join([*lines, legend, *self._instead_of_the_first(), *self._missing(), *wrong, *self._disturbed()])

    def _missing(self) -> list[str]:
        missing = [f"{name}: not measured: {reason}." for name, reason in self.absent.items()]
        return missing + [f"{name}: layers were not counted: {reason}." for name, reason in self.uncounted.items()]

    def _disturbed(self) -> list[str]:
        return notice({own.name: own.loads for own in self.timed})

    def _instead_of_the_first(self) -> list[str]:
        if not self.timed or self.timed[0].name == self.wanted_first:
            return []
        found = f"compared with {self.timed[0].title}, since {self.wanted_first} was not measured"
        return [f"x {self.timed[0].name} and same text: {found}."]

    def _cells(self, row: dict[str, Any]) -> list[str]:
        title = f"{row['title']}, {row['setting']}" if row["setting"] else row["title"]
        layers = _number(row["layers_per_token"], ".1f") + (" FAILED" if row["layers_as_reported"] is False else "")
        joules = [_number(row["joules_per_token"], ".3f")] if self.without_joules is None else []
        return [
            title,
            _number(row["tokens_per_second"], ".1f"),
            f"({row['lowest']:.1f}-{row['highest']:.1f})",
            _number(row["speedup"], ".2f"),
            _number(row["first_token_seconds"], ".3f"),
            _number(row["token_seconds_p50"], ".1f", 1000),
            _number(row["token_seconds_p95"], ".1f", 1000),
            _number(row["acceptance"], ".1%"),
            _number(row["mean_depth"], ".1f"),
            layers,
            _number(row["tokens_per_pass"], ".2f"),
            _number(row["peak_gib"], ".2f"),
            *joules,
            f"{row['same_texts']} of {row['texts']}",
        ]


def _line(cells: list[str], widths: list[int]) -> str:
    title, *numbers = [cell.rjust(width) for cell, width in zip(cells, widths, strict=True)]
    return "  ".join([title.strip().ljust(widths[0]), *numbers])


def _number(value: float | None, how: str, times: float = 1.0) -> str:
    return "-" if value is None else format(value * times, how)
