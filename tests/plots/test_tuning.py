"""The figure of a tuning: every setting that was measured is in it."""

from __future__ import annotations

import importlib.util

import pytest

from TIDE.calibration.tune import Tried, Tuning
from TIDE.config import KV_CACHE_STRATEGIES
from TIDE.plots.tuning import STYLE, plot_tuning

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


@pytest.fixture
def tuning():
    rows = [Tried("off", "-", None, 30.0, 1.0, 1.0, 1.0, 0.0), Tried("exact", "exact", None, 40.0, 1.33, 1.0, 1.0, 0.5)]
    for strategy, gain in (("exact", 1.0), ("propagate", 1.2)):
        rows += [Tried("fast", strategy, t, 60.0 * gain * (2 - t), 2.0, t, t, 0.6) for t in (0.95, 0.8125)]
    return Tuning("Small-1B", 20, 64, rows)


@needs_matplotlib
@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_suffix_says_the_format(tuning, tmp_path, name, begins):
    plot_tuning(tuning, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


@needs_matplotlib
def test_every_setting_is_named_in_it_and_what_was_not_tried_is_not(tuning, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # words as words
    plot_tuning(tuning, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in (
        "exits off",
        "fast, exact",
        "fast, propagate",
        "0.8125",
        "tokens per second",
        "tokens that match the full model",
        "Small-1B: 20 prompts",
    ):
        assert words in text, words
    assert "zero_pad" not in text
    assert set(STYLE) == set(KV_CACHE_STRATEGIES)


def test_without_matplotlib_the_extra_is_named(tuning, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'matplotlib>="):
        plot_tuning(tuning, tmp_path / "a.png")
