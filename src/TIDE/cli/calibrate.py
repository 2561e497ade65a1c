"""`tide calibrate MODEL`: train exits for a model and save its router file."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Annotated, Literal

import typer

from TIDE.cli.model import load, with_model
from TIDE.cli.options import flag, option
from TIDE.cli.router import check_new_router, check_router, router_path
from TIDE.cli.settings import with_settings
from TIDE.config import SHORT_NAMES, TIDEConfig


@with_settings(**SHORT_NAMES)
@with_model
def calibrate(
    model: str,
    *,
    output: Annotated[
        Path, option("FILE", "Router file: .safetensors or .pt.", "--output", "-o", check=check_new_router)
    ] = Path("router.safetensors"),
    start: Annotated[
        str | None,
        option(
            "HEAD", "Train on the heads of a router file, or an EAGLE-3 head (folder or hub id).", "--from", check=check_router
        ),
    ] = None,
    epochs: Annotated[float | None, option("NUMBER", "Passes over the texts in head training.", min=0.1)] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None, option(None, "Dtype of the model; its own unless given.")
    ] = None,
    seed: Annotated[int, option("N", "The same seed gives the same file.")] = 0,
    quick: Annotated[bool, flag("--quick", "A CPU-sized run: few, short texts.")] = False,
    resume: Annotated[bool, flag("--resume", "Resume an interrupted calibration.")] = False,
    compress: Annotated[bool, flag("--compress", "Store exit heads in 8 bits at any cost.")] = False,
    as_json: Annotated[bool, flag("--json", "Print the contents of the file as JSON.")] = False,
    config: TIDEConfig,
) -> None:
    """Train exit heads and routers for a model. Three minutes on a GPU, or as many as it is given.

    \b
    Examples:
      tide calibrate my-org/my-model -o my.safetensors
      tide calibrate my-org/my-model --quick --json
      tide calibrate default --dataset texts.jsonl --minutes 10 -o own.safetensors
      tide calibrate my-org/my-model --from my-org/eagle3-head
    """
    logging.getLogger("TIDE").setLevel(logging.INFO)

    import TIDE

    try:
        file = TIDE.calibrate(
            *load(model, dtype),
            save_path=output,
            config=config,
            seed=seed,
            quick=quick,
            resume=resume,
            compress=compress or None,
            epochs=epochs,
            start=None if start is None else router_path(model, start),
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"Nothing was written to {output}. Go on with --resume.") from None
    typer.echo(json.dumps(file.as_dict()) if as_json else f"{file.summary()}\n\nwritten: {output}")
