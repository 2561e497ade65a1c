"""`tide tune MODEL`: speed and text of every setting on prompts of the user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.errors import one_line
from TIDE.cli.router import Router, router_path

PROMPTS = 16


@one_line
def tune(
    model: Annotated[str, typer.Argument(help="'default', a hub id, or a local path.")],
    prompts: Annotated[Path, typer.Option(help="A .jsonl file of prompts.")],
    router: Router = None,
    threshold: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="An exit threshold to try; may be repeated.")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="A kv_cache_strategy to try: exact, propagate, zero_pad; may be repeated.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="How far each prompt is continued at most.")] = 64,
    limit: Annotated[int, typer.Option(min=1, help="So many of the prompts, drawn at random.")] = PROMPTS,
    plot: Annotated[Path | None, typer.Option(help="Draw speed over agreement: a .png, .svg or .pdf file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Measure exits off, mode exact and mode fast at several thresholds, by turns: tokens per second and agreement."""
    from transformers.utils.logging import disable_progress_bar

    import TIDE
    from TIDE.calibration.prompts import load_prompts
    from TIDE.calibration.tune import THRESHOLDS
    from TIDE.plots.analysis import check_figure
    from TIDE.plots.tuning import plot_tuning

    disable_progress_bar()
    if plot is not None:
        check_figure(plot)
    source = router_path(model, router)
    loaded = TIDE.load_model(model)
    asked = load_prompts(prompts, loaded.tokenizer, limit)
    with TIDE.TIDE(loaded.model, source) as engine:
        found = TIDE.tune(engine, asked, new_tokens=new_tokens, thresholds=threshold or THRESHOLDS, strategies=strategy or None)
    if plot is not None:
        plot_tuning(found, plot)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.table())
