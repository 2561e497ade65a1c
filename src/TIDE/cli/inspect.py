"""`tide inspect`: what a router file holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def inspect(
    file: Annotated[Path, typer.Argument(help="A router file, .safetensors or .pt.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print what a router file holds: model, checkpoints, configuration, training facts and measured figures."""
    from TIDE.routing.router_file import RouterFile

    try:
        held = RouterFile.load(file)
    except (OSError, ValueError) as problem:
        typer.echo(str(problem), err=True)
        raise typer.Exit(1) from problem
    typer.echo(json.dumps(held.as_dict(), indent=2) if as_json else held.summary())
