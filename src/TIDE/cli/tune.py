"""`tide tune MODEL`: speed and agreement of every setting on the user's prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.files import Prompts
from TIDE.cli.model import MaxNewTokens, load, with_model
from TIDE.cli.options import each_of, flag, option
from TIDE.cli.router import Router, router_path
from TIDE.config import KV_CACHE_STRATEGIES
from TIDE.plots.figure import check_figure
from TIDE.plots.tuning import plot_tuning

PROMPTS = 16


@with_model
def tune(
    model: str,
    prompts: Prompts,
    router: Router = None,
    threshold: Annotated[
        list[float] | None, option("NUMBER", "An exit threshold to try; may be repeated.", min=0, max=1)
    ] = None,
    strategy: Annotated[
        list[str] | None,
        option(
            "STRATEGY",
            "A kv_cache_strategy to try: exact, propagate, zero_pad; may be repeated.",
            check=each_of(KV_CACHE_STRATEGIES),
        ),
    ] = None,
    max_new_tokens: MaxNewTokens = 64,
    limit: Annotated[int, option("N", "Use N of the prompts, drawn at random.", min=1)] = PROMPTS,
    figure: Annotated[
        Path | None, option("FILE", "Draw speed over agreement: a .png, .svg or .pdf file.", check=check_figure)
    ] = None,
    as_json: Annotated[bool, flag("--json", "Print the results as JSON.")] = False,
) -> None:
    """Measure speed and agreement of every setting on your prompts. Exits off, mode exact and mode fast are interleaved.

    \b
    Examples:
      tide tune default --prompts prompts.jsonl --figure tune.png
      tide tune my-org/my-model --router my.safetensors --prompts prompts.jsonl
      tide tune default --prompts prompts.jsonl --threshold 0.9 --threshold 0.6
    """
    source = router_path(model, router)

    import TIDE
    from TIDE.calibration.prompts import load_prompts
    from TIDE.calibration.tune import THRESHOLDS

    loaded = load(model, exits=source)
    asked = load_prompts(prompts, loaded.tokenizer, limit)
    with TIDE.TIDE(loaded.model, source) as engine:
        found = TIDE.tune(
            engine, asked, max_new_tokens=max_new_tokens, thresholds=threshold or THRESHOLDS, strategies=strategy or None
        )
    if figure is not None:
        plot_tuning(found, figure)
    typer.echo(json.dumps(found.as_dict(), indent=2) if as_json else found.table())
