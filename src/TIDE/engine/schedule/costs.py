"""Measured costs: seconds of steps, exits, deep passes and whole rounds on this machine, known from one request to the next."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque

from TIDE.engine.round import Launched

# Timings of captured rounds that are remembered, and for how many rounds: after long texts come short ones. By the runs and the
# simulation in docs/log.md, "What 64 rows believed"
LATEST, LATELY = 64, 256
NEWEST = 0.2  # weight of the newest measurement. Not tuned: the latest ten count, and a text is easy or hard for longer
GUESS = 0.1  # of a step: a draft's place in a deep pass before it was measured. 0.06 to 0.25 in docs/results/passes-arm.json


class RunningMean:
    """A mean that forgets."""

    def __init__(self, mean: float | None = None) -> None:
        self.mean = mean

    def add(self, value: float) -> None:
        self.mean = value if self.mean is None else self.mean + NEWEST * (value - self.mean)


class ClippedMean(RunningMean):
    """A running mean of timings, which a busy machine skews: slow samples are clipped to twice the mean, and one below half the
    mean replaces it."""

    def add(self, value: float) -> None:
        if self.mean is None or value < self.mean / 2:
            self.mean = value
        else:
            super().add(min(value, 2 * self.mean))


class Undisturbed:
    """The lower quartile of the latest timings: of a round on a device, which now and then waits for a host that is busy with
    rows that end or join. For many rows that is most rounds towards the end of a batch."""

    def __init__(self) -> None:
        self._latest: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []

    def add(self, value: float, round_: int) -> None:
        """Record a timing.

        Args:
            round_: its number among all rounds, those with other drafts too.
        """
        while self._latest and (len(self._latest) == LATEST or round_ - self._latest[0][0] > LATELY):
            del self._sorted[bisect_left(self._sorted, self._latest.popleft()[1])]
        self._latest.append((round_, value))
        insort(self._sorted, value)

    @property
    def seconds(self) -> float:
        return self._sorted[(len(self._sorted) - 1) // 4]


class Costs:
    """Seconds of the parts of a round, and of rounds that are launched as a whole, on this machine. Threads share them: what
    belongs to one round is in `RoundCosts`."""

    def __init__(self) -> None:
        self.exit = ClippedMean()  # seconds up to and with an exit of one row
        self._steps: dict[int, ClippedMean] = {}  # by rows
        self._passes: dict[int, dict[int, ClippedMean]] = {}  # by rows, then by tokens: a deep pass, in steps
        self._rounds: dict[int, dict[int, Undisturbed]] = {}  # by slots, then by drafts: captured rounds
        self._timed: dict[int, int] = {}  # by slots: captured rounds recorded so far
        self._lock = threading.Lock()  # of captured rounds

    def step(self, rows: int) -> ClippedMean:
        """Seconds of a step of some rows, as of now."""
        return self._steps.setdefault(rows, ClippedMean())

    def passes(self, rows: int) -> dict[int, ClippedMean]:
        """By tokens: a deep pass of some rows, in steps."""
        return self._passes.setdefault(rows, {})

    def rounds(self, slots: int) -> dict[int, Undisturbed]:
        """By drafts: captured rounds on `slots` slots."""
        return self._rounds.setdefault(slots, {})

    def saw_round(self, slots: int, drafts: int, seconds: float) -> None:
        """Record a captured round."""
        with self._lock:
            self._timed[slots] = self._timed.get(slots, 0) + 1
            self.rounds(slots).setdefault(drafts, Undisturbed()).add(seconds, self._timed[slots])

    def captured_round(self, slots: int, drafts: int) -> float | None:
        """Return the seconds of a captured round: measured, or those of the next shorter one and a guess for the rest."""
        with self._lock:
            rounds = self.rounds(slots)
            if 0 not in rounds:
                return None
            known = max(length for length in rounds if length <= drafts)
            return rounds[known].seconds + GUESS * rounds[0].seconds * (drafts - known)


class RoundCosts:
    """Costs as the rounds of one stage see them.

    A step is a pass of one token of each row. Deep passes are kept as multiples of a step of as many rows, and every pass
    updates the seconds of that: texts grow, and a timing of a long one must not stand for a short one. Rows share a pass: its
    tokens are those of all of them together.

    Attributes:
        rows: of the round at hand.
        tokens: that its deep pass has so far.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.rows = self.tokens = 1
        self._latest: Launched | None = None
        self._alike = 0  # rounds with as many drafts on as many slots as the latest one, itself included

    def begin_round(self, rows: int) -> None:
        """Start a round on the host, with one token of each row."""
        self.rows = self.tokens = rows

    @property
    def exit(self) -> ClippedMean:
        """Seconds up to and with an exit of one row."""
        return self.costs.exit

    @property
    def step(self) -> ClippedMean:
        """Seconds of a step of the rows at hand, as of now."""
        return self.costs.step(self.rows)

    def saw_pass(self, tokens: int, seconds: float) -> None:
        """Record a deep pass of the rows at hand."""
        step = self.step
        if tokens == self.rows:
            step.add(seconds)
        elif step.mean is not None:
            known = self.costs.passes(self.rows).setdefault(tokens, ClippedMean())
            if known.mean is not None:
                step.add(seconds / known.mean)
            known.add(min(seconds / step.mean, 2.0 * tokens / self.rows))

    @property
    def guess(self) -> float:
        """Steps that a place costs before it was measured: a step of more rows is longer, and a place less of it."""
        return GUESS / (1 + GUESS * (self.rows - 1))

    def deep(self, tokens: int) -> float:
        """Return the steps that a deep pass takes: measured, or between those measured; a guess beyond them.

        A pass takes no longer than one of more tokens: where it seems so, its timing is of a busy moment.
        """
        known, least = {self.rows: 1.0}, float("inf")
        for size, steps in sorted(self.costs.passes(self.rows).items(), reverse=True):
            least = min(least, steps.mean or least)
            known[size] = max(1.0, least)
        below = max((n for n in known if n <= tokens), default=self.rows)
        above = min((n for n in known if n > tokens), default=None)
        slope = self.guess if above is None else (known[above] - known[below]) / (above - below)
        return known[below] + slope * (tokens - below)

    def marginal_cost(self, tokens: int) -> float:
        """Return the steps that one more token costs in a deep pass of `tokens`."""
        return max(0.0, self.deep(tokens + 1) - self.deep(tokens))

    def alike(self, round_: Launched) -> int:
        """Return how many rounds up to this one had as many drafts on as many slots, one after the other."""
        if round_ is not self._latest:
            before, self._latest = self._latest or round_, round_
            self._alike = self._alike + 1 if (round_.drafts, round_.rows) == (before.drafts, before.rows) else 1
        return self._alike
