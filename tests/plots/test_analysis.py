"""The figure of an analysis: written where asked, without touching the program's own figures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from TIDE.calibration.analyze import CRITERIA, Analysis
from TIDE.plots.analysis import STYLE, plot_analysis

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


@pytest.fixture
def analysis():
    rows = [{"depth": depth} | dict.fromkeys(CRITERIA) for depth in range(8)]
    for row in rows[1:]:
        row |= {"cosine": 0.0, "identity": row["depth"] / 8}
    for row in rows[::4]:
        row |= {"lens": 0.4 if row["depth"] else None, "memory": 0.5, "memory_last": 0.3}
    return Analysis("Small-1B", 8, 20, 4000, 400, 0.98, 3, rows, {"identity": 6.5, "lens": 7.0, "memory": 5.0})


@needs_matplotlib
@pytest.mark.parametrize(("name", "begins"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.pdf", b"%PDF")])
def test_the_suffix_says_the_format(analysis, tmp_path, name, begins):
    plot_analysis(analysis, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(begins)


@needs_matplotlib
def test_every_criterion_is_named_in_it(analysis, tmp_path, monkeypatch):
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # words as words
    plot_analysis(analysis, str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    for words in (*analysis.titles.values(), "oracle, memory: 5.0", "share of tokens", "depth (layers run, of 8)", "Small-1B"):
        assert words.replace(">", "&gt;") in text, words
    assert set(STYLE) == set(CRITERIA)


@needs_matplotlib
def test_the_programs_own_figures_are_left_alone(analysis, tmp_path):
    plot_analysis(analysis, tmp_path / "a.png")
    script = "import sys, TIDE.plots.analysis; assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "matplotlib.pyplot" not in sys.modules


@needs_matplotlib
def test_what_cannot_be_written_is_said(analysis, tmp_path):
    with pytest.raises(ValueError, match=r"a figure ends in .png, .svg, .pdf, found 'a.xyz'"):
        plot_analysis(analysis, tmp_path / "a.xyz")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        plot_analysis(analysis, tmp_path / "missing" / "a.png")


def test_without_matplotlib_the_extra_is_named(analysis, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'matplotlib>="):
        plot_analysis(analysis, tmp_path / "a.png")
