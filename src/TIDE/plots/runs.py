"""Figures of a run: tokens by depth, each token's depth along the text, and accepted drafts by position."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from TIDE.plots.figure import drawn
from TIDE.plots.ramp import colour
from TIDE.plots.report import mode, verified_steps
from TIDE.run import Run, Token

LINE = 92  # characters per line at the fontsize=10.9 below
TOP, BAR = 0.5, 0.72  # inches: height of the title, and of a line of text with its bars
STUB = 0.12  # height, as a share of all layers, of the bar of a token that ran none


def plot_histogram(run: Run, path: str | Path) -> None:
    """Draw the number of tokens decided at each depth."""
    with _bars(run, path) as axes:
        counts = Counter(token.depth for token in run.tokens)
        bars = axes.bar(list(counts), list(counts.values()), color=[_paint(run, depth) for depth in counts])
        axes.bar_label(bars, padding=2)
        axes.margins(y=0.12)
        axes.set_xlim(-1, run.num_layers + 1)
        axes.set_xlabel(f"depth (layers run, of {run.num_layers})")
        axes.set_ylabel("tokens")


def plot_depths(run: Run, path: str | Path) -> None:
    """Draw the text with a bar for its depth over each token; tokens that differ from the full model's are underlined."""
    lines = _lines(run.tokens)
    height = TOP + BAR * len(lines)
    with drawn(path, 9, height, layout=None, nrows=len(lines), squeeze=False) as (figure, grid):
        for axes, line in zip(grid[:, 0], lines, strict=True):
            _draw_line(axes, run, line)
        figure.subplots_adjust(left=0.06, right=0.99, top=1 - TOP / height, bottom=0.5 * BAR / height, hspace=1.0)
        figure.suptitle(_title(run), fontsize=11, y=1 - 0.3 * TOP / height)
        figure.supylabel("depth (layers run)", fontsize=9, x=0.005)


def plot_acceptance(run: Run, path: str | Path) -> None:
    """Draw the share of drafts accepted, by position."""
    with _bars(run, path) as axes:
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        steps = verified_steps(run)
        axes.bar(list(steps), list(steps.values()), color="#0072B2")
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft position" if steps else "no drafts were verified")
        axes.set_ylabel("share accepted")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))


@contextmanager
def _bars(run: Run, path: str | Path) -> Iterator[Any]:
    """Yield the axes of a figure with the run's title and a grid."""
    with drawn(path, height=4) as (_, axes):
        yield axes
        axes.set_title(_title(run), fontsize=11)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3, axis="y")


def _lines(tokens: tuple[Token, ...]) -> list[list[Token]]:
    """Return tokens as lines of text, broken at newlines and at full lines."""
    lines: list[list[Token]] = [[]]
    for token in tokens:
        if lines[-1] and (lines[-1][-1].text.endswith("\n") or sum(map(_width, lines[-1])) + _width(token) > LINE):
            lines.append([])
        lines[-1].append(token)
    return lines


def _draw_line(axes: Any, run: Run, line: list[Token]) -> None:
    place = 0
    for token in line:
        height = max(token.depth, STUB * run.num_layers)
        axes.bar(place, height, width=_width(token) - 0.15, align="edge", color=_paint(run, token.depth))
        text = dict(transform=axes.get_xaxis_transform(), va="top", family="monospace", fontsize=10.9)
        axes.text(place, -0.12, _label(token), **text)
        if token.text != token.full:
            axes.text(place, -0.16, "_" * _width(token), **text)
        place += _width(token)
    axes.set_xlim(0, LINE)
    axes.set_ylim(0, run.num_layers)
    axes.set_xticks([])
    axes.set_yticks([0, run.num_layers])
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _label(token: Token) -> str:
    return token.text.replace("\n", "↵").replace("\t", " ").replace("$", r"\$")  # escaped, or matplotlib reads formulas


def _width(token: Token) -> int:
    return max(1, len(token.text))


def _title(run: Run) -> str:
    return f"{Path(run.model).name}, {mode(run)}: {len(run.tokens)} tokens, mean depth {run.mean_depth:.1f} of {run.num_layers}"


def _paint(run: Run, depth: int) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour(depth / run.num_layers))
