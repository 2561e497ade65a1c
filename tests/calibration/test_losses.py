"""Losses: 0 for the same text, 1 for nothing in common, and what is between counted by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from TIDE.calibration.losses import mismatch, named_loss, rouge_l


@pytest.mark.parametrize("loss", [rouge_l, mismatch])
def test_the_ends_of_the_scale(loss):
    assert loss([1, 2, 3], [1, 2, 3]) == loss([], []) == 0.0
    assert loss([1, 2], [3, 4]) == loss([], [3]) == loss([3], []) == 1.0


def test_a_token_too_many_is_one_token_for_rouge_and_all_that_follow_for_mismatch():
    full, found = [1, 2, 3, 4, 5], [9, 1, 2, 3, 4]
    assert rouge_l(found, full) == pytest.approx(1 - 2 * 4 / 10)
    assert mismatch(found, full) == 1.0
    assert mismatch([1, 2, 9, 4], full) == pytest.approx(2 / 5), "one differs and one is missing"


def test_the_common_subsequence_is_the_longest_one():
    random_ = random.Random(0)
    for _ in range(50):
        one, other = ([random_.randrange(3) for _ in range(random_.randrange(1, 8))] for _ in range(2))
        parts = {part for size in range(9) for part in itertools.combinations(one, size)}
        common = max(len(part) for part in parts & {p for size in range(9) for p in itertools.combinations(other, size)})
        assert rouge_l(one, other) == pytest.approx(1 - 2 * common / (len(one) + len(other)))


def test_a_function_of_the_user_is_named_and_checked():
    def half(found, full):
        return 0.5

    name, loss = named_loss(half)
    assert (name, loss([1], [1])) == ("half", 0.5)
    for bad in (1.5, -0.1, float("nan"), None, "much"):
        with pytest.raises(ValueError, match="must give a number from 0 to 1, found .*Scale it"):
            named_loss(lambda found, full, bad=bad: bad)[1]([1], [1])
    for bad in ("bleu", 3):
        with pytest.raises(ValueError, match=r"loss must be one of \['rouge_l', 'mismatch'\] or a function"):
            named_loss(bad)
