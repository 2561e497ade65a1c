"""A batch: rows that are decoded together, whenever they come and however different they are.

    add         from any thread; rows wait for the next step
    step        every group of rows gets a round: rows by one plan, in whole rounds on the device if their runner can do that,
                otherwise on the host
    remove      from any thread

On a GPU kernels are compiled and checked before the first rows of an engine, which takes seconds: see `engine.warm_up`. If the
device refuses later, its rows go on on the host, and later ones are decoded there too. If a step is broken off, rows go on from
their texts as they are: nothing of them is lost.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from TIDE.engine.cache.prefix_store import Texts
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.host.stage import HostStage
from TIDE.engine.loop import Loop
from TIDE.engine.request.plan import Plan
from TIDE.engine.request.request import Request
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

PATIENCE = 5.0  # seconds for which a request waits for K/V of rows that nobody decodes


class Engine(Protocol):
    """The parts of an engine that its requests share.

    Attributes:
        texts: that rows on the host may begin with.
        warned: reasons that were logged, once each.
    """

    runner: Runner
    scheduler: Scheduler
    texts: Texts
    warned: set[str]


class Submission(NamedTuple):
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


class OpenRows:
    """Rows that have not ended, and how many tokens of them were reported. Any thread may use it."""

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._reported: dict[Row, int] = {}
        self._unreported: list[Row] = []  # changed in steps that were broken off after their rounds
        self._lock = threading.Lock()

    def add(self, rows: Sequence[Row]) -> None:
        with self._lock:
            for row in rows:
                row.arrival = next(self._arrivals)
            self._reported |= {row: len(row.tokens) for row in rows}

    @property
    def rows(self) -> list[Row]:
        with self._lock:
            return [row for row in self._reported if not row.finished]

    def report(self, changed: list[Row]) -> None:
        """Add the rows that got tokens or ended since the last report."""
        with self._lock:
            new = [row for row, size in self._reported.items() if row.finished or len(row.tokens) > size]
            changed += [row for row in dict.fromkeys((*self._unreported, *new)) if not row.removed]
            self._unreported = []
            self._reported = {row: len(row.tokens) for row in self._reported if not row.finished}

    def report_again(self, rows: Sequence[Row]) -> None:
        """Report rows in the next step too: the step that reported them was broken off."""
        with self._lock:
            self._unreported += rows


class Batch:
    """Rows that are decoded together.

    Args:
        device: where processors expect ids and scores.
        most_rows: on the host at a time, if no more are added at once.
    """

    def __init__(self, engine: Engine, device: torch.device, most_rows: int = 1) -> None:
        self.engine = engine
        self.runner = engine.runner
        self.device = device
        self.most_rows = most_rows
        self.open = OpenRows()
        self._added: deque[Submission] = deque()
        self._groups: list[Group] = []
        self._host_only: weakref.WeakKeyDictionary[Row, str] = weakref.WeakKeyDictionary()  # the device had no memory for them
        self._stepping = threading.Lock()
        self._is_closed = False

    @property
    def rows(self) -> list[Row]:
        """Rows that have not ended."""
        return self.open.rows

    @property
    def is_waiting(self) -> bool:
        """True if no row has room: others have all K/V."""
        return any(group.loop.waiting for group in self._groups) and not any(group.stage.rows for group in self._groups)

    def add(self, rows: Sequence[Row], plan: Plan, policy: ExitPolicy | None) -> None:
        """Decode rows from the next step on."""
        self.open.add(rows)
        self._added += [Submission(row, plan, policy) for row in rows]

    def step(self, changed: list[Row] | None = None) -> Step:
        """Give every row a round.

        Args:
            changed: gets the rows that got tokens or ended, also in steps before that were broken off.
        """
        try:
            with self._stepping:
                rows, began = self.rows, time.perf_counter()
                if not self.runner.is_checked and self._added:
                    self._check()
                self._take_in()
                for group in list(self._groups):
                    if group.is_on_device:
                        self._let_older_rows_pass(group)
                    self._step(group)
                self.open.report([] if changed is None else changed)
                return Step(rows, time.perf_counter() - began)
        finally:
            if self._is_closed:  # meanwhile
                self.close()

    def _let_older_rows_pass(self, group: Group) -> None:
        """Admit no rows younger than the oldest row that waits for K/V in another group; give an idle group's slots back."""
        others = (other.loop for other in self._groups if other is not group and other.stage.is_short)
        group.loop.last_arrival = min((loop.waiting[0].arrival for loop in others if loop.waiting), default=math.inf)
        if group.loop.last_arrival < math.inf and not group.stage.rows:
            group.stage.close()

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

    def _check(self) -> None:
        """Compile what the first rows need, and check the runner: nothing runs twice."""
        _, plan, policy = self._added[0]
        added = list(self._added)  # in one go: other threads may add more
        rows = [submission.row for submission in added if submission.plan == plan and submission.policy is policy]
        for row in rows:
            row.stats.cold_starts = 1
        compile_first(self.runner, plan, policy, rows)
        self.runner = self.engine.runner = checked(self.runner)

    def why_not(self, submission: Submission, together: int = 1) -> str | None:
        """Return why a row cannot be decoded in whole rounds, `together` rows in all; None: it can."""
        row, plan, policy = submission
        reason = self._host_only.get(row) or self.runner.why_not(row) or why_not_planned(plan, policy)
        if reason is None and not plan.exact and len(plan.spans) > 1:
            reason = _why_not_final(row, policy)
        if reason is None and isinstance(self.runner, DeviceRunner) and together > self.runner.most_rows == 1:
            return "its modules run whole rounds for one row at a time"
        if reason is None and plan.prompt_pass is not None:
            return plan.prompt_pass.why_not_on_slots(self.runner)
        return reason

    def _take_in(self) -> None:
        """Put rows that were added where they are decoded."""
        waiting = len(self._added)
        together = waiting + sum(len(group.loop.rows) for group in self._groups)
        for _ in range(waiting):
            submission = self._added[0]  # stays there until it is in a group, whatever happens
            submission.row.resume()
            if not submission.row.finished:
                self._take(submission, together)
            self._added.popleft()

    def _take(self, submission: Submission, together: int) -> None:
        self._group(submission, self.why_not(submission, together), together).loop.add([submission.row])

    def _group(self, submission: Submission, reason: str | None, rows: int) -> Group:
        """Return the rows that a row is decoded with.

        Args:
            reason: why it is decoded on the host; None: it is not.
        """
        _, plan, policy = submission
        on_device = reason is None
        for group in self._groups:
            if group.is_on_device == on_device and group.policy is policy and group.plan == plan:
                return group
        sampler, planner = Sampler(device=self.device), self.engine.scheduler.planner(plan)
        stage: HostStage | SlotStage
        if on_device:
            assert isinstance(self.runner, DeviceRunner)
            stage = SlotStage(self.runner, plan, policy, sampler)
            without_tree = stage.launcher.without_tree
        else:
            stage = HostStage(self.runner, plan, policy, sampler, planner, max(rows, self.most_rows), self.engine.texts)
            without_tree = f"rounds are on the host: {reason}"
        if plan.has_asked_for_tree and without_tree is not None and without_tree not in self.engine.warned:
            self.engine.warned.add(without_tree)
            logger.warning("draft_tree is set, but drafts are not in trees: %s. The text is the same.", without_tree)
        self._groups.append(Group(Loop(stage, plan, planner, overlap=on_device), stage, plan, policy))
        return self._groups[-1]

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
            if not group.loop.rows:
                self._groups.remove(group)
                group.stage.close()

    def _again(self, group: Group) -> None:
        """Let the rows of a group start over from their texts."""
        rows = group.loop.rows
        self._groups.remove(group)
        if isinstance(group.stage, SlotStage):
            group.stage.forget()
        for row in rows:
            row.drafts = []
            row.exits_in_a_row = 0
        self._added.extendleft(Submission(row, group.plan, group.policy) for row in reversed(rows))


class Decoding:
    """The rows of one request, in a batch of their own, until all have ended."""

    def __init__(self, engine: Engine, plan: Plan, policy: ExitPolicy | None, request: Request, rows: list[Row]) -> None:
        self.plan = plan
        self.policy = policy
        self.request = request
        self.rows = rows
        self.batch = Batch(engine, request.ids.device)
        self._waiting: tuple[int, float] | None = None  # work that was launched when it began to wait, and the time

    def run(self) -> Iterator[None]:
        """Decode until every row has ended, or one has failed: its error is the request's."""
        self.batch.add(self.rows, self.plan, self.policy)
        try:
            while any(not row.finished for row in self.rows):
                self.batch.step()
                for row in self.rows:
                    if row.error is not None:
                        raise row.error
                self._wait_for_others()
                yield
        finally:
            self.batch.close()
        if cut := [row.index for row in self.rows if row.cut_short]:
            longest = max(len(row.tokens) for row in self.rows)
            logger.warning("stopped at the model's context of %d tokens in rows %s.", longest, cut)

    def _wait_for_others(self) -> None:
        """Wait for K/V held by other requests; fail if none of them progresses: they may be this thread's own."""
        runner = self.batch.runner
        if not isinstance(runner, DeviceRunner) or not self.batch.is_waiting:
            self._waiting = None
            return
        if self._waiting is None or self._waiting[0] != runner.graphs.launched:
            self._waiting = runner.graphs.launched, time.monotonic()
        if time.monotonic() - self._waiting[1] > PATIENCE:
            raise RuntimeError(
                f"all K/V there are for rows belong to others, none of which was decoded for {PATIENCE:g} s. Finish or close "
                f"streams that are open, step or remove rows that were added, or give the cache more (cache_gib)."
            )
        time.sleep(0.001)

    def columns(self) -> Iterator[torch.Tensor]:
        """Decode, and yield the columns of new tokens, each as soon as it is final in every row."""
        shown = self.request.prompt_columns
        for _ in self.run():
            for column in range(shown, self.request.final_columns(self.rows)):
                yield self.request.column(self.rows, column)
            shown = max(shown, self.request.final_columns(self.rows))


def _why_not_final(row: Row, policy: ExitPolicy | None) -> str | None:
    """Return why exits cannot have the last word in whole rounds, as they do in mode fast."""
    own = row.sampling
    if own.custom:
        return f"in mode fast what leaves early has to pass {', '.join(sorted(own.custom))} on the host"
    features = own.params.features
    if policy is not None and policy.vocabulary is not None and (features.bias or features.rules):
        return "in mode fast its draft vocabulary may have none of the tokens that are allowed"
    return None
