"""The figure of an analysis: a line per criterion over depth, and a mark on the axis at the mean depth of an oracle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from TIDE.plots.figure import drawn

if TYPE_CHECKING:
    from TIDE.calibration.analyze import Analysis

STYLE: dict[str, dict[str, Any]] = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    "cosine": dict(color="#999999", linestyle="--"),
    "identity": dict(color="#000000"),
    "lens": dict(color="#0072B2", marker="o"),
    "memory": dict(color="#D55E00", marker="s"),
    "memory_last": dict(color="#D55E00", marker="s", linestyle=":", markerfacecolor="none"),
}


def plot_analysis(analysis: Analysis, path: str | Path) -> None:
    """Draw the share of tokens decided at each depth. The suffix of `path` selects the format."""
    with drawn(path) as (figure, axes):
        from matplotlib.ticker import MaxNLocator, PercentFormatter

        for name, title in analysis.titles.items():
            points = [(row["depth"], row[name]) for row in analysis.rows if row[name] is not None]
            axes.plot(*zip(*points, strict=True), label=title, linewidth=1.8, markersize=5, **STYLE[name])
        for name, depth in analysis.oracle_depth.items():
            label = f"oracle, {name}: {depth:.1f}"
            axes.axvline(depth, ymax=0.06, linewidth=3, color=STYLE[name]["color"], label=label)
        axes.set_xlim(0, analysis.layers)
        axes.set_ylim(0, 1)
        axes.set_xlabel(f"depth (layers run, of {analysis.layers})")
        axes.set_ylabel("share of tokens")
        axes.set_title(f"{analysis.model}: tokens decided by depth ({analysis.tokens} tokens)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
