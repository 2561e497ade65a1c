"""Figures that matplotlib draws: in the format of the suffix, with all that was measured, without the program's own figures."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys

import pytest

from TIDE.calibration.analyze import CRITERIA, Analysis
from TIDE.calibration.tune import Tried, Tuning
from TIDE.config import KV_CACHE_STRATEGIES
from TIDE.plots import analysis, tuning
from TIDE.plots.analysis import plot_analysis
from TIDE.plots.curve import plot_curve
from TIDE.plots.runs import LINE, _lines, plot_acceptance, plot_depths, plot_histogram
from TIDE.plots.tuning import plot_tuning

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
OF_A_RUN = (plot_histogram, plot_depths, plot_acceptance)


def an_analysis() -> Analysis:
    rows = [{"depth": depth} | dict.fromkeys(CRITERIA) for depth in range(8)]
    for row in rows[1:]:
        row |= {"cosine": 0.0, "identity": row["depth"] / 8}
    for row in rows[::4]:
        row |= {"lens": 0.4 if row["depth"] else None, "memory": 0.5, "memory_last": 0.3}
    return Analysis("Small-1B", 8, 20, 4000, 400, 0.98, 3, rows, {"identity": 6.5, "lens": 7.0, "memory": 5.0})


def a_tuning() -> Tuning:
    rows = [Tried("off", "-", None, 30.0, 1.0, 1.0, 1.0, 0.0), Tried("exact", "exact", None, 40.0, 1.33, 1.0, 1.0, 0.5)]
    for strategy, gain in (("exact", 1.0), ("propagate", 1.2)):
        rows += [Tried("fast", strategy, t, 60.0 * gain * (2 - t), 2.0, t, t, 0.6) for t in (0.95, 0.8125)]
    return Tuning("Small-1B", 20, 64, rows)


@pytest.fixture
def words(monkeypatch, tmp_path):
    """Draws a figure and gives the words in it."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # words as words

    def draw(plot, shown):
        plot(shown, tmp_path / "a.svg")
        return (tmp_path / "a.svg").read_text("utf-8")

    return draw


@needs_matplotlib
@pytest.mark.parametrize(("plot", "make"), [(plot_analysis, an_analysis), (plot_tuning, a_tuning)])
@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_suffix_says_the_format(plot, make, tmp_path, name, begins):
    plot(make(), tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_every_criterion_of_an_analysis_is_named(words):
    shown = an_analysis()
    text = words(plot_analysis, shown)
    for said in (*shown.titles.values(), "oracle, memory: 5.0", "share of tokens", "depth (layers run, of 8)", "Small-1B"):
        assert said.replace(">", "&gt;") in text, said
    assert set(analysis.STYLE) == set(CRITERIA)


def test_every_setting_of_a_tuning_is_named_and_what_was_not_tried_is_not(words):
    text = words(plot_tuning, a_tuning())
    settings = ("exits off", "fast, exact", "fast, propagate", "0.8125")
    for said in (*settings, "tokens per second", "tokens that match the full model", "Small-1B: 20 prompts"):
        assert said in text, said
    assert "zero_pad" not in text
    assert set(tuning.STYLE) == set(KV_CACHE_STRATEGIES)


POINTS = [
    dict(series="exits off", label="", quality=1.0, seconds=0.05, layers=30.0, joules=None),
    dict(series="exact", label="", quality=1.0, seconds=0.03, layers=31.0, joules=None),
    dict(series="fast, memory", label="0.9", quality=0.8, seconds=0.04, layers=29.0, joules=None),
    dict(series="fast, memory", label="0.6", quality=0.5, seconds=0.03, layers=28.0, joules=None),
]


@needs_matplotlib
def test_a_curve_has_a_panel_for_every_cost_that_was_measured(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    plot_curve(POINTS, tmp_path / "curve.png", "a model")
    plot_curve([dict(point, joules=1.5) for point in POINTS], tmp_path / "curve.png")
    assert [len(figure.axes) for figure in drawn] == [2, 3]
    lines = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    assert list(lines["fast, memory"].get_xdata()) == [0.04, 0.03] and list(lines["fast, memory"].get_ydata()) == [0.8, 0.5]
    assert set(lines) == {"exits off", "exact", "fast, memory"}


@needs_matplotlib
def test_the_programs_own_figures_are_left_alone(tmp_path):
    plot_analysis(an_analysis(), tmp_path / "a.png")
    script = "import sys, TIDE.plots.analysis; assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "matplotlib.pyplot" not in sys.modules


@needs_matplotlib
def test_a_figure_with_another_suffix_or_in_no_folder_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a figure ends in .png, .svg, .pdf, found 'a.xyz'"):
        plot_analysis(an_analysis(), tmp_path / "a.xyz")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        plot_analysis(an_analysis(), tmp_path / "missing" / "a.png")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for plot, make in ((plot_analysis, an_analysis), (plot_tuning, a_tuning)):
        with pytest.raises(ImportError, match=r"pip install 'matplotlib>="):
            plot(make(), tmp_path / "a.png")


def test_a_histogram_counts_the_tokens_of_each_depth(words, run):
    text = words(plot_histogram, run)
    assert f"Small-1B, mode exact: {len(run.tokens)} tokens, mean depth" in text and "depth (layers run, of 8)" in text
    for depth in {token.depth for token in run.tokens}:
        assert f">{sum(token.depth == depth for token in run.tokens)}</text>" in text


def test_depths_stand_over_the_text(words, run):
    text = words(plot_depths, run)
    for token in run.tokens[:-1]:
        assert f"{token.text.strip(' ')}</text>".replace("\n", "↵") in text, token
    assert "&lt;script&gt;$x" in text  # a dollar is no formula
    assert text.count(">____</text>") == 1  # under the one token that is not the full model's


def test_lines_are_as_long_as_they_may_be(run):
    lines = _lines(run.tokens)
    lengths = [sum(len(token.text) for token in line) for line in lines]
    assert sum(map(len, lines)) == len(run.tokens) and max(lengths) <= LINE
    assert lines[-1] == [run.tokens[-1]]  # after the end of a paragraph
    assert all(length + len(after[0].text) > LINE for length, after in zip(lengths[:-2], lines[1:], strict=False))


def test_acceptance_is_of_verified_drafts(words, run):
    text = words(plot_acceptance, run)
    assert "draft position" in text and "share accepted" in text
    assert "no drafts were verified" in words(plot_acceptance, dataclasses.replace(run, mode="fast"))


@pytest.mark.parametrize("plot", OF_A_RUN)
def test_the_figure_of_an_empty_answer_can_be_drawn(words, plot, run):
    assert "mode exact: 0 tokens" in words(plot, dataclasses.replace(run, tokens=()))


@needs_matplotlib
@pytest.mark.parametrize("plot", OF_A_RUN)
def test_figures_are_small(plot, run, tmp_path):
    plot(run, tmp_path / "a.png")
    written = (tmp_path / "a.png").read_bytes()
    assert written.startswith(b"\x89PNG") and len(written) < 200_000
