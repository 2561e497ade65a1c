"""The number of drafts of a round that is launched as a whole, as on a GPU, before any of its scores is known.

    tokens of a row with k drafts     1 + a1 + a1·a2 + … + a1·…·ak        a: probability that a draft is accepted, by number
    seconds of the round              measured, by slots and drafts

The k with the most tokens per second is taken, of rows together for the last of the slowest eighth: they are waited for. If
that is 0, a rest follows, and a round with the fewest drafts tries again. While drafts pay, a round without any is timed now
and then, and of many rows one with the second best number: that is what the others are compared with, and texts grow. The
first two rounds with another number of drafts take longer than those behind them (their graph was not the last one that ran,
and the host is late for the second), so of many rows three try, and the third is timed. Many rows rest from one text to the
next, because what drafts cost is mostly a matter of how many they are, and for as long as a trial takes a hundredth of the
time.

Routers score every draft, and the scores of the latest rounds say how easy a text is just now. So a is a short running mean of
the row's scores, times the long-run share of drafts that were accepted by those that the scores promised. Of many rows some are
always in a hard place; what counts then is which texts are hard, so their means are longer, and each text has a share of its
own: scores are too high in one and too low in another. Rounds that are launched at once are one round here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TIDE.engine.cache.slots import MOST_ROUND
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import RoundResult, Row
from TIDE.engine.schedule.acceptance import PRIOR, Acceptance, Rest
from TIDE.engine.schedule.costs import NEWEST, Costs

LENGTHS = (0, 2, 4, 7)
TOGETHER = (0, 1, 2, 3)  # on MANY slots or more, where each draft of all rows makes a deep pass longer
MANY = 8
EVERY = 4  # rounds of rows together from one choice to the next
TRIED = 3  # rounds of rows together that try what does not seem to pay; only the last one is timed
LONGER = 4  # times as many rounds are in the means of rows together
LOOKS = 128  # rounds with drafts from one without to the next
TRIALS = 0.01  # of the time that many rows rest, at most, trials cost
ANOTHER = 1.03  # times the tokens per second, for many rows to change their number of drafts: the first such round is slow
PAYS = 1.03  # times the tokens without drafts: less is not worth it
FIRST_SHARE = 0.7  # of drafts that are accepted, before any was seen


def lengths_on(slots: int, most: int) -> list[int]:
    """Return the numbers of drafts that rounds on `slots` slots may have, up to `most`."""
    lengths, most = (LENGTHS if slots < MANY else TOGETHER), min(most, MOST_ROUND // slots - 1)
    return sorted({min(length, most) for length in lengths})


class DraftLength:
    """Chooses draft lengths; known from one request to the next.

    Args:
        has_scores: routers score drafts; otherwise, in trees, how often a depth was reached says all.

    Attributes:
        chosen: drafts of the next round; of a tree the levels.
    """

    def __init__(self, costs: Costs, has_scores: bool = True) -> None:
        self.costs = costs
        self.has_scores = has_scores
        self.acceptance = Acceptance()
        self.chosen = 0
        self._scores = [FIRST_SHARE] * max(LENGTHS)  # running means over all texts, by number
        self._rest = Rest()
        self._rested = 0  # rounds
        self._rounds = 0
        self._drafting = 0  # rounds for which drafts were chosen
        self._usual = 0  # drafts of the latest of them that tried nothing
        self._is_trial = False  # the round before tried what does not seem to pay
        self._again = 0  # and so do so many behind it
        self._seen: Launched | None = None  # the round before
        self._alike = 0  # rounds with as many drafts on as many slots, that one included
        self._rows: Sequence[Row] = ()  # of the round before
        self._crowd = 1  # most rows together since there were others

    def begin(self, row: Row) -> None:
        """Start another text, with what was learnt from those before."""
        row.scores = list(self._scores)
        row.outcome = [PRIOR, PRIOR]

    def choose(self, rows: Sequence[Row], most: int, slots: int = 1, lengths: list[int] | None = None) -> int:
        """Choose the drafts of each row in the next round on `slots` slots, at most `most`.

        Args:
            lengths: to choose from, the first is 0; None: those of drafts in a row.
        """
        if rows[0] not in self._rows:  # the longest there: others are written now
            self.acceptance.fade()
            self._crowd = 1
            self._usual = 0
            if slots < MANY:
                self._rest.reset()
                self._rested = 0
        self._rows, self._crowd = list(rows), max(self._crowd, len(rows))
        self._rounds += 1
        if self._again and self.chosen <= most:
            self._again -= 1
        elif slots < MANY or self._rounds % EVERY == 0 or self._is_trial or self.chosen > most:
            self.chosen = self._choose(rows, slots, lengths_on(slots, most) if lengths is None else lengths)
        return self.chosen

    def _choose(self, rows: Sequence[Row], slots: int, lengths: list[int]) -> int:
        self._is_trial = False
        if 0 not in self.costs.rounds(slots) or len(lengths) == 1:
            return 0
        tokens = self.tokens(rows)
        pace = {length: tokens[length] / (self.costs.captured_round(slots, length) or 1.0) for length in lengths}
        best = max(lengths, key=lambda length: pace[length])
        pays = PAYS * pace[0]
        if best and pace[best] > pays:
            if slots >= MANY and pace.get(self._usual, 0.0) > max(pays, pace[best] / ANOTHER):
                best = self._usual
            self._usual = best
            self._rest.reset()
            self._rested = 0
            self._drafting += 1 if slots < MANY else EVERY
            if self._drafting % LOOKS == 0:
                self._begin_trial(slots)
                return self._other(pace, best) if slots >= MANY and self._drafting // LOOKS % 2 else 0
            return best
        self._rested += 1 if slots < MANY else EVERY
        if self._rested < max(self._rest.length, self._least_rest(slots, lengths[1])):
            return 0
        self._rested = 0
        self._rest.take()
        self._begin_trial(slots)
        return lengths[1]

    def _begin_trial(self, slots: int) -> None:
        self._is_trial = True
        self._again = TRIED - 1 if slots >= MANY else 0

    @staticmethod
    def _other(pace: dict[int, float], best: int) -> int:
        """Return the length that seems to be the best one but for `best`."""
        return max((length for length in pace if length != best), key=lambda length: pace[length])

    def _least_rest(self, slots: int, drafts: int) -> float:
        """Return for how many rounds to rest at least before one with so many drafts tries again."""
        step, trial = (self.costs.captured_round(slots, length) for length in (0, drafts))
        return TRIED * (trial / step - 1) / TRIALS if slots >= MANY and step and trial else 0.0

    def tokens(self, rows: Sequence[Row]) -> list[float]:
        """Return, by the number of drafts, the tokens that a round is expected to give one of the slower rows."""
        shares = [self.acceptance.share(number) for number in range(1, max(LENGTHS) + 1)]
        scores = np.array([row.scores if self.has_scores else [1.0] * len(shares) for row in rows])
        if self.has_scores and self._crowd > 1:
            scores *= np.array([[row.outcome[0] / row.outcome[1]] for row in rows])
        chances = np.minimum(scores * shares, 1.0)
        accepted = np.sort(chances.cumprod(axis=1).cumsum(axis=1), axis=0)[(len(rows) - 1) // 8]
        return [1.0, *(1.0 + accepted).tolist()]

    def saw(self, row: Row, round_: Launched, result: RoundResult, seconds: float | None) -> None:
        """Record a round; seconds None: it was compiled or captured, and its time says nothing about others."""
        if round_ is not self._seen:
            before, self._seen = self._seen or round_, round_
            self._alike = self._alike + 1 if (round_.drafts, round_.rows) == (before.drafts, before.rows) else 1
        if seconds is not None and (self._alike >= TRIED or round_.rows < MANY):
            self.costs.saw_round(round_.rows, round_.drafts or 0, seconds)
        if result.made:
            self._learn(row, result)

    def _learn(self, row: Row, result: RoundResult) -> None:
        """Note scores and acceptance of a row's drafts."""
        crowd, means, scores = self._crowd, self._scores, result.scores
        newest = NEWEST if crowd == 1 else NEWEST / LONGER
        for number in range(min(result.accepted + 1, result.made, len(means))):
            score = 0.0 if number >= result.drafted else scores[number] if number < len(scores) else 1.0
            if self.has_scores:
                row.outcome[0] += number < result.accepted
                row.outcome[1] += score * self.acceptance.share(number + 1)
                row.scores[number] += newest * (score - row.scores[number])
                means[number] += newest / crowd * (score - means[number])
            self.acceptance.add(number + 1, number < result.accepted, score, crowd)
