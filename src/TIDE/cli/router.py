"""The router file of a command: its options, and the path they lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.errors import WrongUsage, checked
from TIDE.cli.files import check_target
from TIDE.hub import is_hub_id

SUFFIXES = (".safetensors", ".pt")


def check_router(name: str) -> None:
    """Raise if there are no exits of this name; a hub id is looked up when they are loaded."""
    if name != "default" and not Path(name).exists() and not is_hub_id(name, SUFFIXES):
        raise ValueError(
            f"there is no router file {name}. Make one with tide calibrate, or give 'default' for the shipped one."
        )


def check_new_router(path: Path) -> None:
    check_target(path, SUFFIXES)


Router = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=checked(check_router),
        help="A router file, an EAGLE-3 head (folder or hub id), or 'default': the shipped one, used for the default model.",
    ),
]
NoExits = Annotated[bool, typer.Option("--no-exits", help="Run all layers for every token; needs no router file.")]


def router_path(model: str, router: str | None, otherwise: str = "") -> Path:
    """Return the path of the router file: the shipped one for "default", and for the default model if none is given.

    Args:
        otherwise: an alternative for users without a file, added to the error message.
    """
    import TIDE

    if router == "default" or (router is None and model == "default"):
        return Path(TIDE.default_router())
    if router is None:
        raise WrongUsage(
            f"expected a router file for {model}: give --router FILE, or make one: tide calibrate {model}.{otherwise}"
        )
    return Path(router)


def exits_path(model: str, router: str | None, no_exits: bool) -> Path | None:
    """Return the router file of a command that has --no-exits; None with that option."""
    return None if no_exits else router_path(model, router, " Or go without: --no-exits.")
