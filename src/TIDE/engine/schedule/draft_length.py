"""How many drafts a round on a GPU should have.

There a round is one piece of work that is planned before it runs, so its length goes by what rounds were like so far:

    tokens of a round with k drafts   1 + a1 + a1·a2 + … + a1·…·ak        a: how often a draft stood, by its number
    seconds of it                     measured, or between those that were

The length with the most tokens per second is taken. Where that is none, a rest follows, and a round with the shortest tries
again; each rest of a text is twice as long as the one before it. What other texts were like counts for little.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from TIDE.engine.schedule.means import ClippedMean

LENGTHS = (0, 2, 4, 7)
FIRST_REST, LONGEST_REST = 16, 256  # rounds
KEPT = 0.98  # of what was seen before the newest round
FIRST_SHARE, PRIOR = 0.7, 4.0  # of drafts that stand, before any was seen, and how many of those count as seen
GUESS = 0.1  # of a step: what a draft costs before it was measured


class DraftLength:
    """Known from one request to the next."""

    def __init__(self) -> None:
        self.seconds: dict[int, ClippedMean] = {}
        self.seen = [[PRIOR * FIRST_SHARE, PRIOR] for _ in range(max(LENGTHS))]  # by number: stood, tried
        self._rested, self._rest = 0, FIRST_REST

    def begin(self) -> None:
        """Another text."""
        self._rested, self._rest = 0, FIRST_REST
        for own in self.seen:
            own[:] = [count * min(1.0, PRIOR / own[1]) for count in own]

    def choose(self, most: int) -> int:
        """The best length of at most so many drafts."""
        lengths = [length for length in LENGTHS if length <= most]
        if 0 not in self.seconds or len(lengths) == 1:
            return 0
        best = max(lengths, key=lambda length: self.tokens(length) / self.cost(length))
        if best:
            self._rested, self._rest = 0, FIRST_REST
            return best
        self._rested += 1
        if self._rested < self._rest:
            return 0
        self._rested, self._rest = 0, min(2 * self._rest, LONGEST_REST)
        return lengths[1]

    def saw(self, drafts: int, stood: int, seconds: float | None) -> None:
        """A round is over; None: what it took says nothing about others."""
        if seconds is not None:
            self.seconds.setdefault(drafts, ClippedMean()).add(seconds)
        for number in range(min(stood + 1, drafts)):
            own = self.seen[number]
            own[0], own[1] = KEPT * own[0] + (number < stood), KEPT * own[1] + 1

    def tokens(self, drafts: int) -> float:
        """Expected of a round."""
        return 1 + sum(accumulate((stood / tried for stood, tried in self.seen[:drafts]), mul))

    def cost(self, drafts: int) -> float:
        """Seconds of a round: measured, or the next shorter one and a guess for the rest."""
        known = max(length for length in self.seconds if length <= drafts)
        mean, step = self.seconds[known].mean, self.seconds[0].mean
        assert mean is not None and step is not None
        return mean + GUESS * step * (drafts - known)
