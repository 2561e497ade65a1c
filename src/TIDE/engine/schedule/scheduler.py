"""The scheduler: how many drafts each row makes, decided from what drafting cost and brought so far.

A round on the host asks after every draft (`Row.budget`). A round that is launched as a whole is planned before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched
from TIDE.engine.rows.row import RoundResult, Row
from TIDE.engine.schedule.costs import Costs, RoundCosts
from TIDE.engine.schedule.draft_budget import DraftBudget, Experience
from TIDE.engine.schedule.draft_length import DraftLength
from TIDE.kernels.reference.trees import TreeShape


class Scheduler:
    """Decides about drafts; known from one request to the next."""

    def __init__(self) -> None:
        self.costs = Costs()
        self.experience = Experience()
        self.length = DraftLength(self.costs)
        self.trees: dict[TreeShape, DraftLength] = {}
        self._planned = self.length  # of the next round that is launched as a whole

    def admit(self, row: Row, plan: Plan) -> None:
        """Prepare for another text."""
        self.length.begin(row)
        if plan.rests:
            row.budget = DraftBudget(row.size, RoundCosts(self.costs), self.experience, plan.weighs)

    def _of(self, tree: TreeShape | None) -> DraftLength:
        """Return what decides about trees of a shape; None: about drafts in a row."""
        return self.length if tree is None else self.trees.setdefault(tree, DraftLength(Costs(), has_scores=False))

    def begin_round(self, rows: Sequence[Row], plan: Plan, slots: int, tree: TreeShape | None = None) -> None:
        """Decide how many drafts the next round of these rows has, which is launched as a whole on `slots` slots.

        Args:
            tree: that it may have; None: its drafts are in a row.
        """
        self._planned = self._of(tree)
        if plan.exact:
            self._planned.choose(rows, plan.most_drafts, slots, None if tree is None else [0, tree.levels])

    def drafts(self, row: Row, plan: Plan, is_planned: bool) -> int | None:
        """Return how many drafts a row makes in its next round; None: scores decide while it runs.

        Args:
            is_planned: the round is launched as a whole. In mode "fast" the text must not depend on seconds, so it then has as
                many drafts as are allowed, and scores decide which of them are kept.
        """
        if not is_planned:
            return None
        if plan.exact and not self._planned.chosen:
            return 0
        most = most_drafts(row, plan)
        return min(self._planned.chosen, most) if plan.exact else most

    def saw(self, row: Row, plan: Plan, result: RoundResult, round_: Launched, seconds: float | None) -> None:
        """Record what a round gave a row, and the seconds since the round before it; None: they are not typical.

        Rounds of mode "fast" teach nothing about those of mode exact: whatever their scores let out is accepted.
        """
        if round_.drafts is not None:
            if plan.exact:
                self._of(round_.tree).saw(row, round_, result, seconds)
        elif row.budget is not None and not round_.is_prefill:
            row.budget.record_round(len(row.tokens), len(result.tokens))


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
