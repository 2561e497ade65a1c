"""Planners of drafts with costs that are given, and rounds of theirs in which nothing runs."""

from __future__ import annotations

from types import SimpleNamespace

from TIDE.engine.round import Launched
from TIDE.engine.rows.row import Draft, RoundResult, Row
from TIDE.engine.rows.stop import StopRule
from TIDE.engine.schedule.acceptance import Experience
from TIDE.engine.schedule.costs import Costs, RoundCosts
from TIDE.engine.schedule.draft_planner import DraftPlanner


def some_costs(step=1.0, exit_=0.1, passes=(1.0, 1.1, 1.2, 1.3, 2.3), costs=None) -> RoundCosts:
    """Deep passes of 1 to 5 tokens; the fifth is dear."""
    costs = RoundCosts(costs or Costs())
    costs.step.add(step)
    costs.exit.add(exit_)
    for tokens, seconds in enumerate(passes, 1):
        costs.saw_pass(tokens, seconds)
    return costs


def an_experience(longest=8, **costs) -> Experience:
    """As many drafts were accepted before as anyone wants."""
    experience = Experience()
    experience.longest = longest
    some_costs(costs=experience.costs, **costs)
    return experience


def a_planner(experience=None, weighs=True, most=7) -> DraftPlanner:
    plan = SimpleNamespace(exact=True, rests=True, weighs=weighs, most_drafts=most, spans=(range(1), range(1, 2)))
    return DraftPlanner(experience or an_experience(), plan)


def a_row() -> Row:
    return Row([1, 2], StopRule(), 4)


def drafts_of(planner, row, score, most=8, threshold=0.0) -> int:
    """Let exits on the host run for a row as long as the planner wants it, each with this score; return how many did."""
    exits = 0
    while len(row.drafts) < most and planner.should_draft(row):
        exits += 1
        if not planner.should_exit(row, score, threshold):
            break
        row.drafts.append(Draft(0, 0, score))
    return exits


def over(planner, row, accepted) -> None:
    """End a round on the host, in which so many drafts were accepted."""
    scores = [draft.score for draft in row.drafts]
    accepted = min(accepted, len(scores))
    planner.saw(row, RoundResult([], len(scores), accepted, scores=scores, made=len(scores)), Launched(list), None)
    row.drafts = []


def a_round(planner, row, score, accepted, most=8) -> tuple[int, int]:
    """A round of one row on the host; return exits that ran and drafts that were made."""
    planner.begin_round([row])
    exits = drafts_of(planner, row, score, most)
    drafts = len(row.drafts)
    over(planner, row, accepted)
    return exits, drafts


def in_rounds(planner, rows, slots=1) -> int:
    """Return the drafts of the next planned round."""
    planner.plan_round(rows, slots)
    return planner.chosen


def record(planner, row, drafts, accepted, seconds, scores=(), slots=1, round_=None) -> None:
    """What a planned round gave a row."""
    result = RoundResult([], drafts, min(drafts, accepted), scores=scores, made=drafts)
    planner.saw(row, result, round_ or Launched(list, drafts, rows=slots), seconds)
