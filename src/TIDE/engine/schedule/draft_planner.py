"""The planner of drafts: as many as bring the most tokens for the seconds they take.

A round that is launched as a whole is planned before any of its scores is known:

    tokens of a row with k drafts     1 + a1 + a1·a2 + … + a1·…·ak        a: chance that a draft is accepted, by number
    seconds of the round              measured, by slots and drafts

The k with the most tokens per second is taken; of rows together for the last of the slowest eighth, because a batch ends with
its slowest rows.

A round on the host sees the score p of each draft, and is asked after every draft whether one more is worth its time. With P
the chance that the drafts before it are accepted, and a token worth the seconds that it takes without drafts:

    keep a draft       P · p          tokens  >  seconds of its place in the deep pass
    run another exit   P · gain       tokens  >  seconds of the exit                       gain: mean of p less the place

Rows together share a step, so there a token is worth less, and from some number of rows on nothing is drafted. However sure the
scores are, a row drafts one token more than any row ever had accepted: exits that are always wrong cost one draft each. And
whatever scores promise, drafts rest once the latest fifty rounds have lost more than they have won.

Where drafts do not pay they rest, longer each time, and then some rounds try. Trials of rows together take no more than a
hundredth of the time. While drafts pay, a round without any is timed now and then, and of many rows one with the second best
number: that is what the others are compared with, and texts grow.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TIDE.engine.cache.slots import MOST_ROUND
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import RoundResult, Row
from TIDE.engine.schedule.acceptance import KEPT, Acceptance, Experience, HostDrafts, Rest
from TIDE.engine.schedule.costs import LATELY, NEWEST, RoundCosts
from TIDE.kernels.reference.trees import TreeShape

# Drafts of a planned round, by slots from which on. On one slot by tree-shapes and trees-8b; from eight on each draft of all
# rows makes the pass longer, and more than three bring nothing (log, "More drafts at 8 rows do not help")
LENGTHS = {1: (0, 2, 4, 7), 8: (0, 1, 2, 3)}
MANY = max(LENGTHS)
# Rounds of many rows from one choice to the next. The first two with another number of drafts take longer than those after
# them: the third is timed (log, "What 64 rows believed"). Scores of rows together are remembered so many times longer: some row
# is always in a hard place, and what counts is which rows are hard (simulated, log, "One planner")
EVERY = 3
PAYS = 1.03  # times the tokens per second: another number of drafts, or drafts at all (log, "Eight rows wait for one")
TRIALS = 0.01  # of the time that rows together rest, trials take at most (simulated, log, "Long passes")
LOOKS = LATELY // 2  # rounds with drafts from one that is another to the next: what it took is remembered until then


def lengths_on(slots: int, most: int) -> list[int]:
    """Return the numbers of drafts that rounds on `slots` slots may have, up to `most`."""
    lengths, most = LENGTHS[MANY if slots >= MANY else 1], min(most, MOST_ROUND // slots - 1)
    return sorted({min(length, most) for length in lengths})


def most_drafts(row: Row, plan: Plan) -> int:
    """Return how many exits in a row the plan allows a row now."""
    if len(plan.spans) == 1:
        return 0
    new = len(row.tokens) - row.prompt
    if not new:
        return 0  # the first token is the full model's
    room = row.stop.room(row) - plan.exact  # a verified round ends with a token of the full model
    most = min(plan.most_drafts, max(0, room))
    if plan.exact:
        return most
    return next((n for n in range(most) if not plan.within_share(row.exits + n, new + n)), most)


class DraftPlanner:
    """Plans the drafts of rows that are decoded together, by one plan.

    Attributes:
        costs: of rounds on the host.
        known: experience with the kind of drafts at hand.
        texts: acceptance of each row.
        chosen: drafts of the next planned round; of a tree the levels.
    """

    def __init__(self, experience: Experience, plan: Plan) -> None:
        self.experience = self.known = experience
        self.plan = plan
        self.costs = RoundCosts(experience.costs)
        self.texts: dict[Row, Acceptance] = {}
        self.chosen = 0
        self._usual = 0  # drafts of the latest rounds that tried nothing
        self._crowd = 1  # most rows together since there were others
        self._rest = Rest()
        self._rounds = 0
        self._host = HostDrafts()

    def _begin(self, rows: Sequence[Row], are_many: bool) -> None:
        """Take in rows, with what was learnt from texts before them."""
        if rows and rows[0] not in self.texts:  # the longest there: others are written now
            self._crowd, self._usual, self._rest = 1, 0, Rest()
        self.texts = {row: self.texts.get(row) or Acceptance(self.known.acceptance) for row in rows}
        self._crowd = max(self._crowd, len(rows))
        if are_many:
            self._rest = self.known.rest

    def _begin_trial(self) -> None:
        for text in self.texts.values():
            text.fade()

    # ---- rounds that are launched as a whole ---------------------------------------------------------------------------------

    def plan_round(self, rows: Sequence[Row], slots: int, tree: TreeShape | None = None) -> None:
        """Choose the drafts of the next round of these rows, on `slots` slots.

        Args:
            tree: that it may have; None: its drafts are in a row.
        """
        if not self.plan.exact:
            return
        if self.known is not (known := self.experience.of(tree)):
            self.known, self.texts = known, {}
        lengths = lengths_on(slots, self.plan.most_drafts) if tree is None else [0, tree.levels]
        self._begin(rows, slots >= MANY)
        self._rounds += 1
        if slots < MANY or self._rounds % EVERY == 1 or self.chosen > lengths[-1]:
            self.chosen = self._choose(rows, slots, lengths, 1 if slots < MANY else EVERY)

    def _choose(self, rows: Sequence[Row], slots: int, lengths: list[int], rounds: int) -> int:
        """Return the drafts of the next `rounds` rounds."""
        known, costs = self.known, self.known.costs
        if 0 not in costs.rounds(slots) or len(lengths) == 1:
            return 0
        tokens = self.tokens(rows, lengths[-1])
        seconds = {length: costs.captured_round(slots, length) or 1.0 for length in lengths}
        pace = {length: tokens[length] / seconds[length] for length in lengths}
        best = max(lengths, key=lambda length: pace[length])
        if pace[best] > PAYS * pace[0]:
            if slots >= MANY and pace.get(self._usual, 0.0) > max(PAYS * pace[0], pace[best] / PAYS):
                best = self._usual
            self._usual = best
            self._rest.reset()
            known.drafting += rounds
            if known.drafting % LOOKS >= rounds:
                return best
            others = [length for length in lengths if length != best]
            return max(others, key=lambda length: pace[length]) if slots >= MANY and known.drafting // LOOKS % 2 else 0
        least = rounds * (seconds[lengths[1]] / seconds[0] - 1) / TRIALS if slots >= MANY else 0.0
        if not self._rest.is_over(rounds, least):
            return 0
        self._begin_trial()
        return lengths[1]

    def tokens(self, rows: Sequence[Row], most: int) -> list[float]:
        """Return, by the number of drafts, the tokens that a round is expected to give one of the slower rows."""
        chances = np.array([self.texts[row].chances(most) for row in rows])
        accepted = np.sort(chances.cumprod(axis=1).cumsum(axis=1), axis=0)[(len(rows) - 1) // 8]
        return [1.0, *(1.0 + accepted).tolist()]

    def drafts(self, row: Row, is_planned: bool) -> int | None:
        """Return how many drafts a row makes in its next round; None: scores decide while it runs.

        Args:
            is_planned: the round is launched as a whole. In mode "fast" the text must not depend on seconds, so it then has as
                many drafts as are allowed, and scores decide which of them are kept.
        """
        if not is_planned:
            return None
        return min(self.chosen, most_drafts(row, self.plan)) if self.plan.exact else most_drafts(row, self.plan)

    # ---- rounds on the host --------------------------------------------------------------------------------------------------

    def begin_round(self, rows: Sequence[Row]) -> None:
        """Start a round on the host: choose whether its rows draft, rest, or one of them tries for all."""
        self._host.settle(self.known, self.costs)
        self.costs.begin_round(max(1, len(rows)))
        self._begin(rows, len(rows) > 1)
        self._host.trial = max(0, self._host.trial - 1)
        step, exit_ = self.costs.step.mean, self.costs.exit.mean
        self._host.is_resting = step is None
        if step is None or exit_ is None or self._host.trial or (self._exit_pays(1.0, 0) and not self._host.has_lost):
            return
        least = EVERY * (exit_ / step + self.costs.guess) / TRIALS if len(rows) > 1 else 0.0
        self._host.is_resting = not self._rest.is_over(least=least)
        if not self._host.is_resting:
            self._host.trial = EVERY - 1  # the first exit catches up with the text, and the next one is timed
            self._host.has_lost = False
            self._begin_trial()

    def _exit_pays(self, odds: float, number: int) -> bool:
        """Return True if an exit is likely to pay, after drafts that are accepted with the probability `odds`."""
        step, exit_ = self.costs.step.mean, self.costs.exit.mean
        gain = odds * self.known.gains[min(number, len(self.known.gains) - 1)]
        return step is None or exit_ is None or gain * step > PAYS * exit_ * self.costs.rows

    def _odds(self, row: Row) -> float:
        """Return the probability that all drafts of a row are accepted."""
        odds, text = 1.0, self.texts[row]
        for number, draft in enumerate(row.drafts):
            odds *= min(1.0, (draft.score or 0.0) * text.share(number))
        return odds

    def should_draft(self, row: Row) -> bool:
        """Return True if the exit is to run for the newest token of a row on the host."""
        number, gains = len(row.drafts), self.known.gains
        if self._host.is_resting or number > self.known.longest:
            asks = False
        elif self._host.trial and not number:
            asks = row is next(iter(self.texts))
        else:
            asks = not self.plan.weighs or self._exit_pays(self._odds(row), number)
            if not asks and 0 < number < len(gains):
                gains[number] += (1 - KEPT) * (gains[number - 1] - gains[number])  # or it would never run again
        self._host.asked += asks
        return asks

    def should_exit(self, row: Row, score: float, threshold: float = 0.0) -> bool:
        """Return True if a token with this score becomes a draft, and record it. A trial believes the score, and for a machine
        that was busy the guessed cost of a place."""
        number, odds = len(row.drafts), self._odds(row)
        place, share = self.costs.marginal_cost(self.costs.tokens), self.texts[row].share(number)
        is_trial = self._host.trial > 0 and not number
        price = PAYS * self.costs.rows * (min(place, self.costs.guess) if is_trial else place)
        gains, at = self.known.gains, min(number, len(self.known.gains) - 1)
        pays = odds * score * (1.0 if is_trial else share) > price if self.plan.weighs else score >= threshold
        gain = max(0.0, score * share - price / odds) if pays and odds else 0.0
        gains[at] = max(gains[at], gain) if is_trial else gains[at] + NEWEST * (gain - gains[at])
        self.costs.tokens += pays
        return pays

    # ---- what rounds gave ----------------------------------------------------------------------------------------------------

    def saw(self, row: Row, result: RoundResult, round_: Launched, seconds: float | None) -> None:
        """Record what a round gave a row, and the seconds since the round before it; None: they are not typical.

        Rounds of mode "fast" teach nothing about those of mode exact: whatever their scores let out is accepted.
        """
        known = self.experience.of(round_.tree)
        is_planned = round_.drafts is not None
        if not (self.plan.exact if is_planned else self.plan.rests):
            return
        if is_planned and (self.costs.alike(round_) >= EVERY or round_.rows < MANY) and seconds is not None:
            known.costs.saw_round(round_.rows, round_.drafts or 0, seconds)
        self._host.accepted += 0 if is_planned else result.accepted
        if result.made:
            text = self.texts.get(row) if known is self.known else None
            self._learn(known, text or Acceptance(known.acceptance), result, is_planned)

    def _learn(self, known: Experience, text: Acceptance, result: RoundResult, is_planned: bool) -> None:
        """Record scores and acceptance of drafts up to the first that was rejected."""
        crowd, scores = self._crowd, result.scores
        newest = NEWEST if crowd == 1 else NEWEST / EVERY
        known.longest = max(known.longest, result.accepted)
        for number in range(min(result.accepted + 1, result.made)):
            score = 0.0 if number >= result.drafted else scores[number] if number < len(scores) else 1.0
            if is_planned:
                text.saw_score(number, score, newest)
                known.acceptance.saw_score(number, score, newest / crowd)
            text.saw(number, score, number < result.accepted)
            known.acceptance.saw(number, score, number < result.accepted, crowd)
