"""`tide inspect`: the contents of a router file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.errors import checked
from TIDE.cli.model import check_model, load


def inspect(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", exists=True, dir_okay=False, help="A router file, .safetensors or .pt.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            callback=checked(check_model),
            help="Also load this model, check that the file is for it, and print which runner runs its layers here.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the contents as JSON.")] = False,
) -> None:
    """Print the contents of a router file. Model, checkpoints, configuration, training facts and measured figures.

    \b
    Examples:
      tide inspect my.safetensors
      tide inspect my.safetensors --model my-org/my-model
      tide inspect my.safetensors --json
    """
    from TIDE.routing.router_file import RouterFile

    held = RouterFile.load(file)
    backend = None if model is None else _backend(model, file)
    if as_json:
        typer.echo(json.dumps(held.as_dict() | ({} if backend is None else {"backend": backend}), indent=2))
    else:
        typer.echo(held.summary() + ("" if backend is None else f"\nhere: {backend}"))


def _backend(name: str, file: Path) -> str:
    """Return the description of the runner of the model's layers, known after a few tokens."""
    import torch

    import TIDE

    model = load(name).model
    with TIDE.TIDE(model, file) as engine:
        for _ in range(3):  # run eagerly, captured, replayed
            prompt = torch.full((1, 8), 1, device=model.device)
            engine.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
        return engine.backend
