"""`tide report RUN.json`: a run as an HTML page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.options import flag, option
from TIDE.plots.figure import check_matplotlib
from TIDE.plots.report import check_report, write_report


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", exists=True, dir_okay=False, help="A run saved by tide generate --save.")
    ],
    output: Annotated[
        Path | None, option("FILE", "HTML page; RUN.html unless given.", "--output", "-o", check=check_report)
    ] = None,
    figures: Annotated[
        Path | None, option("FOLDER", "Also draw figures into this folder.", check=check_matplotlib, file_okay=False)
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the files written as JSON.")] = False,
) -> None:
    """Write a run as one HTML page. It shows the depth, router score and full model's token of every token.

    \b
    Examples:
      tide generate "Why is the sky blue?" --save run.json
      tide report run.json --figures figures
    """
    from TIDE.plots.runs import plot_acceptance, plot_depths, plot_histogram
    from TIDE.run import Run

    held, target = Run.load(run), output or run.with_suffix(".html")
    write_report(held, target)
    written = [target]
    if figures is not None:
        figures.mkdir(parents=True, exist_ok=True)
        for name, plot in (("histogram", plot_histogram), ("depths", plot_depths), ("acceptance", plot_acceptance)):
            plot(held, figures / f"{name}.png")
            written.append(figures / f"{name}.png")
    typer.echo(json.dumps([str(path) for path in written]) if as_json else "\n".join(f"written: {path}" for path in written))
