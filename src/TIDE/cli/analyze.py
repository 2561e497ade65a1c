"""`tide analyze`: how deep the tokens of a model need to go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.errors import one_line


@one_line
def analyze(
    model: Annotated[str, typer.Argument(help="'default', a hub id, or a local path.")],
    samples: Annotated[int, typer.Option(min=1, help="How many texts.")] = 200,
    dataset: Annotated[
        str, typer.Option(help="'self' (the model writes them), a .txt or .jsonl file, or a data set of the hub.")
    ] = "self",
    heads: Annotated[bool, typer.Option("--heads/--no-heads", help="Train lens and memory heads; takes longest.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
    figure: Annotated[Path | None, typer.Option(help="Draw it too: a .png, .svg or .pdf file.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few texts and little training, for a first look.")] = False,
) -> None:
    """Print, per depth, the share of tokens that are decided there, and the mean depth an oracle would need."""
    from transformers.utils.logging import disable_progress_bar

    import TIDE
    from TIDE.plots.analysis import check_figure, plot_analysis

    disable_progress_bar()
    if figure is not None:
        check_figure(figure)
    config = TIDE.TIDEConfig(calibration_dataset=dataset)
    loaded = TIDE.load_model(model)
    found = TIDE.analyze(loaded.model, loaded.tokenizer, config, samples=samples, heads=heads, quick=quick)
    if figure is not None:
        plot_analysis(found, figure)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.table())
