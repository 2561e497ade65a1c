"""Warm-up: everything that a device compiles or captures, before the first request instead of in it.

    prompts     passes of 16, 32, … 256 tokens; longer ones are never captured: all are compiled, and the longest runs
    rounds      on slots for 1, 2, 4, … rows, with each number of drafts that the scheduler may choose

All of it runs on slots that no row has, so what it writes belongs to nobody. Kernels are compiled first, many at a time.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from TIDE.engine.cache.prefill_buffers import CAPTURED, CHUNK, STEP
from TIDE.engine.cache.slots import slots_for
from TIDE.engine.check import first_compiled_difference
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.request.plan import Plan
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.device import DeviceError, DeviceRunner, device_errors
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.select import checked
from TIDE.engine.slots.drafter import why_not_planned
from TIDE.engine.slots.launcher import RoundPlan, levels
from TIDE.engine.slots.module_prefill import LONGEST, ModulePrefill, padded_length
from TIDE.engine.slots.sampler import features_of
from TIDE.engine.slots.stage import SlotStage
from TIDE.kernels.reference.sampling import Features
from TIDE.kernels.triton.tiles import PART
from TIDE.routing.policy import ExitPolicy

logger = logging.getLogger(__name__)
Works = Callable[[SlotStage], Iterable[Callable[[], object]]]

TIMES = 2  # a graph is captured the second time its work is asked for
# passes that are not captured; kernels have tiles by their tokens, in such steps
LONG = range(CAPTURED + PART, CHUNK + 1, PART)
CHOICES = (None, Features(filters=True))  # greedy rows, and rows that sample among the likeliest tokens


class EmptyRounds:
    """Rounds without any row, which compile and capture what requests will need."""

    def __init__(self, stage: SlotStage) -> None:
        self.stage = stage

    def run(self, rows: int, tokens: int, columns: int, drafts: int, features: Features | None) -> None:
        """Run a round on `rows` empty slots, planned for texts of `tokens` tokens.

        Args:
            columns: that attention is planned for: one of `levels`.
        """
        self._serve_nobody(rows, tokens, features)
        stage, slots = self.stage, self.stage.residents.slots
        if stage.drafter is not None:
            stage.drafter.waiting = 1
            stage.drafter.catch_up()
        stage.launcher.launch(slots, RoundPlan(drafts, stage.launcher.tree(slots.rows), columns, stage.choice.features))

    def choose(self, rows: int, tokens: int, features: Features | None) -> None:
        """Choose first tokens on such slots."""
        self._serve_nobody(rows, tokens, features)
        self.stage.launcher.launch_first(self.stage.residents.slots)

    def _serve_nobody(self, rows: int, tokens: int, features: Features | None) -> None:
        self.stage.residents.allocator.make_room_for(rows, tokens)
        self.stage.choice.serve(self.stage.residents.slots, {}, features)


def warm_up(engine: Any, rows: int, tokens: int, shows: bool) -> None:
    """Run everything that rounds of up to `rows` rows need, for texts of up to `tokens` tokens, until it is captured.

    Where there are no whole rounds, a short text is written instead: that compiles what can be compiled.
    """
    for name, value in dict(rows=rows, tokens=tokens).items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, found {value!r}.")
    _compile(engine.runner, engine.plan, engine.policy, lambda stage: _works(stage, rows, tokens, True), shows)
    if not engine.runner.is_checked:
        engine.runner = checked(engine.runner)
    runner, plan, policy = engine.runner, engine.plan, engine.policy
    reason = why_not_planned(plan, policy) if isinstance(runner, DeviceRunner) else runner.words
    if reason is not None or runner.failed is not None:
        logger.info("there are no graphs to capture: %s", reason or runner.failed)
        engine.generate(torch.ones(1, 2, dtype=torch.long, device=engine.model.device), max_new_tokens=4, pad_token_id=0)
        return
    with _stage(runner, plan, policy) as stage:
        for work in tqdm(_works(stage, rows, tokens), desc="warming up", unit="graph", disable=not shows, leave=False):
            for _ in range(TIMES):
                with device_errors():
                    work()


def compile_first(runner: Runner, plan: Plan, policy: ExitPolicy | None, rows: Sequence[Row]) -> None:
    """Compile, many at a time, what the first rows need: the check of the runner, a prompt as long as theirs, their rounds."""
    tokens, features = max(row.size for row in rows), features_of(rows)

    def works(stage: SlotStage) -> list[Callable[[], object]]:
        width = slots_for(min(len(rows), stage.residents.most_rows))
        stage.residents.blocks.grow(width, tokens)
        stage.residents.allocator.make_room_for(1, tokens)
        columns, texts, rounds = levels(tokens)[-1], stage.prompts.passes(), EmptyRounds(stage)
        found = list[Callable[[], object]]()
        if not isinstance(texts, ModulePrefill):
            found.append(partial(texts.run_nothing, min(CHUNK, texts.prompts.padded(tokens)), columns))
        lengths = stage.launcher.lengths(width)
        found += [partial(rounds.run, width, tokens, columns, drafts, features) for drafts in lengths]
        return [*found, partial(rounds.choose, width, tokens, features)] if stage.prompts.may_choose_first else found

    _compile(runner, plan, policy, works, shows=False)


def _compile(runner: Runner, plan: Plan, policy: ExitPolicy | None, works: Works, shows: bool) -> None:
    """Compile, many at a time, the kernels that the check of a runner and its rounds need."""
    is_planned = why_not_planned(plan, policy) is None
    if not isinstance(runner, TritonRunner) or runner.device.type != "cuda" or runner.failed is not None:
        return
    was_checked, runner.is_checked = runner.is_checked, True  # as if
    checks: list[Callable[[], object]] = [partial(first_compiled_difference, runner), runner.take_short_cuts]
    try:
        with _stage(runner, plan, policy) as stage, runner.graphs.compiled_ahead(shows):
            for work in [*(() if was_checked else [*checks, runner.assume_short_cuts]), *(works(stage) if is_planned else ())]:
                with device_errors():
                    work()
    finally:
        runner.is_checked = was_checked
        if not was_checked:
            runner.leave_short_cuts()


@contextmanager
def _stage(runner: DeviceRunner, plan: Plan, policy: ExitPolicy | None) -> Iterator[SlotStage]:
    """Open a stage on slots that nobody has. What a device refuses there ends the warm-up, and nothing else."""
    stage = SlotStage(runner, plan, policy, Sampler(device=runner.device))
    try:
        with runner.grad_off(), runner.device_guard():
            yield stage
    except BaseException as problem:
        stage.forget()
        if not isinstance(problem, DeviceError | torch.OutOfMemoryError):
            raise
        logger.warning("the warm-up ended early, and requests will tell whether they can do without: %s", problem)
    else:
        stage.close()


def _works(stage: SlotStage, rows: int, tokens: int, compiles: bool = False) -> list[Callable[[], object]]:
    """Return everything that up to `rows` rows of up to `tokens` tokens need captured, or only compiled."""
    rows = min(rows, stage.residents.most_rows)
    stage.residents.blocks.grow(rows, tokens)
    return [*_prompts(stage, tokens, compiles), *_rounds(stage, rows, tokens)]


def _prompts(stage: SlotStage, tokens: int, compiles: bool) -> list[Callable[[], object]]:
    """Return the passes of prompts."""
    stage.residents.allocator.make_room_for(1, tokens)
    texts = stage.prompts.passes()
    if isinstance(texts, ModulePrefill):
        lengths = sorted({padded_length(count) for count in range(1, min(tokens, LONGEST) + 1)})
        return [partial(texts.run_nothing, count) for count in lengths]
    longest = texts.prompts.padded(tokens)
    short, long = range(STEP, min(CAPTURED, longest) + 1, STEP), [count for count in LONG if count < longest + PART]
    counts = [*short, *(long if compiles else long[-1:])]
    return [partial(texts.run_nothing, count, columns) for columns in levels(tokens) for count in counts]


def _rounds(stage: SlotStage, rows: int, tokens: int) -> list[Callable[[], object]]:
    """Return the rounds on slots for 1, 2, 4, … rows."""
    works, rounds = list[Callable[[], object]](), EmptyRounds(stage)
    for width in [1 << power for power in range(slots_for(rows).bit_length())]:
        for columns, drafts, choice in itertools.product(levels(tokens), stage.launcher.lengths(width), CHOICES):
            works.append(partial(rounds.run, width, tokens, columns, drafts, choice))
        works += [partial(rounds.choose, width, tokens, choice) for choice in CHOICES if stage.prompts.may_choose_first]
    return works
