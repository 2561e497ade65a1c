"""Launching rounds on slots: a plan that says all that a round needs, its graph, and the results that the host reads later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from TIDE.engine.cache.slots import Slots
from TIDE.engine.host import sampler as host
from TIDE.engine.request.plan import Plan
from TIDE.engine.round import Launched, run_passes, run_round
from TIDE.engine.rows.row import Draft, RoundResult, Row
from TIDE.engine.runners.device import DeviceRunner, device_errors
from TIDE.engine.runners.graphs import Held
from TIDE.engine.schedule.draft_planner import lengths_on
from TIDE.engine.slots.round import MIN_COLUMNS, SlotRound
from TIDE.engine.slots.tree_round import TreeRound, shape_for, why_no_tree
from TIDE.kernels.layer import MOST_TOKENS
from TIDE.kernels.reference.sampling import Features
from TIDE.kernels.reference.trees import TreeShape
from TIDE.kernels.result import ACCEPTED, DRAFTED, NOTHING_LEFT, SCORES, TOKENS
from TIDE.kernels.transfer import write

BEYOND = 2 * MOST_TOKENS  # columns that attention is planned for beyond the text, as far as the host knows it


def levels(tokens: int) -> list[int]:
    """Return the numbers of columns that attention is planned for in texts of up to `tokens` tokens."""
    found = [MIN_COLUMNS]
    while found[-1] < tokens + BEYOND:
        found.append(4 * found[-1])
    return found


@dataclass(frozen=True)
class RoundPlan:
    """All that a round on slots needs, decided before its launch: a process with the same slots could launch the same round.

    Attributes:
        drafts: of the round; of a tree the levels.
        tree: of each row, if there are drafts; None: drafts are in a row.
        columns: that attention is planned for.
        features: of the choice of tokens; None: every row takes the best one.
        limits: of each slot's drafts, which the device reads; empty: as they were.
    """

    drafts: int = 0
    tree: TreeShape | None = None
    columns: int = MIN_COLUMNS
    features: Features | None = None
    limits: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens of each row in the deep pass."""
        return 1 + (self.drafts if self.tree is None or not self.drafts else self.tree.drafts)


class RoundLauncher:
    """Plans and launches rounds.

    Attributes:
        without_tree: why drafts are in a row where the plan has a tree; None: they are not.
        columns: that attention is planned for.
    """

    def __init__(self, runner: DeviceRunner, plan: Plan, round_: SlotRound) -> None:
        self.runner = runner
        self.plan = plan
        self.round = round_
        self.without_tree = why_no_tree(plan, runner, round_.drafter)
        self.columns = MIN_COLUMNS
        self._launched = 0
        self._limits: tuple[int, ...] = ()

    def tree(self, rows: int) -> TreeShape | None:
        """Return the tree of each row in rounds on `rows` slots; None: drafts are in a row."""
        return None if self.without_tree is not None else shape_for(self.plan, self.round.choice, rows)

    def lengths(self, rows: int) -> list[int]:
        """Return the numbers of drafts that rounds on `rows` slots have, of trees the levels. Rows may be limited to
        fewer of them."""
        if (shape := self.tree(rows)) is not None:
            return [0, shape.levels]
        most = self.plan.most_drafts
        return lengths_on(rows, most) if self.plan.exact else sorted({0, most})

    def length_for(self, wanted: int, rows: int) -> int:
        """Return the number of drafts of the shortest round that has so many, or else of the longest."""
        lengths = self.lengths(rows)
        return next((length for length in lengths if length >= wanted), lengths[-1])

    def plan_columns(self, longest: int) -> None:
        """Plan attention for a text of `longest` tokens."""
        self.columns = max(self.columns, levels(longest)[-1])

    def plan_first(self, slots: Slots) -> RoundPlan:
        """Plan the choice of the first new tokens."""
        return RoundPlan(0, self.tree(slots.rows), self.columns, self.round.choice.features)

    def plan_round(self, slots: Slots, running: Sequence[Row], places: Mapping[int, Row]) -> RoundPlan:
        """Plan a round: the shortest that has as many drafts as any of the running rows wants."""
        drafts = self.length_for(max(row.wanted or 0 for row in running), slots.rows)
        limits = [MOST_TOKENS] * slots.rows
        for place, row in places.items():
            if (row.wanted or 0) < drafts:
                limits[place] = row.wanted or 0
        return RoundPlan(drafts, self.tree(slots.rows), self.columns, self.round.choice.features, tuple(limits))

    def forget_limits(self) -> None:
        """Write them again next time: rows have other slots."""
        self._limits = ()

    def launch(self, slots: Slots, plan: RoundPlan) -> bool:
        """Launch a round; return True if that was as fast as it will be from now on."""
        round_, drafter, choice, drafts = self.round, self.round.drafter, self.round.choice, plan.drafts
        if plan.limits and plan.limits != self._limits:
            write(slots.control.limits, torch.tensor(plan.limits, dtype=torch.int32))
            self._limits = plan.limits
        round_.most = plan.columns
        shape = plan.tree if drafts else None
        vocabulary = Held(None if drafter is None else drafter.vocabulary)
        key = (shape or drafts, plan.columns, round_.exact, round_.threshold, plan.features, vocabulary)
        with device_errors():
            is_typical = drafter is None or drafter.prepare(drafts)
            if shape is not None and drafter is not None:
                tree = TreeRound(slots, shape, drafter, plan.columns, round_.accept)
                return self.runner.graphs.launch(slots, ("tree", *key), lambda: run_round(tree, drafts)) and is_typical
            if not choice.on_host:
                return self.runner.graphs.launch(slots, ("round", *key), lambda: run_round(round_, drafts)) and is_typical
            is_typical &= self.runner.graphs.launch(slots, ("passes", *key), lambda: run_passes(round_, drafts))
        choice.choose_on_host(drafts)
        with device_errors():
            return self.runner.graphs.launch(slots, ("accept", *key), lambda: round_.accept(drafts)) and is_typical

    def launch_first(self, slots: Slots) -> bool:
        """Launch the choice of the first new tokens of all rows; return True if that was as fast as it will be from now on."""
        with device_errors():
            return self.runner.graphs.launch(slots, ("first", self.round.choice.features), self.round.choose_first)

    def read_later(self, slots: Slots, rows: list[Row], plan: RoundPlan, is_prefill: bool, is_typical: bool) -> Launched:
        """Copy the result to the host; whoever asks for it waits for the copy."""
        copy, event = slots.result.copies[self._launched % len(slots.result.copies)], None
        copy.copy_(slots.result.latest, non_blocking=True)
        if slots.result.latest.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._launched += 1
        drafts, shape = plan.drafts, plan.tree
        places, made = [row.slot for row in rows], [min(drafts, row.wanted or 0) for row in rows]

        def results() -> list[tuple[Row, RoundResult]]:
            if event is not None:
                with device_errors():
                    event.synchronize()
            fields, found = copy[:, : (SCORES if drafts else TOKENS + 1) + drafts].tolist(), []
            for row, place, count in zip(rows, places, made, strict=True):
                if not row.finished:
                    row.stats.catch_ups += bool(drafts)
                    if (result := self._result(row, fields[place], count, shape is not None)) is not None:
                        found.append((row, result))
            return found

        return Launched(results, drafts, is_prefill, is_typical, slots.rows, shape, event)

    def _result(self, row: Row, fields: list[float], made: int, is_tree: bool) -> RoundResult | None:
        """Return the outcome of a round for a row; None: it failed."""
        accepted, drafted = int(fields[ACCEPTED]), int(fields[DRAFTED])
        if accepted < 0:
            row.fail(ValueError(host.NOTHING_LEFT) if accepted == NOTHING_LEFT else FloatingPointError(host.NAN))
            return None
        full = Draft(int(fields[TOKENS + accepted]), self.runner.num_layers)
        if not drafted:
            return RoundResult((full,), made=made)
        scores, depth = fields[SCORES : SCORES + drafted], self.round.depth
        drafts = [Draft(int(fields[TOKENS + i]), depth, None if is_tree else scores[i]) for i in range(accepted)]
        if is_tree:  # in place of scores there are the drafts at each depth
            by_depth = [int(count) for count in scores if count]
            return RoundResult([*drafts, full], len(by_depth), accepted, made=made, levels=by_depth)
        return RoundResult([*drafts, full], drafted, accepted, scores=scores, made=made)
