"""`tide inspect`: the contents of a router file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from TIDE.cli.model import load
from TIDE.cli.options import checked, flag, option
from TIDE.cli.router import check_router, router_path
from TIDE.hub import check_model

if TYPE_CHECKING:
    from TIDE.routing.router_file import RouterFile


def inspect(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            callback=checked(check_router),
            help="A router file, .safetensors or .pt, or an EAGLE-3 head: a folder or a hub id.",
        ),
    ],
    model: Annotated[
        str | None,
        option(
            "MODEL", "Also load this model, try the file on it, and print which runner runs its layers here.", check=check_model
        ),
    ] = None,
    everything: Annotated[bool, flag("--all", "Also print its configuration, training facts and figures.")] = False,
    as_json: Annotated[bool, flag("--json", "Print all contents as JSON.")] = False,
) -> None:
    """Print the contents of a router file or EAGLE-3 head. Model, exits, certificate and speed on the machine of calibration.

    \b
    Examples:
      tide inspect my.safetensors
      tide inspect my.safetensors --all
      tide inspect my.safetensors --model my-org/my-model
      tide inspect my-org/my-eagle3-head --model my-org/my-model
      tide inspect default --model default
      tide inspect my.safetensors --json
    """
    from TIDE.routing.source import load_router

    source = router_path("default", file)
    held, backend = (load_router(source), None) if model is None else _tried(model, source)
    if as_json:
        typer.echo(json.dumps(held.as_dict() | ({} if backend is None else {"backend": backend}), indent=2))
    else:
        typer.echo(held.summary(everything) + ("" if backend is None else f"\nhere: {backend}"))


def _tried(name: str, file: Path) -> tuple[RouterFile, str]:
    """Return a file as it is used with a model, and the runner of its layers in words, known after a few tokens."""
    import torch

    import TIDE

    model = load(name, exits=file).model
    with TIDE.TIDE(model, file) as engine:
        for _ in range(3):  # run eagerly, captured, replayed
            prompt = torch.full((1, 8), 1, device=model.device)
            engine.generate(prompt, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert engine.file is not None
        return engine.file, engine.backend
