"""Placement: a round is played as the engine would, and the best setting is the best."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from TIDE.calibration.fit_router import Trace
from TIDE.calibration.placement import Candidate, best_setting, is_worth_going_deeper, place, play
from TIDE.calibration.timing import Costs

LAYERS = 10
COSTS = Costs(1.0, {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5}, {1: 2.0, 2: 2.0, 4: 2.0, 8: 3.0, 16: 4.0}, 0.25, LAYERS)


def a_trace(seed: int, steps: int = 2) -> Trace:
    torch.manual_seed(seed)
    return Trace(torch.rand(60, steps), torch.rand(60, steps) < 0.7, torch.arange(60) // 20)


def span(start: int, stop: int, tokens: int) -> float:
    return float(COSTS.span(start, stop, torch.tensor([float(tokens)])))


def played_by_hand(candidates, checkpoints, thresholds, drafts):
    """The same round, token by token."""
    texts = next(iter(candidates.values())).trace.texts.tolist()
    tokens = seconds = 0.0
    edges = [0, *checkpoints, LAYERS]
    for start in range(len(texts)):
        pending = dict.fromkeys(checkpoints, 0)  # tokens that wait behind each checkpoint
        accepted, right, step = 0, True, 0
        while True:
            seconds += span(0, edges[1], 1)
            asked = step < drafts
            left = False
            for index, depth in enumerate(checkpoints):
                if asked:
                    trace, head = candidates[depth]
                    at, known = min(start + step, len(texts) - 1), min(step, trace.scores.shape[1] - 1)
                    seconds += head
                    if texts[at] == texts[start] and float(trace.scores[at, known]) >= thresholds[index]:
                        seconds += COSTS.choice
                        right = right and bool(trace.agreed[at, known])
                        accepted += right
                        pending[depth] += 1
                        left = True
                        break
                seconds += span(depth, edges[index + 2], 1 + pending[depth])
                if index + 1 < len(checkpoints):
                    pending[checkpoints[index + 1]] += pending[depth]
                pending[depth] = 0
            if not left:
                seconds += (1 + accepted) * COSTS.choice
                break
            step += 1
        tokens += 1 + accepted
    return tokens / seconds


@pytest.mark.parametrize("checkpoints", [(0,), (4,), (0, 4), (3, 7)])
def test_rounds_cost_and_give_what_they_do_by_hand(checkpoints):
    candidates = {depth: Candidate(a_trace(depth), 1.5 + depth / 10) for depth in checkpoints}
    chosen = random.Random(0)
    for drafts in (1, 2, 4):
        thresholds = tuple(chosen.choice([0.0, 0.3, 0.8]) for _ in checkpoints)
        found = play(candidates, checkpoints, thresholds, drafts, COSTS)
        assert found.tokens_per_second == pytest.approx(played_by_hand(candidates, checkpoints, thresholds, drafts), rel=1e-4)


def test_the_best_setting_is_the_best_of_the_grid():
    candidates = {0: Candidate(a_trace(1), 1.0)}
    best = best_setting(candidates, (0,), COSTS)
    grid = itertools.product((0.0, 0.1, 0.5, 0.9), (1, 3, 8))
    assert all(best.tokens_per_second >= play(candidates, (0,), (t,), k, COSTS).tokens_per_second for t, k in grid)


def test_a_perfect_exit_at_no_depth_drafts_as_long_as_it_may_and_a_hopeless_one_is_never_used():
    everything = torch.ones(400, 1)
    same_text = torch.zeros(400, dtype=torch.long)
    perfect = Candidate(Trace(everything, everything > 0, same_text), 0.1)
    hopeless = Candidate(Trace(everything, everything < 0, same_text), 0.1)
    assert best_setting({0: perfect}, (0,), COSTS).max_pending == 8
    assert best_setting({0: perfect}, (0,), COSTS).tokens_per_second * COSTS.full_step > 3
    candidates = {0: hopeless, 4: perfect}
    order = place(candidates, [best_setting(candidates, (depth,), COSTS) for depth in candidates], COSTS)
    assert order[0].checkpoints == (4,)


def test_a_deeper_exit_is_tried_only_after_one_that_promised_clearly_more():
    """On random weights agreement crept from 0.000 to 0.025 by depth 12, and a head of 90 seconds was trained at each depth."""
    first = best_setting({0: Candidate(a_trace(1), 1.0)}, (0,), COSTS)
    as_good, better = (first._replace(tokens_per_second=first.tokens_per_second * times) for times in (1.003, 1.1))
    assert is_worth_going_deeper([first])
    assert is_worth_going_deeper([first, better])
    assert not is_worth_going_deeper([first, as_good])
    assert not is_worth_going_deeper([first, better, as_good])


def test_times_between_and_beyond_what_was_measured_lie_on_straight_lines():
    found = COSTS.span(0, 5, torch.tensor([1.0, 3.0, 32.0]))
    assert found.tolist() == pytest.approx([1 + 5 * 1.0, 1 + 5 * 1.2, 1 + 5 * 4.1])
    assert COSTS.full_step == pytest.approx(1 + 10 + 2 + 0.25)
