"""The number of drafts of a round that is launched as a whole, as on a GPU, before any of its scores is known.

    tokens of a round with k drafts   1 + a1 + a1·a2 + … + a1·…·ak        a: probability that a draft is accepted, by number
    seconds of it                     measured

The k with the most tokens per second is taken. If that is 0, a rest follows, and a round with the fewest drafts tries again.

Routers score every draft, and the scores of the latest rounds say how easy the text is just now. So a is a short running mean
of the scores, times the long-run share of drafts that were accepted by those that the scores promised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TIDE.engine.cache.slots import MOST_ROUND, slots_for
from TIDE.engine.round.round import Launched
from TIDE.engine.row import RoundResult, Row
from TIDE.engine.schedule.acceptance import Acceptance, Rest
from TIDE.engine.schedule.costs import NEWEST, Costs

LENGTHS = (0, 1, 2, 3, 4, 7)
FIRST_SHARE = 0.7  # of drafts that are accepted, before any was seen


class DraftLength:
    """Chooses draft lengths; known from one request to the next.

    Attributes:
        chosen: drafts of the next round.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.acceptance = Acceptance()
        self.chosen = 0
        self._scores = [FIRST_SHARE] * max(LENGTHS)  # running means over all texts, by number
        self._rest = Rest()
        self._rested = 0  # rounds

    def begin(self, row: Row) -> None:
        """Start another text."""
        self._rest.reset()
        self._rested = 0
        self.acceptance.fade()
        row.scores = list(self._scores)

    def choose(self, rows: Sequence[Row], most: int) -> int:
        """Choose the length with which the rows together get most tokens a second, of at most `most` drafts."""
        self.chosen = self._choose(rows, most)
        return self.chosen

    def _choose(self, rows: Sequence[Row], most: int) -> int:
        slots = slots_for(len(rows))
        lengths = [length for length in LENGTHS if length <= most and (length + 1) * slots <= MOST_ROUND]
        if 0 not in self.costs.rounds(slots) or len(lengths) == 1:
            return 0
        tokens = self.tokens(rows)
        best = max(lengths, key=lambda drafts: tokens[drafts] / (self.costs.captured_round(slots, drafts) or 1.0))
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

    def tokens(self, rows: Sequence[Row]) -> list[float]:
        """Return, by the number of drafts, the tokens that a round is expected to give all rows."""
        shares = [self.acceptance.share(number) for number in range(1, max(LENGTHS) + 1)]
        chances = np.minimum(np.array([row.scores for row in rows]) * shares, 1.0)
        accepted = chances.cumprod(axis=1).sum(axis=0).cumsum()
        return [len(rows) + own for own in (0.0, *accepted.tolist())]

    def saw(self, row: Row, round_: Launched, result: RoundResult, seconds: float | None) -> None:
        """Record a round; seconds None: it was compiled or captured, and its time says nothing about others."""
        drafts = round_.drafts or 0
        if seconds is not None:
            self.costs.saw_round(round_.rows, drafts, seconds)
        for number in range(1, min(result.accepted + 1, result.drafted, len(self._scores)) + 1):
            score = result.scores[number - 1] if number <= len(result.scores) else 1.0
            for known in (self._scores, row.scores):
                known[number - 1] += NEWEST * (score - known[number - 1])
            self.acceptance.add(number, number <= result.accepted, score)
