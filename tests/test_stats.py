from __future__ import annotations

import pytest

from TIDE import ExitStats

FIRST_LINES = (
    "Total tokens: 100, Exited: 72 (72.0%)\n"
    "  Depth 8: 23 exits (23.0%)\n"
    "  Depth 12: 31 exits (31.0%)\n"
    "  Depth 16: 18 exits (18.0%)\n"
    "  Ran all layers: 28\n"
)


@pytest.fixture
def stats() -> ExitStats:
    stats = ExitStats(num_layers=32)
    for depth, count in ((8, 23), (12, 31), (16, 18), (32, 28)):
        for _ in range(count):
            stats.count_token(depth)
    return stats


def test_the_summary_has_a_line_for_every_depth_where_tokens_exited(stats):
    """The first lines are those of the original system, with depths: its layer 7 is depth 8."""
    assert stats.summary() == FIRST_LINES + "  Mean depth: 17.4 of 32 layers"
    assert (stats.total_tokens, stats.remaining_tokens, stats.accepted) == (100, 28, 72)
    assert stats.exit_rate == pytest.approx(0.72)
    assert stats.mean_depth == pytest.approx((8 * 23 + 12 * 31 + 16 * 18 + 32 * 28) / 100)


def test_the_summary_tells_of_drafts_and_time_where_there_were_any(stats):
    stats.drafted_by_step.update({1: 80, 2: 16})
    stats.accepted_by_step.update({1: -8, 2: 8})
    stats.catch_ups, stats.rollbacks, stats.rejected = 30, 20, 24
    stats.seconds.prompt, stats.seconds.deep, stats.seconds.whole = 0.25, 1.5, 2.0
    assert stats.summary() == FIRST_LINES + (
        "  Mean depth: 17.4 of 32 layers\n"
        "  Drafted: 96, accepted: 72 (by step: 80.0%, 50.0%)\n"
        "  Catch-ups: 30, rollbacks: 20, rejected: 24\n"
        "  Seconds: 2.000 (prompt 0.250, shallow 0.000, exits 0.000, deep 1.500, choosing 0.000), 50.0 tokens/s"
    )
    assert stats.acceptance_by_step == {1: 0.8, 2: 0.5}


def test_nothing_generated_is_no_division_by_zero():
    stats = ExitStats(num_layers=4)
    assert (stats.exit_rate, stats.mean_depth, stats.tokens_per_second) == (0.0, 0.0, 0.0)
    assert stats.acceptance_by_step == {}
    assert stats.summary() == "Total tokens: 0, Exited: 0 (0.0%)\n  Ran all layers: 0"


def test_a_sum_has_the_counts_of_both_and_leaves_them_alone(stats):
    other = ExitStats(num_layers=32, layers_run=7, catch_ups=1, rollbacks=2, rejected=3)
    other.count_token(8, step=2)
    other.count_token(32, step=3)
    other.drafted_by_step[2] = 4
    other.seconds.deep, other.seconds.whole = 0.5, 1.5
    stats.seconds.whole = 1.0
    both = stats + other
    assert (both.total_tokens, both.remaining_tokens, both.exits_per_layer[7]) == (102, 29, 24)
    assert (both.layers_run, both.catch_ups, both.rollbacks, both.rejected) == (7, 1, 2, 3)
    assert both.accepted_by_step == {1: 72, 2: 1}
    assert both.drafted_by_step == {2: 4}
    assert (both.seconds.deep, both.seconds.whole) == (0.5, 2.5)
    assert (stats.total_tokens, other.total_tokens, stats.seconds.whole) == (100, 2, 1.0)


def test_stats_of_different_depths_are_not_added():
    with pytest.raises(ValueError, match="same depth can be added, found 4 and 5 layers. Keep a sum for each model"):
        ExitStats(4) + ExitStats(5)
