"""The figure of a tuning: speed over agreement with the full model's text, a line per kv_cache_strategy.

The exit threshold decreases along a line. Exits off and mode exact are marks; both generate the full model's text.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from TIDE.plots.figure import drawn

if TYPE_CHECKING:
    from TIDE.calibration.tune import Tuning

STYLE: dict[str, dict[str, Any]] = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    "exact": dict(color="#D55E00", marker="s"),
    "propagate": dict(color="#0072B2", marker="o"),
    "zero_pad": dict(color="#009E73", marker="^"),
}
MARKS: dict[str, dict[str, Any]] = {"off": dict(color="#000000", marker="x"), "exact": dict(color="#D55E00", marker="*")}


def plot_tuning(tuning: Tuning, path: str | Path) -> None:
    """Draw the speed and the agreement of each setting. The suffix of `path` selects the format."""
    with drawn(path) as (figure, axes):
        from matplotlib.ticker import PercentFormatter

        for strategy, style in STYLE.items():
            own = [row for row in tuning.rows if row.mode == "fast" and row.kv_cache_strategy == strategy]
            for row in own:
                axes.annotate(
                    f"{row.exit_threshold:g}",
                    (row.agreement, row.tokens_per_second),
                    fontsize=8,
                    xytext=(4, 4),
                    textcoords="offset points",
                )
            if own:
                points = [(row.agreement, row.tokens_per_second) for row in own]
                axes.plot(*zip(*points, strict=True), label=f"fast, {strategy}", linewidth=1.8, markersize=5, **style)
        for row in tuning.rows:
            if row.mode in MARKS:
                title = "exits off" if row.mode == "off" else "exact"
                axes.plot(row.agreement, row.tokens_per_second, linestyle="none", markersize=10, label=title, **MARKS[row.mode])
        axes.set_xlabel("tokens that match the full model")
        axes.set_ylabel("tokens per second")
        axes.margins(y=0.1)
        axes.set_ylim(bottom=0)
        axes.set_title(f"{tuning.model}: {tuning.prompts} prompts; exit thresholds beside the points")
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", frameon=False)
