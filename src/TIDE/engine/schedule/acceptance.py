"""How often drafts are accepted, by their number in the round, and rests where they do not pay.

A running mean of the latest scores tells how easy a text is just now. The share of drafts that were accepted, of those that
their scores promised, corrects it: scores are too high in one text and too low in another.
"""

from __future__ import annotations

from TIDE.engine.schedule.costs import LATELY, Costs, RoundCosts
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.reference.trees import TreeShape

FIRST_SHARE = 0.7  # of drafts that are accepted, before any was seen. Not tuned: a few rounds replace it
KEPT = 0.98  # weight of earlier drafts when one is recorded: the latest fifty count. Not tuned: a text has some hundred
PRIOR = 4.0  # drafts of earlier texts that count in a new one. Twice as many made no difference (log, "Shorter first rests")
FIRST_REST = 16  # rounds; each rest is twice as long as the one before. With 8 no difference (log, "Shorter first rests")


class Acceptance:
    """Scores and acceptance of drafts by number, from 0 on: of one text, or of all. Drafts past the last number count as it.

    Args:
        known: of all texts, with which this one begins.
    """

    def __init__(self, known: Acceptance | None = None) -> None:
        self.scores: list[float] = [FIRST_SHARE] * MOST_TOKENS if known is None else list(known.scores)
        self.promised = [PRIOR] * MOST_TOKENS
        self.accepted = [PRIOR * (1.0 if known is None else known.share(number)) for number in range(MOST_TOKENS)]

    def share(self, number: int) -> float:
        """Return accepted drafts by those that were promised, where the drafts before them were accepted."""
        number = min(number, MOST_TOKENS - 1)
        return self.accepted[number] / self.promised[number]

    def chances(self, drafts: int) -> list[float]:
        """Return, for each of `drafts` drafts, the chance that it is accepted if those before it are."""
        return [min(1.0, self.scores[number] * self.share(number)) for number in range(drafts)]

    def saw_score(self, number: int, score: float, newest: float) -> None:
        """Record a score, which has the weight `newest` in the mean."""
        number = min(number, MOST_TOKENS - 1)
        self.scores[number] += newest * (score - self.scores[number])

    def saw(self, number: int, score: float, is_accepted: bool, rows: int = 1) -> None:
        """Record a verified draft of one of `rows` rows."""
        number, kept = min(number, MOST_TOKENS - 1), 1 - (1 - KEPT) / rows
        self.promised[number] = kept * self.promised[number] + score
        self.accepted[number] = kept * self.accepted[number] + is_accepted

    def fade(self) -> None:
        """Let the drafts so far count for no more than the prior: another part of the text begins."""
        for number, promised in enumerate(self.promised):
            self.accepted[number] *= min(1.0, PRIOR / promised)
            self.promised[number] = min(promised, PRIOR)


class Rest:
    """Rounds without drafts, up to a trial."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.length = FIRST_REST
        self.rested = 0

    def is_over(self, rounds: int = 1, least: float = 0.0) -> bool:
        """Count rounds of this rest; return True if it is over. The next one is twice as long, at most as long as timings are
        remembered."""
        self.rested += rounds
        if self.rested < max(self.length, least):
            return False
        self.rested, self.length = 0, min(2 * self.length, LATELY)
        return True


class Experience:
    """Drafting so far, known from one request to the next and shared by threads: of drafts in a row, or of trees of a shape.

    Attributes:
        gains: of exits on the host, by the number of the draft: tokens that they promised, less the cost of a draft's place.
        balance: tokens that drafts on the host brought a round, less what they took: a mean of the latest fifty.
        longest: drafts accepted in one round, at most.
        rest: of rows together. What drafts cost is mostly a matter of how many rows there are, so it outlasts a text.
        drafting: rounds for which drafts were planned.
    """

    def __init__(self) -> None:
        self.costs = Costs()
        self.acceptance = Acceptance()
        self.gains = [FIRST_SHARE] * MOST_TOKENS
        self.balance = FIRST_SHARE
        self.longest = 0
        self.rest = Rest()
        self.drafting = 0
        self._trees: dict[TreeShape, Experience] = {}

    def of(self, tree: TreeShape | None) -> Experience:
        """Return the experience with trees of a shape; None: with drafts in a row."""
        return self if tree is None else self._trees.setdefault(tree, Experience())


class HostDrafts:
    """Drafts of rounds on the host: whether there are any, and what they bring and take, whatever their scores promise.

    Attributes:
        is_resting: there are none in this round.
        trial: rounds that a trial goes on for.
        has_lost: more than was won, so that drafts rest until a trial.
        asked: exits of the round at hand.
        accepted: drafts of it.
    """

    def __init__(self) -> None:
        self.is_resting = self.has_lost = False
        self.trial = 0
        self.asked = self.accepted = 0

    def settle(self, known: Experience, costs: RoundCosts) -> None:
        """Record the round that is over."""
        step, exit_ = costs.step.mean, costs.exit.mean
        if self.asked and step is not None and exit_ is not None:
            taken = costs.deep(costs.tokens) - 1 + self.asked * exit_ / step
            known.balance += (1 - KEPT) * (self.accepted / costs.rows - taken - known.balance)
            if known.balance < 0:
                known.balance, self.has_lost = 0.0, True
        self.asked = self.accepted = 0
