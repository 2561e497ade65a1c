"""Drafting: whether one more draft is worth its time.

A draft that stands saves a full step. One that falls costs the asking at its exit and its place in the deep pass. With p
the probability that a draft stands, and P that all before it in the row do:

    leave it drafted   if  P · p · step  >  place           place: what one more token in the deep pass costs
    ask once more      if  P · what asking usually gains at P = 1  >  exit

Seconds are those of the passes just run, on this machine; nothing is assumed about it. And whatever the scores say, a row
keeps a balance of what drafting won and cost; one that lost a few steps rests for a while, longer each time. So does one whose
exits take too long; then it tries again, for a machine that was busy may be idle now.
"""

from __future__ import annotations

from itertools import pairwise

NEWEST = 0.2  # weight of the newest measurement
FIRST_GAIN = 0.5  # before any score was seen
FIRST_REST, LONGEST_REST = 16, 256  # tokens
TRIAL = 2  # times an exit is asked after a rest: the first has to catch up with the text and is not timed
ALLOWANCE, MOST_CREDIT = 2.0, 2.0  # steps a row may lose before it rests, and those of its gains that are remembered
GUESS = 0.1  # of a full step: what a place costs before it was measured


class Running:
    """A mean that forgets."""

    def __init__(self) -> None:
        self.mean: float | None = None

    def add(self, value: float) -> None:
        self.mean = value if self.mean is None else self.mean + NEWEST * (value - self.mean)


class Timed(Running):
    """The machine may look away, but it never runs ahead: long times count for twice the mean at most, short ones at once."""

    def add(self, value: float) -> None:
        if self.mean is None or value < self.mean / 2:
            self.mean = value
        else:
            super().add(min(value, 2 * self.mean))


class Pace:
    """What steps, exits and deep passes take, in seconds."""

    def __init__(self) -> None:
        self.step = Timed()  # one token, no exit asked
        self.exit = Timed()  # up to and with an exit
        self.passes: dict[int, Timed] = {}  # what comes after the exits, by tokens

    def saw_pass(self, tokens: int, seconds: float) -> None:
        self.passes.setdefault(tokens, Timed()).add(seconds)

    def round(self, exits: int, tokens: int) -> float | None:
        """Seconds of a round that asked so many exits and took so many tokens through the deep pass, if they are known."""
        deep = self.passes.get(tokens)
        if deep is None or deep.mean is None or (exits and self.exit.mean is None):
            return None
        return deep.mean + exits * (self.exit.mean or 0.0)

    def place(self, tokens: int) -> float:
        """Timed that one more token costs in a deep pass that has so many."""
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
        self.asked = [0] * rows  # exits in this round
        self.gain = Running()  # of asking: a share of a step
        self.gain.mean = FIRST_GAIN
        self._balance = [0.0] * rows  # steps won by drafting, less those it cost
        self._rest, self._until = [FIRST_REST] * rows, [0] * rows
        self._trials = [TRIAL] * rows

    def may_ask(self, row: int, size: int) -> bool:
        """Whether asking an exit about the newest of `size` tokens is likely to pay."""
        step, exit_ = self.pace.step.mean, self.pace.exit.mean
        if step is None or size < self._until[row]:
            return False
        assert self.gain.mean is not None
        if exit_ is None or self.odds[row] * self.gain.mean * step > exit_:
            return True
        if self.drafts[row]:
            return False
        if not self._trials[row]:
            self._take_rest(row, size)
            return False
        self._trials[row] -= 1
        return True

    def leaves(self, row: int, score: float) -> bool:
        """Whether a token with this score becomes a draft."""
        step = self.pace.step.mean
        assert step is not None
        place = self.pace.place(1 + self.drafts[row])
        self.asked[row] += 1
        self.gain.add(max(0.0, score - place / step))
        if self.odds[row] * score * step <= place:
            return False
        self.odds[row] *= score
        self.drafts[row] += 1
        return True

    def verified(self, row: int, size: int, tokens: int) -> None:
        """A round of a row is over: it gave `tokens`, and the row has `size` now."""
        step, spent = self.pace.step.mean, self.pace.round(self.asked[row], 1 + self.drafts[row])
        if self.asked[row] and step is not None and spent is not None:
            self._balance[row] = min(self._balance[row] + tokens - spent / step, MOST_CREDIT)
            if self._balance[row] < -ALLOWANCE:
                self._take_rest(row, size)
            elif self._balance[row] == MOST_CREDIT:
                self._rest[row] = FIRST_REST
        self.odds[row], self.drafts[row], self.asked[row] = 1.0, 0, 0

    def _take_rest(self, row: int, size: int) -> None:
        self._until[row] = size + self._rest[row]
        self._rest[row] = min(2 * self._rest[row], LONGEST_REST)
        self._balance[row], self._trials[row] = 0.0, TRIAL
