"""Decoding a request: in whole rounds on the device if its runner can do that for its rows, on the host otherwise.

On a GPU kernels are compiled when they are first used, which takes seconds. So the first prompt of an engine runs before they
are, its first token is shown, and then the runner is checked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import torch

from TIDE.engine.loop import Loop
from TIDE.engine.plan import Plan
from TIDE.engine.request import Request
from TIDE.engine.round.device_drafter import why_not_planned
from TIDE.engine.round.device_stage import DeviceStage
from TIDE.engine.round.host_stage import HostStage
from TIDE.engine.round.sampler import Sampler
from TIDE.engine.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.device import DeviceError, DeviceRunner
from TIDE.engine.runners.select import checked
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.routing.policy import ExitPolicy

logger = logging.getLogger(__name__)


class Decoding:
    """The rows of one request.

    Args:
        replace_runner: called with the runner that takes the place of one that was checked and found wanting.

    Attributes:
        host: the stage on the host, if there is one.
        reason: why the rows are decoded on the host; None: they are not.
    """

    def __init__(
        self,
        runner: Runner,
        plan: Plan,
        policy: ExitPolicy | None,
        request: Request,
        rows: Sequence[Row],
        scheduler: Scheduler,
        replace_runner: Callable[[Runner], None],
    ) -> None:
        self.runner = runner
        self.plan = plan
        self.policy = policy
        self.request = request
        self.rows = rows
        self.scheduler = scheduler
        self.replace_runner = replace_runner
        self.sampler = Sampler(rows, request.ids.device)
        self.host: HostStage | None = None
        self.reason: str | None = None
        self._before: HostStage | None = None  # of a request whose text begins alike

    def reuse_prefix(self, other: Decoding) -> None:
        """Take over what another request has run of a text that begins alike; it cannot go on itself then."""
        self._before = other.host

    def run(self) -> Iterator[None]:
        """Decode until every row has ended, or one has failed."""
        for row in self.rows:
            self.scheduler.admit(row, self.plan)
        if not self.runner.is_checked:
            yield from self._first_tokens()
        self.reason = self.why_not()
        if self.reason is None:
            self.host = None  # what it has of the prompts is run again, compiled
            yield from self._on_device()
        if any(not row.finished for row in self.rows):
            yield from self._on_host()

    def why_not(self) -> str | None:
        """Return why the rows cannot be decoded in whole rounds; None: they can."""
        reasons = [self.runner.why_not(row) for row in self.rows]
        found = next((reason for reason in reasons if reason is not None), None) or why_not_planned(self.plan, self.policy)
        found = found or self._why_not_final()
        if found is None and len(self.rows) > 1 and isinstance(self.runner, DeviceRunner) and self.runner.most_rows == 1:
            return "its modules run whole rounds for one row at a time"
        return found

    def _why_not_final(self) -> str | None:
        """Return why exits cannot have the last word in whole rounds, as they do in mode fast."""
        if self.plan.exact or len(self.plan.spans) == 1:
            return None
        samplings = [row.sampling for row in self.rows]
        if custom := sorted({name for own in samplings for name in own.custom}):
            return f"in mode fast what leaves early has to pass {', '.join(custom)} on the host"
        features = [own.params.features for own in samplings]
        if getattr(self.policy, "vocabulary", None) is not None and any(own.bias or own.rules for own in features):
            return "in mode fast its draft vocabulary may have none of the tokens that are allowed"
        return None

    def _first_tokens(self) -> Iterator[None]:
        """Run the prompts through the model's modules, show the first tokens, and check the runner."""
        yield from self._steps(self._host_loop(), once=True)
        self.runner = checked(self.runner)
        self.replace_runner(self.runner)
        assert self.host is not None
        self.host.change_runner(self.runner)

    def _on_host(self) -> Iterator[None]:
        yield from self._steps(self._host_loop())

    def _host_loop(self) -> Loop:
        """Return the loop on the host, which goes on with the stage of the first tokens if there was one."""
        if self.host is None:
            self.host = HostStage(self.runner, self.plan, self.policy, self.sampler, self.scheduler.costs, len(self.rows))
            self.host.join([row for row in self.rows if not row.finished])
            if self._before is not None:
                self.host.reuse_prefix(self._before)
        return Loop(self.host, self.plan, self.scheduler)

    def _steps(self, loop: Loop, once: bool = False) -> Iterator[None]:
        """Decode until every row has ended, or for one step; the error of a row that failed is the request's."""
        while loop.rows:
            loop.step()
            for row in self.rows:
                if row.error is not None:
                    raise row.error
            yield
            if once:
                return

    def _on_device(self) -> Iterator[None]:
        """Decode in rounds. If the device refuses, rows are left as they are; later requests are decoded on the host too."""
        runner = self.runner
        assert isinstance(runner, DeviceRunner)
        try:
            stage = DeviceStage(runner, self.plan, self.policy, self.sampler)
            try:
                # in mode "fast" how many tokens may exit depends on how many did, so a round is read before the next begins
                overlap = self.plan.exact and not any(row.sampling.custom for row in self.rows)
                loop = Loop(stage, self.plan, self.scheduler, overlap)
                loop.add([row for row in self.rows if not row.finished])
                yield from self._steps(loop)
            finally:
                stage.close()
        except torch.OutOfMemoryError:
            self.reason = f"there is no memory for {len(self.rows)} rows"
            logger.warning("these rows are not decoded in rounds: %s. Ask for fewer new tokens or rows.", self.reason)
        except DeviceError as problem:
            runner.failed = str(problem)
            logger.warning("%s is not decoded in rounds: %s", type(runner.adapter.model).__name__, runner.failed)
            self.reason = runner.failed
