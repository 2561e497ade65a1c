"""The figure of the cost-performance curve."""

from __future__ import annotations

import pytest

from TIDE.plots.curve import plot_curve

POINTS = [
    dict(series="exits off", label="", quality=1.0, seconds=0.05, layers=30.0, joules=None),
    dict(series="exact", label="", quality=1.0, seconds=0.03, layers=31.0, joules=None),
    dict(series="fast, memory", label="0.9", quality=0.8, seconds=0.04, layers=29.0, joules=None),
    dict(series="fast, memory", label="0.6", quality=0.5, seconds=0.03, layers=28.0, joules=None),
]


def test_there_is_a_panel_for_every_cost_that_was_measured(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    plot_curve(POINTS, tmp_path / "curve.png", "a model")
    plot_curve([dict(point, joules=1.5) for point in POINTS], tmp_path / "curve.png")
    assert [len(figure.axes) for figure in drawn] == [2, 3]
    lines = {line.get_label(): line for line in drawn[0].axes[0].get_lines()}
    assert list(lines["fast, memory"].get_xdata()) == [0.04, 0.03] and list(lines["fast, memory"].get_ydata()) == [0.8, 0.5]
    assert set(lines) == {"exits off", "exact", "fast, memory"}
