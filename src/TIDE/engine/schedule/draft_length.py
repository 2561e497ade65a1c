"""The number of drafts of a round that is launched as a whole, as on a GPU, before any of its scores is known.

    tokens of a round with k drafts   1 + a1 + a1·a2 + … + a1·…·ak        a: probability that a draft is accepted, by number
    seconds of it                     measured

The k with the most tokens per second is taken. If that is 0, a rest follows, and a round with the fewest drafts tries again.

Routers score every draft, and the scores of the latest rounds say how easy the text is just now. So a is a short running mean
of the scores, times the long-run share of drafts that were accepted by those that the scores promised.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

from TIDE.engine.row import RoundResult
from TIDE.engine.schedule.acceptance import Acceptance, Rest
from TIDE.engine.schedule.costs import Costs, RunningMean

LENGTHS = (0, 2, 4, 7)
FIRST_SHARE = 0.7  # of drafts that are accepted, before any was seen


class DraftLength:
    """Chooses draft lengths; known from one request to the next."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self._scores = [RunningMean(FIRST_SHARE) for _ in range(max(LENGTHS))]
        self._rest = Rest()
        self._rested = 0  # rounds

    def begin(self) -> None:
        """Start another text."""
        self._rest.reset()
        self._rested = 0
        self.acceptance.fade()

    def choose(self, most: int) -> int:
        """Return the best length of at most `most` drafts."""
        lengths = [length for length in LENGTHS if length <= most]
        if 0 not in self.costs.rounds or len(lengths) == 1:
            return 0
        best = max(lengths, key=lambda length: self.tokens(length) / (self.costs.captured_round(length) or 1.0))
        if best:
            self._rest.reset()
            self._rested = 0
            return best
        self._rested += 1
        if self._rested < self._rest.length:
            return 0
        self._rested = 0
        self._rest.take()
        return lengths[1]

    def tokens(self, drafts: int) -> float:
        """Return the expected tokens of a round with `drafts` drafts."""
        chances = (
            min(1.0, (score.mean or 0.0) * self.acceptance.share(number))
            for number, score in enumerate(self._scores[:drafts], 1)
        )
        return 1 + sum(accumulate(chances, mul))

    def saw(self, drafts: int, result: RoundResult, seconds: float | None) -> None:
        """Record a round; seconds None: it was compiled or captured, and its time says nothing about others."""
        if seconds is not None:
            self.costs.saw_round(drafts, seconds)
        for number in range(1, min(result.accepted + 1, drafts, len(self._scores)) + 1):
            score = result.scores[number - 1] if number <= len(result.scores) else 1.0
            self._scores[number - 1].add(score)
            self.acceptance.add(number, number <= result.accepted, score)
