from __future__ import annotations

import pytest

from TIDE import ExitStats


def test_the_summary_has_a_line_for_every_layer_where_tokens_left():
    stats = ExitStats(num_layers=32)
    for depth, count in ((8, 23), (12, 31), (16, 18), (32, 28)):
        for _ in range(count):
            stats.count_token(depth)
    assert stats.summary() == (
        "Total tokens: 100, Exited: 72 (72.0%)\n"
        "  Layer 7: 23 exits (23.0%)\n"
        "  Layer 11: 31 exits (31.0%)\n"
        "  Layer 15: 18 exits (18.0%)\n"
        "  Ran all layers: 28"
    )
    assert (stats.total_tokens, stats.remaining_tokens, stats.accepted) == (100, 28, 72)
    assert stats.exit_rate == pytest.approx(0.72)
    assert stats.mean_depth == pytest.approx((8 * 23 + 12 * 31 + 16 * 18 + 32 * 28) / 100)


def test_nothing_generated_is_no_division_by_zero():
    stats = ExitStats(num_layers=4)
    assert (stats.exit_rate, stats.mean_depth) == (0.0, 0.0)
    assert stats.summary() == "Total tokens: 0, Exited: 0 (0.0%)\n  Ran all layers: 0"
