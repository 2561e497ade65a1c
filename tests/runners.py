"""Runners as on a GPU, with the references in place of kernels, and schedulers that follow a script."""

from __future__ import annotations

from collections.abc import Sequence

import TIDE
from router_files import exits_of
from TIDE.engine.batch import Batch, Submission
from TIDE.engine.request.inputs import as_keywords
from TIDE.engine.runners.static_modules import StaticModuleRunner
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.schedule.draft_planner import DraftPlanner, most_drafts
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.select import described_layers
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import sampling


def on_references(engine, choice=sampling):
    """The engine with compiled layers and whole rounds; the references take the place of kernels.

    Args:
        choice: the module that chooses tokens.
    """
    layers = described_layers(engine.adapter)
    assert isinstance(layers, list), layers
    engine.runner = TritonRunner(engine.adapter, layers, reference, reference, choice)
    return engine


def on_modules(engine):
    """The engine with the model's modules on a static cache."""
    engine.runner = StaticModuleRunner(engine.adapter, reference, reference, sampling)
    return engine


def as_it_is(engine):
    """The engine with the runner it chose."""
    return engine


# as `test_promises.py` names them; `TIDE_BACKEND` chooses between the first two
RUNNERS = {"modules": as_it_is, "numba": as_it_is, "triton": on_references, "static modules": on_modules}


def why_on_the_host(engine, inputs, **options) -> str | None:
    """Why the engine would decode a request on the host; None: in whole rounds."""
    request = engine._prepare(as_keywords(inputs, options), None)
    batch, rows = Batch(engine, engine.adapter.device), request.rows(engine.adapter.num_layers, engine._context)
    reasons = (batch.why_not(Submission(row, engine.plan, engine.policy), len(rows)) for row in rows)
    return next((reason for reason in reasons if reason is not None), None)


class Recording(Scheduler):
    """Follows a script of draft lengths, then goes on with `then` or as ever; notes the lengths of planned rounds."""

    def __init__(self, script: Sequence[int] = (), then: int | None = None) -> None:
        super().__init__()
        self.script = list(script)
        self.then = then
        self.rounds: list[int] = []

    def planner(self, plan):
        return _Recorder(self, plan)


class _Recorder(DraftPlanner):
    def __init__(self, recording, plan):
        super().__init__(recording.experience, plan)
        self.recording = recording

    def drafts(self, row, is_planned):
        recording, wanted = self.recording, super().drafts(row, is_planned)
        if row.size > row.prompt and len(self.plan.spans) > 1:
            scripted = recording.script.pop(0) if recording.script else recording.then
            wanted = wanted if scripted is None else min(scripted, most_drafts(row, self.plan))
        if is_planned:
            recording.rounds.append(wanted)
        return wanted


def in_rounds(model, depth=None, place=on_references, script=(), then=None, strategy="memory", policy=None, **config):
    """An engine with rounds as on a GPU, and at a depth a random head; drafts by a script, if there is one."""
    if depth is not None:
        policy = exits_of(model, strategy, depth)
    engine = place(TIDE.TIDE(model, policy, TIDE.TIDEConfig(**config)))
    engine.scheduler = Recording(script, then)
    return engine
