"""Contenders timed interleaved: A, B, A, B in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch
from TIDE.engine.cache.prefixes import new_salt


class Timing(NamedTuple):
    """The text and the speed of a contender."""

    ids: torch.Tensor  # prompt and answer
    speeds: list[float]  # tokens per second of each round, prompt included

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


def contenders(engine: Any, options: dict[str, Any]) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a request as run by `model.generate`, by the engine with exits off and, if it has exits, by the engine itself."""

    def exits() -> torch.Tensor:
        found: torch.Tensor = engine.generate(**options, cache_salt=new_salt())  # the others have no prefix cache
        return found

    def exits_off() -> torch.Tensor:
        with engine.using(engine.config, exits=False):
            return exits()

    found = {"generate": lambda: engine.model.generate(**options), "exits_off": exits_off}
    return found if engine.policy is None else {**found, "exits": exits}


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
