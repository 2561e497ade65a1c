"""Figures of a run: written where asked, with every depth and every token in them."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

from TIDE.plots.runs import LINE, _lines, plot_acceptance, plot_depths, plot_histogram

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")


@pytest.fixture
def words(monkeypatch, tmp_path):
    """Draws a figure and gives the words in it."""
    import matplotlib

    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # words as words

    def draw(plot, run):
        plot(run, tmp_path / "a.svg")
        return (tmp_path / "a.svg").read_text("utf-8")

    return draw


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


@pytest.mark.parametrize("plot", [plot_histogram, plot_depths, plot_acceptance])
def test_an_empty_answer_can_be_drawn(words, plot, run):
    assert "mode exact: 0 tokens" in words(plot, dataclasses.replace(run, tokens=()))


@pytest.mark.parametrize("plot", [plot_histogram, plot_depths, plot_acceptance])
def test_pictures_are_small(plot, run, tmp_path):
    plot(run, tmp_path / "a.png")
    written = (tmp_path / "a.png").read_bytes()
    assert written.startswith(b"\x89PNG") and len(written) < 200_000
