"""`tide calibrate MODEL`: train exits for a model and save its router file."""

from __future__ import annotations

import json
import logging

import typer

from TIDE.cli.errors import one_line
from TIDE.config import TIDEConfig

DEFAULTS = TIDEConfig()


@one_line
def calibrate(
    model: str = typer.Argument(..., help="'default', a hub id, or a local path."),
    output: str = typer.Option("router.safetensors", "--output", "-o", help="Router file: .safetensors or .pt."),
    samples: int = typer.Option(DEFAULTS.calibration_samples, min=20, help="Texts."),
    dataset: str = typer.Option(DEFAULTS.calibration_dataset, help="'self', 'wikitext', a hub data set, a .txt or .jsonl."),
    strategy: str = typer.Option(DEFAULTS.exit_strategy, help="memory, lens or identity."),
    checkpoint_interval: int = typer.Option(DEFAULTS.checkpoint_interval, min=1, help="Candidate checkpoints every N layers."),
    min_layers: int = typer.Option(None, min=0, help="Smallest depth of an exit."),
    bottleneck: int = typer.Option(DEFAULTS.router_bottleneck_dim, min=1, help="Router width."),
    label: str = typer.Option(DEFAULTS.label, help="What routers predict: agreement or cosine."),
    epochs: float = typer.Option(None, min=0.1, help="How often heads see every text."),
    dtype: str = typer.Option(None, help="float32, bfloat16 or float16; the model's own unless given."),
    seed: int = typer.Option(0, help="The same seed gives the same file."),
    quick: bool = typer.Option(False, "--quick", help="A CPU-sized run: few, short texts."),
    resume: bool = typer.Option(False, "--resume", help="Go on after an interruption."),
    compress: bool = typer.Option(False, "--compress", help="Store heads in 8 bits."),
    as_json: bool = typer.Option(False, "--json", help="Print what the file holds as JSON."),
) -> None:
    """Train exit heads and routers for a model; a few minutes on a GPU."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    import TIDE

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    disable_progress_bar()
    try:
        config = TIDEConfig(
            calibration_samples=samples,
            calibration_dataset=dataset,
            exit_strategy=strategy,
            checkpoint_interval=checkpoint_interval,
            min_layers=min_layers,
            router_bottleneck_dim=bottleneck,
            label=label,
        )
        if dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, found {dtype!r}.")
        loaded = TIDE.load_model(model, dtype=None if dtype is None else getattr(torch, dtype))
        file = TIDE.calibrate(
            *loaded, save_path=output, config=config, seed=seed, quick=quick, resume=resume, compress=compress, epochs=epochs
        )
    except KeyboardInterrupt:
        typer.echo(f"\ninterrupted; nothing was written to {output}. Go on with --resume.", err=True)
        raise typer.Exit(130) from None
    typer.echo(json.dumps(file.as_dict()) if as_json else f"{file.summary()}\n\nwritten: {output}")
