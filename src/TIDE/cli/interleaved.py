"""Contenders timed interleaved: A, B, A, B in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Timing(NamedTuple):
    """The text and the speed of a contender."""

    ids: torch.Tensor  # prompt and answer
    speeds: list[float]  # tokens per second of each round, prompt included

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def interleaved(runs: dict[str, Callable[[], torch.Tensor]], prompt_tokens: int, rounds: int) -> dict[str, Timing]:
    """Run each contender once to warm up, then in timed rounds, reversing the order each time."""
    found = {name: Timing(run(), []) for name, run in runs.items()}
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            began = time.perf_counter()
            ids = runs[name]()
            seconds = time.perf_counter() - began
            found[name] = Timing(ids, [*found[name].speeds, (ids.shape[1] - prompt_tokens) / seconds])
    return found
