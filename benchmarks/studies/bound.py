"""Bound: how slow can mode exact get if a text knows the scheduler's state? A simulation: no model, no clock.

An adversary sees every decision about drafts and says of each whether it is accepted, and how sure its exit is. Costs are
given, in steps (a pass of one token), and do not scatter; exits off takes a step for each token. One row, and two kinds of
rounds of `DraftPlanner`:

    host      after every draft the host reads its score
    rounds    the number of drafts is chosen before the round

Adversaries are: nothing is accepted; cycles of rounds that are accepted and rounds that are not; drafting wins all the credit
it can have, and then loses until it rests; and a search that changes the worst of these round by round and keeps what makes the
text slower. What is found is what is possible at least, no proof that nothing is worse.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

from kept import Record

EXIT = 0.1  # of a step
PASSES = {2: 1.06, 3: 1.22, 4: 1.45, 5: 1.7, 6: 1.9}  # tokens -> steps; two Arm cores: docs/results/passes-arm.json
ROUNDS = {0: 1.0, 2: 1.23, 4: 1.44, 7: 1.67}  # drafts -> steps; 8B shape, H200: tokens a round by speed, trees-8b.json
SURE = 0.99
CYCLES = (1, 2, 4, 8, 16, 32, 64, 128)
CHANGED = 0.1  # of a list, at most, that a change replaces


class Action(NamedTuple):
    """What an adversary does in a round: drafts that are accepted, at most, and the score of every draft."""

    accepted: int
    score: float = SURE


ALL, NONE = Action(99), Action(0)
ACTIONS = (ALL, NONE, Action(1), Action(2), Action(0, 0.5), Action(99, 0.5), Action(1, 0.5))


class Text(NamedTuple):
    """A text that was written."""

    steps: float  # that it took
    tokens: int
    drafted: int

    @property
    def ratio(self) -> float:
        """The speed, times that of exits off."""
        return self.tokens / self.steps


Adversary = Callable[[Any], Action]  # the scheduler's state -> what the adversary does in this round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=2000, help="of a text")
    parser.add_argument("--tries", type=int, default=400, help="changes that the search tries")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> Record:
    table: dict[str, Record] = {}
    for name, written in (("host", on_the_host), ("rounds", in_rounds)):
        periods = [[ALL] * good + [NONE] * bad for good in CYCLES for bad in CYCLES]
        kinds = {
            "nothing is accepted": [lambda: _always(NONE)],
            "cycles": [lambda own=own: _listed(own) for own in periods],
            "drafting wins, then loses until it rests": _builders(),
        }
        worst: Callable[[], Adversary] = kinds["cycles"][0]
        for kind, adversaries in kinds.items():
            own = min(adversaries, key=lambda make: written(make(), options.tokens).ratio)
            table[f"{name}, {kind}"] = _row(written(own(), options.tokens))
            worst = min(worst, own, key=lambda make: written(make(), options.tokens).ratio)
        written(_noted(worst(), actions := []), options.tokens)
        table[f"{name}, search"] = _row(_searched(written, actions, options))
    ratios = {name: [own["× exits off"] for row, own in table.items() if row.startswith(name)] for name in ("host", "rounds")}
    return {
        "what": "Simulation: the slowest mode exact that adversaries who know the scheduler's state were found to cause",
        "settings": f"one row, {options.tokens} new tokens; in steps: exit {EXIT}, deep passes {PASSES}, rounds by drafts "
        f"{ROUNDS}; costs do not scatter; {options.tries} changes tried by the search",
        "note": "a simulation of the scheduler with given costs: nothing was run or timed",
        "table": table,
        "figures": {f"worst_{name}": min(own) for name, own in ratios.items()},
    }


def _planner() -> tuple[Any, Any]:
    """Return a planner that has seen nothing, and its row."""
    from TIDE.engine.rows.row import Row
    from TIDE.engine.rows.stop import StopRule
    from TIDE.engine.schedule.acceptance import Experience
    from TIDE.engine.schedule.draft_planner import DraftPlanner

    plan: Any = SimpleNamespace(exact=True, rests=True, weighs=True, most_drafts=max(ROUNDS))
    return DraftPlanner(Experience(), plan), Row([0], StopRule(), 1)


def on_the_host(adversary: Adversary, tokens: int) -> Text:
    """Write a text as a row on the host is written."""
    from TIDE.engine.round import Launched
    from TIDE.engine.rows.row import Draft, RoundResult

    planner, row = _planner()
    planner.costs.step.add(1.0)
    planner.costs.exit.add(EXIT)
    for count, steps in PASSES.items():
        planner.costs.saw_pass(count, steps)
    size, spent, drafted, action = 0, 0.0, 0, NONE
    while size < tokens:
        planner.begin_round([row])
        row.drafts = []
        while len(row.drafts) < max(PASSES) - 1 and planner.should_draft(row):
            action = action if row.drafts else adversary(planner)
            spent += EXIT
            if not planner.should_exit(row, action.score):
                break
            row.drafts.append(Draft(0, 0, action.score))
        drafts = len(row.drafts)
        accepted = min(action.accepted, drafts)
        scores = [draft.score or 0.0 for draft in row.drafts]
        planner.saw(row, RoundResult([], drafts, accepted, scores=scores, made=drafts), Launched(list), None)
        size, spent, drafted = size + 1 + accepted, spent + PASSES.get(1 + drafts, 1.0), drafted + drafts
    return Text(spent, size, drafted)


def in_rounds(adversary: Adversary, tokens: int) -> Text:
    """Write a text in rounds that are launched as a whole."""
    from TIDE.engine.round import Launched
    from TIDE.engine.rows.row import RoundResult

    planner, row = _planner()
    size, spent, drafted = 0, 0.0, 0
    while size < tokens:
        planner.plan_round([row], 1)
        drafts = planner.chosen
        action = adversary(planner) if drafts else NONE
        accepted = min(action.accepted, drafts)
        result = RoundResult([], drafts, accepted, scores=[action.score] * drafts, made=drafts)
        planner.saw(row, result, Launched(list, drafts), ROUNDS[drafts])
        size, spent, drafted = size + 1 + accepted, spent + ROUNDS[drafts], drafted + drafts
    return Text(spent, size, drafted)


def _row(text: Text) -> Record:
    return {"× exits off": round(text.ratio, 3), "drafts per token": round(text.drafted / text.tokens, 3)}


def _always(action: Action) -> Adversary:
    return lambda state: action


def _listed(actions: list[Action]) -> Adversary:
    """Return the adversary that does one after the other, again and again."""
    following: Iterator[Action] = cycle(actions)
    return lambda state: next(following)


def _builders() -> list[Callable[[], Adversary]]:
    """Return adversaries that let drafting win, and then lose until it rests."""
    wins, losses = (Action(1), Action(2), Action(3), ALL), (NONE, Action(0, 0.5))
    return [lambda win=win, lose=lose, n=n: _hope(win, lose, n) for win in wins for lose in losses for n in CYCLES]


def _hope(win: Action, lose: Action, rounds: int) -> Adversary:
    """Return the adversary that lets some rounds win, and none from then on until drafts have rested."""
    losing, won, length = False, 0, 0

    def act(planner: Any) -> Action:
        nonlocal losing, won, length
        before, length = length, planner._rest.length
        if length > before:  # a rest is over
            losing, won = False, 0
        won += 1
        losing = losing or won > rounds
        return lose if losing else win

    return act


def _noted(adversary: Adversary, actions: list[Action]) -> Adversary:
    """Return the same adversary, whose actions are noted."""

    def act(state: Any) -> Action:
        actions.append(adversary(state))
        return actions[-1]

    return act


def _searched(written: Callable[[Adversary, int], Text], start: list[Action], options: argparse.Namespace) -> Text:
    """Change parts of a list of actions, and keep what makes the text slower."""
    chance, best = random.Random(options.seed), start
    found = written(_listed(best), options.tokens)
    for _ in range(options.tries):
        tried, count = list(best), chance.randint(1, max(1, int(CHANGED * len(best))))
        first = chance.randrange(len(best) - count + 1)
        many = chance.choices(ACTIONS, k=count)
        tried[first : first + count] = many if chance.random() < 0.5 else many[:1] * count
        text = written(_listed(tried), options.tokens)
        if text.ratio < found.ratio:
            best, found = tried, text
    return found
