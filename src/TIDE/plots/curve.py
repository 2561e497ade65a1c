"""The figure of a cost–performance curve: quality over what a token costs, a panel per kind of cost, a line per way to save.

Points further up and to the left are better. A cost that was not measured has no panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from TIDE.plots.figure import drawn

COSTS = {
    "seconds": "seconds per token",
    "CPU seconds": "CPU seconds per token",
    "layers": "layers run per token",
    "joules": "joules per token",
}
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")  # Okabe and Ito
ALONE = {"exits off": dict(color="#000000", marker="x"), "exact": dict(color="#D55E00", marker="*")}


def plot_curve(points: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw points with "series", "label", "quality" and costs. The suffix of `path` selects the format."""
    costs = [name for name in COSTS if any(point.get(name) is not None for point in points)]
    series = list(dict.fromkeys(point["series"] for point in points))
    styles = _styles(series)
    with drawn(path, 4.2 * len(costs) + 2.4, ncols=len(costs), sharey=True, squeeze=False) as (figure, grid):
        for axes, cost in zip(grid[0], costs, strict=True):
            for name in series:
                own = [point for point in points if point["series"] == name and point.get(cost) is not None]
                places = [(point[cost], point["quality"]) for point in own]
                if places:
                    axes.plot(*zip(*places, strict=True), label=name, **styles[name])
                for point, place in zip(own, places, strict=True):
                    axes.annotate(point["label"], place, fontsize=7, xytext=(3, 3), textcoords="offset points")
            axes.set_xlabel(COSTS[cost])
            axes.set_xlim(left=0)
            axes.set_ylim(0, 1.05)
            axes.grid(alpha=0.3)
        figure.axes[0].set_ylabel("ROUGE-L to the full model's text")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        figure.suptitle(title)


def _styles(series: Sequence[str]) -> dict[str, dict[str, Any]]:
    lines = [name for name in series if name not in ALONE]
    found = {
        name: dict(color=COLOURS[place % len(COLOURS)], marker="os^Dv"[place % 5], linewidth=1.6, markersize=4)
        for place, name in enumerate(lines)
    }
    return found | {name: dict(style, linestyle="none", markersize=9) for name, style in ALONE.items()}
