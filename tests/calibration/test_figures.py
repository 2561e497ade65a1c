"""Figures of routers, against their definitions spelled out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from TIDE.calibration.figures import auroc, calibration_error, coverage, router_figures

scored = st.lists(st.tuples(st.integers(0, 8).map(lambda n: n / 8), st.booleans()), min_size=1, max_size=40)


def tensors(pairs):
    scores, right = zip(*pairs, strict=True)
    return torch.tensor(scores), torch.tensor(right)


@given(scored)
def test_auroc_counts_pairs_in_the_right_order(pairs):
    above = [(r > w) + (r == w) / 2 for r, hit in pairs if hit for w, other in pairs if not other]
    assert auroc(*tensors(pairs)) == pytest.approx(sum(above) / len(above) if above else 0.5)


@given(scored, st.integers(1, 20))
def test_calibration_error_is_the_weighted_distance_within_bins(pairs, bins):
    expected = 0.0
    for index in range(bins):
        inside = [(s, hit) for s, hit in pairs if min(int(s * bins), bins - 1) == index]
        if inside:
            mean_score, accuracy = (sum(x) / len(inside) for x in zip(*inside, strict=True))
            expected += len(inside) / len(pairs) * abs(mean_score - accuracy)
    assert calibration_error(*tensors(pairs), bins) == pytest.approx(expected)


@given(scored, st.sampled_from([0.0, 0.5, 0.75, 0.9, 1.0]))
def test_coverage_is_the_best_of_all_thresholds(pairs, precision):
    best = 0.0
    for threshold in {score for score, _ in pairs}:
        leaving = [hit for score, hit in pairs if score >= threshold]
        if sum(leaving) / len(leaving) >= precision:
            best = max(best, len(leaving) / len(pairs))
    assert coverage(*tensors(pairs), precision) == pytest.approx(best)


def test_a_score_that_is_the_chance_of_being_right_has_no_error():
    scores = torch.rand(100_000, generator=torch.Generator().manual_seed(0))
    right = torch.rand(100_000, generator=torch.Generator().manual_seed(1)) < scores
    figures = router_figures(scores, right)
    assert figures["calibration_error"] < 0.01
    assert figures["agreement"] == pytest.approx(0.5, abs=0.01)
    assert figures["auroc"] == pytest.approx(5 / 6, abs=0.01)
    assert figures["coverage"]["0.90"] == pytest.approx(0.2, abs=0.02)  # from 0.8 up, nine in ten are right
    assert figures["positions"] == 100_000


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("outcome", [True, False])
def test_figures_of_one_class_or_of_nothing_are_numbers(count, outcome):
    figures = router_figures(torch.rand(count), torch.full((count,), outcome))
    assert figures["auroc"] == 0.5
    assert set(figures["coverage"].values()) == {1.0 if count and outcome else 0.0}
    assert 0 <= figures["calibration_error"] <= 1
