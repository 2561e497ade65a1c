"""Two levels of tests: `make test` runs some cases of a long table, `make test-all` the others (marker `full`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest


def daily(cases: Iterable[Any], some: Collection[Any]) -> list[Any]:
    """Return the cases of a parametrized test, of which `make test` runs `some` only.

    A tuple is the values of several arguments, unless it has a type of its own.
    """

    def in_full(case: Any) -> Any:
        return pytest.param(*(case if type(case) is tuple else (case,)), marks=pytest.mark.full)

    return [case if case in some else in_full(case) for case in cases]


def pairwise(cases: Sequence[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return few of the cases with every pair of values, in two places, that occurs in any of them."""
    pairs = {case: set(combinations(enumerate(case), 2)) for case in cases}
    left, chosen = set().union(*pairs.values()), set()
    while left:
        best = max(cases, key=lambda case: len(pairs[case] & left))
        chosen.add(best)
        left -= pairs[best]
    return chosen
