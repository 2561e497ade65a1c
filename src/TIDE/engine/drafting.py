"""Drafting: whether one more draft is worth its time.

A draft that stands saves a full step. One that falls costs the asking at its exit and its place in the deep pass. With p
the probability that a draft stands, and P that all before it in the row do:

    ask once more      if  P · p'  · step  >  exit + place       p' what scores usually are
    leave it drafted   if  P · p   · step  >  place              place: what one more token in the deep pass costs

Seconds are those of the passes just run, on this machine; nothing is assumed about it. And whatever the scores say, a row
whose rounds gave fewer tokens a second than full steps would have rests for a while, longer each time.
"""

from __future__ import annotations

from itertools import pairwise

NEWEST = 0.2  # weight of the newest measurement
FIRST_REST, LONGEST_REST = 16, 256  # tokens
ROUNDS = 4  # that are seen before a row rests
GUESS = 0.1  # of a full step: what a place costs before it was measured


class Running:
    """A mean that forgets. One measurement counts for twice the mean at most: the machine may have looked away."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def add(self, value: float) -> None:
        if self.mean is None:
            self.mean = value
        else:
            self.mean += NEWEST * (min(value, 2 * self.mean) - self.mean)


class Pace:
    """What steps, exits and deep passes take, in seconds."""

    def __init__(self) -> None:
        self.step = Running()  # one token, no exit asked
        self.exit = Running()  # up to and with an exit
        self.passes: dict[int, Running] = {}  # what comes after the exits, by tokens

    def saw_pass(self, tokens: int, seconds: float) -> None:
        self.passes.setdefault(tokens, Running()).add(seconds)

    def place(self, tokens: int) -> float:
        """Seconds that one more token costs in a deep pass that has so many."""
        known = sorted((n, own.mean) for n, own in self.passes.items() if own.mean is not None)
        for (n, before), (m, after) in pairwise(known):
            if n <= tokens < m:
                return max(0.0, (after - before) / (m - n))
        return GUESS * (self.step.mean or 0.0)


class Drafting:
    """The decisions for the rows of one request."""

    def __init__(self, rows: int, pace: Pace) -> None:
        self.pace = pace
        self.odds = [1.0] * rows  # that all drafts of the row stand
        self.drafts = [0] * rows
        self.usual = Running()
        self._seconds, self._tokens = [Running() for _ in range(rows)], [Running() for _ in range(rows)]
        self._rounds = [0] * rows
        self._rest, self._until = [FIRST_REST] * rows, [0] * rows

    def may_ask(self, row: int, size: int) -> bool:
        """Whether asking an exit about the newest of `size` tokens is likely to pay."""
        step, exit_ = self.pace.step.mean, self.pace.exit.mean
        if step is None or size < self._until[row]:
            return False
        if exit_ is None or self.usual.mean is None:
            return True
        return self.odds[row] * self.usual.mean * step > exit_ + self.pace.place(1 + self.drafts[row])

    def leaves(self, row: int, score: float) -> bool:
        """Whether a token with this score becomes a draft."""
        self.usual.add(score)
        assert self.pace.step.mean is not None
        if self.odds[row] * score * self.pace.step.mean <= self.pace.place(1 + self.drafts[row]):
            return False
        self.odds[row] *= score
        self.drafts[row] += 1
        return True

    def verified(self, row: int, size: int, tokens: int, seconds: float) -> None:
        """A round of a row is over: it gave `tokens` in `seconds`, and the row has `size` now."""
        self.odds[row], self.drafts[row] = 1.0, 0
        own_seconds, own_tokens, step = self._seconds[row], self._tokens[row], self.pace.step.mean
        own_seconds.add(seconds)
        own_tokens.add(tokens)
        self._rounds[row] += 1
        if step is None or own_seconds.mean is None or own_tokens.mean is None or self._rounds[row] < ROUNDS:
            return
        if own_seconds.mean > own_tokens.mean * step:
            self._until[row] = size + self._rest[row]
            self._rest[row] = min(2 * self._rest[row], LONGEST_REST)
            self._seconds[row], self._tokens[row], self._rounds[row] = Running(), Running(), 0
        elif tokens > 1:
            self._rest[row] = FIRST_REST
