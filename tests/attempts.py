"""Attacks by chance: a few fixed ones by default, thousands of others with TIDE_LONG=1 (`make test-long`).

An attack draws everything from the random numbers of its seed. Failures name their seeds; TIDE_SEED=12,34 tries two again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from properties import IS_LONG

PARTS = 10  # of the long run, for several processes
AGAIN = [int(seed) for seed in os.environ.get("TIDE_SEED", "").split(",") if seed]

in_parts = pytest.mark.parametrize("part", range(PARTS if IS_LONG and not AGAIN else 1))


def attempt(attack: Callable[[random.Random], None], few: int, many: int) -> None:
    """Try an attack `few` times, or with TIDE_LONG=1 a part of `many` times; fail with the seeds of all that went wrong.

    Args:
        attack: draws from the random numbers it is given, and raises if something is wrong.
    """
    seeds = AGAIN or (_fresh(many // PARTS) if IS_LONG else list(range(few)))
    wrong: dict[int, Exception] = {}
    for seed in seeds:
        try:
            attack(random.Random(seed))
        except Exception as problem:
            wrong[seed] = problem
    if wrong:
        lines = [f"TIDE_SEED={seed}  {type(problem).__name__}: {problem}"[:1000] for seed, problem in wrong.items()]
        raise AssertionError("\n".join([f"{len(wrong)} of {len(seeds)} went wrong:", *lines])) from next(iter(wrong.values()))


def _fresh(count: int) -> list[int]:
    """Return seeds of the system's chance, others every time."""
    chance = random.SystemRandom()
    return [chance.getrandbits(32) for _ in range(count)]
