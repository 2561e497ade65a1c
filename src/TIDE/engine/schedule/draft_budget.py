"""Drafts of a row where the host sees every score: is one more draft worth its time?

An accepted draft saves its row a token of the deep pass of all rows. A rejected one costs one exit-head evaluation and one
extra token in that pass. With p the probability that a draft is accepted, and P that all before it in the round are:

    keep a draft       if  P · p · worth  >  marginal cost of a token in the deep pass
    ask another exit   if  P · usual gain · worth  >  cost of an exit                      all in steps

A token is worth a whole step in a row by itself. Rows together share a step, so there it is worth less, and from some number of
rows on nothing is drafted.

Routers give p for a token by itself; how often drafts really were accepted, by their number in the round, corrects P · p.
However sure the scores are, a row drafts one token more than any row ever had accepted: exits that are always wrong cost one
draft each.

A row keeps a balance of the steps that drafting won and cost; one that lost a few rests for a while, longer each time. So does
one whose exits take too long; then it tries again, for a machine that was busy may be idle now: its first draft is weighed
with the guessed cost of a place if the measured one is higher. Of rows together one tries for all, now and then, in whatever
request it is: they wait for it.
"""

from __future__ import annotations

from TIDE.engine.schedule.acceptance import FIRST_REST, LONGEST_REST, Acceptance, Rest
from TIDE.engine.schedule.costs import RoundCosts, RunningMean

FIRST_GAIN = 0.5  # of what a token is worth: gain of an exit before any score was seen
HOPELESS, LATE_START = 16, 64  # exits without an accepted draft after which the next texts begin with a rest, and its tokens
WORTH = 0.95  # of a step, a token: full steps without drafts between them are a little quicker
TRIAL = 2  # times an exit is asked after a rest: the first has to catch up with the text and is not timed
TOGETHER = 1.5  # times its seconds, what an exit of rows together must promise: after a rest it has to catch up
BETWEEN = 128  # rounds of rows together from one that tries to the next
ALLOWANCE, MOST_CREDIT = 3.0, 2.0  # tokens' worth that rows together may lose before one rests, and that it may be ahead
NO_LUCK = 3  # if no draft was ever accepted, or a threshold lets nothing out, a row may lose a third of the allowance


class Experience:
    """The outcome of drafting so far, known from one request to the next."""

    def __init__(self) -> None:
        self.gain = RunningMean(FIRST_GAIN)  # of an exit: a share of what a token is worth
        self.in_vain = 0  # exits asked since the last one whose draft was accepted
        self.longest = 0  # drafts accepted in one round, at most
        self._trier: DraftBudget | None = None  # of rows together, the one that tries
        self._next_trial = 0  # the round from which another one may

    def may_try(self, row: DraftBudget, round_: int) -> bool:
        """Return True if this one of several rows is the one that tries."""
        if self._trier is not row and round_ >= self._next_trial:
            self._trier = row
            self._next_trial = round_ + BETWEEN
        return self._trier is row

    def has_tried(self, row: DraftBudget) -> None:
        """Record that a row has no trial left."""
        if self._trier is row:
            self._trier = None


class DraftBudget:
    """The drafts of one row.

    Args:
        size: tokens of its prompt.
        costs: of the stage that the row is in.
        weighs: weigh scores against time; otherwise a threshold decides, and only rests are decided here.
    """

    def __init__(self, size: int, costs: RoundCosts, experience: Experience, weighs: bool = True) -> None:
        self.costs = costs
        self.experience = experience
        self.weighs = weighs
        self.acceptance = Acceptance()
        self.odds = [1.0]  # that no draft, the first, the first two … of this round are accepted
        self.asked = 0  # exits in this round
        self._balance = 0.0  # tokens' worth won by drafting, less what it cost
        self._rest = Rest()
        self._until = 0  # size of the text at which a rest ends
        self._trials = TRIAL
        self._is_trial = False
        if experience.in_vain >= HOPELESS:
            self._rest = Rest(LONGEST_REST)
            self._until = size + LATE_START

    def should_draft(self, size: int) -> bool:
        """Return True if asking an exit about the newest of `size` tokens is likely to pay."""
        return size >= self._until and self.costs.step.mean is not None and (self._is_likely_to_pay() or self._may_try(size))

    def _is_likely_to_pay(self) -> bool:
        step, exit_ = self.costs.step.mean, self.costs.exit.mean
        if not self.weighs or exit_ is None or step is None:
            return True
        number = len(self.odds) - 1
        trust = self.acceptance.share(number) if number else 1.0
        wanted = exit_ if self.costs.rows == 1 else TOGETHER * exit_
        return self.odds[-1] * trust * (self.experience.gain.mean or 0.0) * self.costs.worth * step > wanted

    def _may_try(self, size: int) -> bool:
        """Use up a trial of a row that has no draft yet; without one left the row rests."""
        if len(self.odds) > 1 or (self.costs.rows > 1 and not self.experience.may_try(self, self.costs.number)):
            return False
        if not self._trials:
            self._take_rest(size)
            return False
        self._trials -= 1
        self._is_trial = True
        return True

    def should_exit(self, score: float, threshold: float = 0.0) -> bool:
        """Return True if a token with this score becomes a draft, and record it."""
        number = len(self.odds)
        odds = self.odds[-1] * score
        place = self.costs.marginal_cost(self.costs.tokens)
        cost = (min(place, self.costs.guess) if self._is_trial else place) / self.costs.worth
        trust = WORTH * self.acceptance.share(number)
        self.asked += 1
        self.experience.in_vain += 1
        self.experience.gain.add(max(0.0, score * trust - cost))
        pays = odds * trust > cost if self.weighs else score >= threshold
        if not pays or number > self.experience.longest + 1:
            return False
        self.odds.append(odds)
        self.costs.tokens += 1
        return True

    def record_round(self, size: int, tokens: int) -> None:
        """Record that a round gave `tokens`, and that the row has `size` now."""
        for number, odds in enumerate(self.odds[1:], 1):
            self.acceptance.add(number, tokens > number, odds)
        if tokens > 1:
            self.experience.in_vain = 0
            self.experience.longest = max(self.experience.longest, tokens - 1)
        if self.asked and self.costs.step.mean is not None and self.costs.exit.mean is not None:
            self._settle(size, WORTH * tokens - self._spent())
        self.odds = [1.0]
        self.asked = 0
        self._is_trial = False

    def _spent(self) -> float:
        """Return what the row's part of the round cost, in tokens' worth."""
        costs, drafts = self.costs, len(self.odds) - 1
        places = costs.deep(costs.rows + drafts) - costs.deep(costs.rows)
        exits = self.asked * (costs.exit.mean or 0.0) / (costs.step.mean or 1.0)
        return 1.0 + (places + exits) / costs.worth

    def _settle(self, size: int, gained: float) -> None:
        self._balance = min(self._balance + gained, MOST_CREDIT)
        has_luck = self.experience.longest > 0 and (self.weighs or len(self.odds) > 1)
        allowance = (ALLOWANCE if has_luck else ALLOWANCE / NO_LUCK) / self.costs.rows
        if self._balance < -allowance * FIRST_REST / self._rest.length:  # less each time
            self._take_rest(size)
        elif self._balance == MOST_CREDIT:
            self._rest.reset()

    def _take_rest(self, size: int) -> None:
        self._until = size + self._rest.take() * self.costs.rows
        self._balance = 0.0
        self._trials = TRIAL
        self.experience.has_tried(self)
        self.acceptance.clear()  # what comes then is another part of the text
        self.experience.gain.mean = min(self.experience.gain.mean or 0.0, FIRST_GAIN / 2)
