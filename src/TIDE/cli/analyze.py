"""`tide analyze`: the depths at which the tokens of a model are decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.model import load, with_model
from TIDE.cli.options import flag, option
from TIDE.cli.settings import with_settings
from TIDE.config import TIDEConfig
from TIDE.plots.analysis import plot_analysis
from TIDE.plots.figure import check_figure


@with_settings(dataset="calibration_dataset")
@with_model
def analyze(
    model: str,
    *,
    samples: Annotated[int, option("N", "Number of texts.", min=1)] = 200,
    no_heads: Annotated[bool, flag("--no-heads", "Skip lens and memory heads, whose training takes longest.")] = False,
    as_json: Annotated[bool, flag("--json", "Print the result as JSON.")] = False,
    figure: Annotated[Path | None, option("FILE", "Also draw a figure: a .png, .svg or .pdf file.", check=check_figure)] = None,
    quick: Annotated[bool, flag("--quick", "Few texts and little training, for a first look.")] = False,
    config: TIDEConfig,
) -> None:
    """Print, per depth, the share of tokens decided there. Also the mean depth an oracle would need.

    \b
    Examples:
      tide analyze default --quick --no-heads
      tide analyze my-org/my-model --dataset wikitext --figure depth.png
      tide analyze my-org/my-model --dataset texts.txt --json
    """
    import TIDE

    found = TIDE.analyze(*load(model), config, samples=samples, heads=not no_heads, quick=quick)
    if figure is not None:
        plot_analysis(found, figure)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.table())
