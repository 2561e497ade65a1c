"""Drafting: whether one more draft is worth its time.

A draft that stands saves a full step. One that falls costs the asking at its exit and its place in the deep pass. With p
the probability that a draft stands, and P that all before it in the row do:

    leave it drafted   if  P · p  >  place                           place: what one more token in the deep pass costs
    ask once more      if  P · what asking usually gains  >  exit    all in steps

Routers give p for a token by itself; how often drafts really stood, by their number in the row, corrects P · p. However sure
the scores are, a row drafts one token more than any row ever had accepted: exits that are always wrong cost one draft each.

Seconds are those of the passes just run, on this machine; nothing is assumed about it. And whatever the scores say, a row
keeps a balance of what drafting won and cost; one that lost a few steps rests for a while, longer each time. So does one whose
exits take too long; then it tries again, for a machine that was busy may be idle now.
"""

from __future__ import annotations

from itertools import pairwise

from TIDE.engine.schedule.draft_length import DraftLength
from TIDE.engine.schedule.means import ClippedMean, RunningMean

FIRST_GAIN = 0.5  # before any score was seen
FIRST_REST, LONGEST_REST = 16, 256  # tokens
HOPELESS, LATE_START = 16, 64  # exits asked in vain after which the next texts begin with so many tokens of rest
KEPT = 0.98  # of what was seen of drafts before the newest
PRIOR = 4.0  # drafts that stood as expected, before any was seen
WORTH = 0.95  # of a step, a token: full steps without drafts between them are a little quicker
TRIAL = 2  # times an exit is asked after a rest: the first has to catch up with the text and is not timed
ALLOWANCE, MOST_CREDIT = 3.0, 2.0  # steps a row may lose before it rests, and those of its gains that are remembered
NO_LUCK = 3  # where no draft was ever accepted, or a threshold lets nothing out, a row may lose the third part only
GUESS = 0.1  # of a full step: what a place costs before it was measured


class Costs:
    """What steps, exits and deep passes take, and what asking exits gains: known from one request to the next.

    Passes are kept as multiples of a pass of one token, which every pass tells something about: texts grow, and what was seen
    on a long one must not stand for a short one.
    """

    def __init__(self) -> None:
        self.step = ClippedMean()  # seconds of a pass of one token, as of now
        self.exit = ClippedMean()  # seconds up to and with an exit
        self.passes: dict[int, RunningMean] = {}  # by tokens: of what comes after the exits, in steps
        self.gain = RunningMean(FIRST_GAIN)  # of asking: a share of a step
        self.in_vain = 0  # exits asked since the last one whose draft was accepted
        self.proven = 0  # drafts in a row that were accepted, at most
        self.length = DraftLength()  # of rounds on a GPU

    def saw_pass(self, tokens: int, seconds: float) -> None:
        if tokens == 1:
            self.step.add(seconds)
        elif self.step.mean is not None:
            own = self.passes.setdefault(tokens, RunningMean())
            if own.mean is not None:
                self.step.add(seconds / own.mean)
            own.add(min(seconds / self.step.mean, 2.0 * tokens))

    def deep(self, tokens: int) -> float | None:
        """Steps that a deep pass takes, if it is known."""
        own = self.passes.get(tokens)
        return 1.0 if tokens == 1 else own.mean if own else None

    def round(self, exits: int, tokens: int) -> float | None:
        """Steps that a round takes which asks so many exits and has so many tokens in its deep pass, if they are known."""
        deep = self.deep(tokens)
        if deep is None or self.step.mean is None or (exits and self.exit.mean is None):
            return None
        return deep + exits * (self.exit.mean or 0.0) / self.step.mean

    def place(self, tokens: int) -> float:
        """Steps that one more token costs in a deep pass that has so many."""
        known = [(n, deep) for n in sorted({1, *self.passes}) if (deep := self.deep(n)) is not None]
        for (n, before), (m, after) in pairwise(known):
            if n <= tokens < m:
                return max(0.0, (after - before) / (m - n))
        return GUESS


class DraftBudget:
    """The decisions for the rows of one request."""

    def __init__(self, sizes: list[int], costs: Costs, weighs: bool = True) -> None:
        """For rows of so many tokens. Without `weighs` a threshold decides, and rests are all that is left to do here."""
        rows, self.costs, self.weighs = len(sizes), costs, weighs
        self.odds: list[list[float]] = [[1.0] for _ in range(rows)]  # that no draft, the first, the first two … all stand
        self.asked = [0] * rows  # exits in this round
        self.stood: dict[int, list[float]] = {}  # by number in the row: drafts that stood, and how many were expected to
        self._balance = [0.0] * rows  # steps won by drafting, less those it cost
        self._rest, self._until = [FIRST_REST] * rows, [0] * rows
        if costs.in_vain >= HOPELESS:
            self._rest, self._until = [LONGEST_REST] * rows, [size + LATE_START for size in sizes]
        self._trials = [TRIAL] * rows

    def should_draft(self, row: int, size: int) -> bool:
        """Whether asking an exit about the newest of `size` tokens is likely to pay."""
        step, exit_, gain = self.costs.step.mean, self.costs.exit.mean, self.costs.gain.mean
        if step is None or size < self._until[row]:
            return False
        drafts = len(self.odds[row]) - 1
        if not self.weighs or exit_ is None or self.odds[row][-1] * self.trust(drafts) * (gain or 0.0) * step > exit_:
            return True
        if drafts:
            return False
        if not self._trials[row]:
            self._take_rest(row, size)
            return False
        self._trials[row] -= 1
        return True

    def should_exit(self, row: int, score: float, threshold: float = 0.0) -> bool:
        """Whether a token with this score becomes a draft; the threshold is for those who do not weigh."""
        odds, number = self.odds[row][-1] * score, len(self.odds[row])
        place = self.costs.place(number)
        self.asked[row] += 1
        self.costs.in_vain += 1
        trust = WORTH * self.trust(number)
        self.costs.gain.add(max(0.0, score * trust - place))
        pays = odds * trust > place if self.weighs else score >= threshold
        if not pays or number > self.costs.proven + 1:
            return False
        self.odds[row].append(odds)
        return True

    def verified(self, row: int, size: int, tokens: int) -> None:
        """A round of a row is over: it gave `tokens`, and the row has `size` now."""
        spent = self.costs.round(self.asked[row], len(self.odds[row]))
        for number, odds in enumerate(self.odds[row][1:], 1):
            self._saw_draft(number, tokens > number, odds)
        if tokens > 1:
            self.costs.in_vain = 0
            self.costs.proven = max(self.costs.proven, tokens - 1)
        if self.asked[row] and spent is not None:
            self._balance[row] = min(self._balance[row] + WORTH * tokens - spent, MOST_CREDIT)
            has_luck = self.costs.proven > 0 and (self.weighs or len(self.odds[row]) > 1)
            allowance = ALLOWANCE if has_luck else ALLOWANCE / NO_LUCK
            if self._balance[row] < -allowance * FIRST_REST / self._rest[row]:  # less each time
                self._take_rest(row, size)
            elif self._balance[row] == MOST_CREDIT:
                self._rest[row] = FIRST_REST
        self.odds[row], self.asked[row] = [1.0], 0

    def trust(self, number: int) -> float:
        """What the odds of a draft have to be multiplied with, going by the latest ones of this number in their rows."""
        stood, expected = self.stood.get(number, (1.0, 1.0))
        return stood / expected

    def _saw_draft(self, number: int, stood: bool, odds: float) -> None:
        seen = self.stood.setdefault(number, [PRIOR, PRIOR])
        seen[0], seen[1] = KEPT * seen[0] + stood, KEPT * seen[1] + odds

    def _take_rest(self, row: int, size: int) -> None:
        self._until[row] = size + self._rest[row]
        self._rest[row] = min(2 * self._rest[row], LONGEST_REST)
        self._balance[row], self._trials[row] = 0.0, TRIAL
        self.stood.clear()  # what comes then is another part of the text
        self.costs.gain.mean = min(self.costs.gain.mean or 0.0, FIRST_GAIN / 2)
