"""The scheduler: what drafting cost and brought so far, known from one request to the next."""

from __future__ import annotations

from TIDE.engine.request.plan import Plan
from TIDE.engine.schedule.acceptance import Experience
from TIDE.engine.schedule.draft_planner import DraftPlanner


class Scheduler:
    """Makes planners that learn from each other."""

    def __init__(self) -> None:
        self.experience = Experience()

    def planner(self, plan: Plan) -> DraftPlanner:
        """Return a planner for rows that are decoded together."""
        return DraftPlanner(self.experience, plan)
