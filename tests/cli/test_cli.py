"""The version by the console script, started afresh, and the demo of the embedded model."""

from __future__ import annotations

import pytest

from commands import script, tide


def test_the_version_is_printed():
    assert script("--version").stdout.startswith("tide-inference 0.")


@pytest.mark.real
def test_the_demo_shows_text_speed_and_stats_and_ends_with_a_report(tmp_path):
    page = tmp_path / "page.html"
    done = tide("demo", "--max-new-tokens", 12, "--rounds", 1, "--output", page)
    assert done.exit_code == 0, done.stderr
    assert "model.generate" in done.stdout
    assert "TIDE, exits off" in done.stdout
    assert "tok/s" in done.stdout
    assert done.stdout.count("same text yes") == 2
    assert "TIDE, exact exits" in done.stdout
    assert "Total tokens: 12" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"report: {page} ")
    assert page.read_text("utf-8").count('class="token') == 12
