"""Which router file a command works with: the option, and what it comes to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Router = Annotated[
    str | None, typer.Option(help="A router file, or 'default': the shipped one, taken for the default model unless given.")
]


def router_path(model: str, router: str | None) -> Path:
    """The file asked for; the shipped one for "default", and for the default model where none is given."""
    import TIDE

    if router == "default" or (router is None and model == "default"):
        return Path(TIDE.default_router())
    if router is None:
        raise ValueError(f"expected a router file for {model}: give --router FILE, or make one: tide calibrate {model}")
    return Path(router)
