"""Warm-up: everything that a device compiles or captures, before the first request instead of in it.

    prompts     passes of 16, 32, … 256 tokens; longer ones are launched as they are
    rounds      on slots for 1, 2, 4, … rows, with each number of drafts that the scheduler may choose

All of it runs on slots that no row has, so what it writes belongs to nobody.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from TIDE.engine.cache.prompts import CAPTURED, STEP
from TIDE.engine.cache.slots import slots_for
from TIDE.engine.round.device_drafter import why_not_planned
from TIDE.engine.round.device_stage import DeviceStage
from TIDE.engine.round.module_prefill import LONGEST, ModulePrefill, padded_length
from TIDE.engine.round.sampler import Sampler
from TIDE.engine.runners.device import DeviceError, DeviceRunner, device_errors
from TIDE.engine.runners.select import checked
from TIDE.kernels.sampling import Features

logger = logging.getLogger(__name__)

TIMES = 2  # a graph is captured the second time its work is asked for
CHOICES = (None, Features(filters=True))  # greedy rows, and rows that sample among the likeliest tokens


def warm_up(engine: Any, rows: int, tokens: int, shows: bool) -> None:
    """Run everything that rounds of up to so many rows need, for texts of up to so many tokens, until it is captured.

    Where there are no whole rounds, a short text is written instead: that compiles what can be compiled.
    """
    for name, value in dict(rows=rows, tokens=tokens).items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1 on, found {value!r}.")
    if not engine.runner.is_checked:
        engine._use(checked(engine.runner))
    runner, plan, policy = engine.runner, engine.plan, engine.policy
    reason = why_not_planned(plan, policy) if isinstance(runner, DeviceRunner) else runner.words
    if reason is not None or runner.failed is not None:
        logger.info("there are no graphs to capture: %s", reason or runner.failed)
        engine.generate(torch.ones(1, 2, dtype=torch.long, device=engine.model.device), max_new_tokens=4, pad_token_id=0)
        return
    stage = DeviceStage(runner, plan, policy, Sampler(device=runner.device))
    try:
        with runner.grad_off(), runner.device_guard():
            rows = min(rows, runner.most_rows)
            stage.seats.grow(rows, tokens)
            works = [*_prompts(stage, tokens), *_rounds(stage, rows, tokens)]
            for work in tqdm(works, desc="warming up", unit="graph", disable=not shows, leave=False):
                for _ in range(TIMES):
                    with device_errors():
                        work()
    except BaseException as problem:
        stage.forget()
        if not isinstance(problem, DeviceError | torch.OutOfMemoryError):
            raise
        logger.warning("the warm-up ended early, and requests will tell whether they can do without: %s", problem)
    else:
        stage.close()


def _prompts(stage: DeviceStage, tokens: int) -> list[Callable[[], object]]:
    """Return the passes of prompts."""
    stage.seats.make_room(1, tokens)
    texts = stage.texts()
    if isinstance(texts, ModulePrefill):
        lengths = sorted({padded_length(count) for count in range(1, min(tokens, LONGEST) + 1)})
        return [partial(texts.run_nothing, count) for count in lengths]
    counts = range(STEP, min(CAPTURED, texts.prompts.padded(tokens)) + 1, STEP)
    return [partial(texts.run_nothing, count, columns) for columns in stage.levels(tokens) for count in counts]


def _rounds(stage: DeviceStage, rows: int, tokens: int) -> list[Callable[[], object]]:
    """Return the rounds on slots for 1, 2, 4, … rows."""
    works = list[Callable[[], object]]()
    for width in [1 << power for power in range(slots_for(rows).bit_length())]:
        for columns, drafts, choice in itertools.product(stage.levels(tokens), stage.lengths(width), CHOICES):
            works.append(partial(stage.run_nothing, width, tokens, columns, drafts, choice))
        works += [partial(stage.choose_nothing, width, tokens, choice) for choice in CHOICES if stage.may_choose_first]
    return works
