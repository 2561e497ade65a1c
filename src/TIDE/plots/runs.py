"""Figures of a run: how many tokens were decided at which depth, each token's depth along the text, and drafts that stood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from TIDE.plots.analysis import check_figure
from TIDE.plots.ramp import colour
from TIDE.run import Run


def plot_histogram(run: Run, path: str | Path) -> None:
    """Tokens by the depth at which they were decided."""

    def draw(axes: Any) -> None:
        counts = sorted(Counter(token.depth for token in run.tokens).items())
        axes.bar([depth for depth, _ in counts], [count for _, count in counts], color=[_paint(run, d) for d, _ in counts])
        axes.set_xlim(-1, run.num_layers + 1)
        axes.set_xlabel(f"depth (layers run, of {run.num_layers})")
        axes.set_ylabel("tokens")

    _figure(run, path, draw)


def plot_depths(run: Run, path: str | Path) -> None:
    """The depth of every token along the text; a cross where the full model says something else."""

    def draw(axes: Any) -> None:
        depths = [token.depth for token in run.tokens]
        axes.bar(range(len(depths)), depths, width=1.0, color=[_paint(run, depth) for depth in depths])
        other = [place for place, token in enumerate(run.tokens) if token.text != token.full]
        axes.plot(other, [run.num_layers + 1] * len(other), linestyle="none", marker="x", color="#000000")
        axes.set_ylim(0, run.num_layers + 2)
        axes.set_xlabel("token of the answer")
        axes.set_ylabel("depth")

    _figure(run, path, draw)


def plot_acceptance(run: Run, path: str | Path) -> None:
    """Share of drafts that stood, by their number in a row."""

    def draw(axes: Any) -> None:
        axes.bar(list(run.acceptance_by_step), list(run.acceptance_by_step.values()), color="#0072B2")
        axes.set_ylim(0, 1)
        axes.set_xlabel("draft, by its number in a row")
        axes.set_ylabel("share that stood")

    _figure(run, path, draw)


def _figure(run: Run, path: str | Path, draw: Callable[[Any], None]) -> None:
    check_figure(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.set_title(f"{Path(run.model).name}, mode {run.mode}: {len(run.tokens)} tokens, mean depth {run.mean_depth:.1f}")
    axes.grid(alpha=0.3, axis="y")
    figure.savefig(path, dpi=150)


def _paint(run: Run, depth: int) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour(depth / run.num_layers))
