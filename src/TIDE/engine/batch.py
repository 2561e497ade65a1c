"""A batch: rows that are decoded together, whenever they come and however different they are.

    add         from any thread; rows wait for the next step
    step        every group of rows gets a round: rows by one plan, in whole rounds on the device if their runner can do that,
                otherwise on the host
    remove      from any thread

On a GPU kernels are compiled when they are first used, which takes seconds. So the first prompts of an engine run before they
are, their first tokens are shown, and then the runner is checked. If the device refuses, its rows go on on the host; later ones
are decoded there too. If a step is broken off, rows go on from their texts as they are: nothing of them is lost.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from TIDE.engine.cache.prefix_store import Texts
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.stage import HostStage
from TIDE.engine.loop import Loop
from TIDE.engine.request.plan import Plan
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.device import DeviceError, DeviceRunner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.select import checked
from TIDE.engine.slots.drafter import why_not_planned
from TIDE.engine.slots.stage import SlotStage
from TIDE.engine.warm_up import compile_first
from TIDE.routing.policy import ExitPolicy

logger = logging.getLogger(__name__)


class Asked(NamedTuple):
    """A row and how it is decoded."""

    row: Row
    plan: Plan
    policy: ExitPolicy | None


class Group(NamedTuple):
    """Rows by one plan in one place."""

    loop: Loop
    stage: HostStage | SlotStage
    plan: Plan
    policy: ExitPolicy | None

    @property
    def is_on_device(self) -> bool:
        return self.stage.is_planned


class Step(NamedTuple):
    """What a step did."""

    rows: list[Row]  # that had not ended before it
    seconds: float


class Batch:
    """Rows that are decoded together.

    Args:
        device: where processors expect ids and scores.
        replace_runner: called with the runner that takes the place of one that was checked and found wanting.
        texts: that rows on the host may begin with.
        most_rows: on the host at a time, if no more are added at once.

    Attributes:
        reason: why rows were decoded on the host; None: none was.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        device: torch.device,
        replace_runner: Callable[[Runner], None],
        texts: Texts,
        most_rows: int = 1,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.device = device
        self.replace_runner = replace_runner
        self.texts = texts
        self.most_rows = most_rows
        self.reason: str | None = None
        self._has_shown = False  # first tokens
        self._arrivals = itertools.count()
        self._added: deque[Asked] = deque()
        self._groups: list[Group] = []
        self._host_only: dict[Row, str] = {}  # rows that a device had no memory for
        self._open: dict[Row, int] = {}  # rows that have not ended, and how many tokens of them were reported
        self._unreported: list[Row] = []  # rows that changed in steps that were broken off after they had ended their rounds
        self._lock = threading.Lock()  # of `_added` and `_open`
        self._stepping = threading.Lock()
        self._is_closed = False

    @property
    def rows(self) -> list[Row]:
        """Rows that have not ended."""
        with self._lock:
            return [row for row in self._open if not row.finished]

    @property
    def is_waiting(self) -> bool:
        """True if no row has room: others have all K/V."""
        return any(group.loop.waiting for group in self._groups) and not any(group.stage.rows for group in self._groups)

    def add(self, rows: Sequence[Row], plan: Plan, policy: ExitPolicy | None) -> None:
        """Decode rows from the next step on."""
        with self._lock:
            for row in rows:
                row.arrival = next(self._arrivals)
            self._added += [Asked(row, plan, policy) for row in rows]
            self._open |= {row: len(row.tokens) for row in rows}

    def step(self, changed: list[Row] | None = None) -> Step:
        """Give every row a round.

        Args:
            changed: gets the rows that got tokens or ended, also in steps before that were broken off.
        """
        try:
            with self._stepping:
                rows, began = self.rows, time.perf_counter()
                if not self.runner.is_checked and self._has_shown:
                    self._check()
                self._take_in()
                for group in list(self._groups):
                    if group.is_on_device:
                        self._let_older_rows_pass(group)
                    self._step(group)
                self._report([] if changed is None else changed)
                return Step(rows, time.perf_counter() - began)
        finally:
            if self._is_closed:  # meanwhile
                self.close()

    def _let_older_rows_pass(self, group: Group) -> None:
        """Keep rows from K/V that an older one waits for in another group; if all do, their slots are given back too."""
        others = (other.loop for other in self._groups if other is not group and other.stage.is_short)
        group.loop.last_arrival = min((loop.waiting[0].arrival for loop in others if loop.waiting), default=math.inf)
        if group.loop.last_arrival < math.inf and not group.stage.rows:
            group.stage.close()

    def _report(self, changed: list[Row]) -> None:
        with self._lock:
            new = [row for row, size in self._open.items() if row.finished or len(row.tokens) > size]
            changed += [row for row in dict.fromkeys((*self._unreported, *new)) if not row.removed]
            self._unreported = []
            self._open = {row: len(row.tokens) for row in self._open if not row.finished}
            self._host_only = {row: why for row, why in self._host_only.items() if row in self._open}

    def report_again(self, rows: Sequence[Row]) -> None:
        """Report rows in the next step too: nobody has heard of them, for the step that reported them was broken off."""
        with self._lock:
            self._unreported += rows

    def close(self) -> None:
        """Give everything back that rows have, or let the step that is running do so. What the host keeps of their texts is for
        others that begin alike."""
        self._is_closed = True
        if self._stepping.acquire(blocking=False):
            try:
                for group in self._groups:
                    group.stage.close()
                self._groups = []
            finally:
                self._stepping.release()

    # ---- where rows are decoded ----------------------------------------------------------------------------------------------

    def why_not(self, asked: Asked, together: int = 1) -> str | None:
        """Return why a row cannot be decoded in whole rounds, `together` rows in all; None: it can."""
        row, plan, policy = asked
        found = self._host_only.get(row) or self.runner.why_not(row) or why_not_planned(plan, policy)
        if found is None and not plan.exact and len(plan.spans) > 1:
            found = _why_not_final(row, policy)
        if found is None and isinstance(self.runner, DeviceRunner) and together > self.runner.most_rows == 1:
            return "its modules run whole rounds for one row at a time"
        if found is None and plan.settles_at is not None and not getattr(self.runner, "has_compiled_layers", False):
            return "exits in the prompt gather tokens, which its modules do pass by pass"
        return found

    def _take_in(self) -> None:
        """Put rows that were added where they are decoded."""
        with self._lock:
            waiting = len(self._added)
        together = waiting + sum(len(group.loop.rows) for group in self._groups)
        for _ in range(waiting):
            asked = self._added[0]  # stays where it is until it is in a group, whatever happens
            asked.row.resume()
            if not asked.row.finished:
                self._take(asked, together)
            with self._lock:
                self._added.popleft()

    def _take(self, asked: Asked, together: int) -> None:
        if asked.row.budget is None and not asked.row.scores:
            self.scheduler.admit(asked.row, asked.plan)
        asked.row.stats.cold_starts |= not self.runner.is_checked
        reason = self.why_not(asked, together) if self.runner.is_checked else "the runner is not checked yet"
        self.reason = reason if self.runner.is_checked else None
        self._group(asked, on_device=reason is None, rows=together).loop.add([asked.row])

    def _group(self, asked: Asked, on_device: bool, rows: int) -> Group:
        """Return the rows that a row is decoded with."""
        for group in self._groups:
            if group.is_on_device == on_device and group.policy is asked.policy and group.plan == asked.plan:
                return group
        sampler = Sampler(device=self.device)
        stage: HostStage | SlotStage
        if on_device:
            assert isinstance(self.runner, DeviceRunner)
            stage = SlotStage(self.runner, asked.plan, asked.policy, sampler)
            self._warn_without_tree(asked.plan, stage.launcher.without_tree)
        else:
            self._warn_without_tree(asked.plan, self.reason and f"rounds are on the host: {self.reason}")
            costs, most = self.scheduler.costs, max(rows, self.most_rows)
            stage = HostStage(self.runner, asked.plan, asked.policy, sampler, costs, most, self.texts)
        group = Group(Loop(stage, asked.plan, self.scheduler, overlap=on_device), stage, asked.plan, asked.policy)
        self._groups.append(group)
        return group

    def _warn_without_tree(self, plan: Plan, reason: str | None) -> None:
        if plan.has_asked_for_tree and reason is not None:
            _warn_once(reason)

    # ---- a step --------------------------------------------------------------------------------------------------------------

    def _step(self, group: Group) -> None:
        rows = group.loop.rows
        try:
            group.loop.step()
        except torch.OutOfMemoryError as problem:
            if not group.is_on_device:
                self._again(group)
                raise
            reason = f"there is no memory for {len(rows)} rows"
            logger.warning("these rows are not decoded in rounds: %s. Ask for fewer new tokens or rows.", reason)
            self._host_only |= dict.fromkeys(rows, f"{reason}: {problem}")
            self._again(group)
        except DeviceError as problem:
            assert isinstance(self.runner, DeviceRunner)
            self.runner.failed = str(problem)
            logger.warning("%s is not decoded in rounds: %s", type(self.runner.adapter.model).__name__, problem)
            self._again(group)
        except BaseException:
            self._again(group)
            raise
        else:
            self._has_shown = True
            if not group.loop.rows:
                self._let_go(group)

    def _again(self, group: Group) -> None:
        """Let the rows of a group start over from their texts."""
        rows = group.loop.rows
        self._groups.remove(group)
        if isinstance(group.stage, SlotStage):
            group.stage.forget()
        for row in rows:
            row.drafts = []
            row.exits_in_a_row = 0
        with self._lock:
            self._added.extendleft(Asked(row, group.plan, group.policy) for row in reversed(rows))

    def _let_go(self, group: Group) -> None:
        """Give up a group without rows."""
        self._groups.remove(group)
        group.stage.close()

    def _check(self) -> None:
        """Check the runner, now that first tokens were shown; rows then go on where they are decoded best."""
        if started := next((group for group in self._groups if group.loop.rows), None):
            compile_first(self.runner, started.plan, started.policy, started.loop.rows)
        self.runner = checked(self.runner)
        self.replace_runner(self.runner)
        for group in list(self._groups):
            rows, together = group.loop.rows, len(self.rows)
            if any(self.why_not(Asked(row, group.plan, group.policy), together) is None for row in rows):
                self._again(group)
            elif rows and isinstance(group.stage, HostStage):
                self.reason = self.why_not(Asked(rows[0], group.plan, group.policy), together)
                group.stage.change_runner(self.runner)


def _why_not_final(row: Row, policy: ExitPolicy | None) -> str | None:
    """Return why exits cannot have the last word in whole rounds, as they do in mode fast."""
    own = row.sampling
    if own.custom:
        return f"in mode fast what leaves early has to pass {', '.join(sorted(own.custom))} on the host"
    features = own.params.features
    if policy is not None and policy.vocabulary is not None and (features.bias or features.rules):
        return "in mode fast its draft vocabulary may have none of the tokens that are allowed"
    return None


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("draft_tree is set, but drafts are not in trees: %s. The text is the same.", reason)
