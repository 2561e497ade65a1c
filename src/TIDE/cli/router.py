"""The router file of a command: its options, and the path they lead to."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from TIDE.cli.errors import WrongUsage
from TIDE.cli.files import check_target, json_kind
from TIDE.cli.options import flag, option
from TIDE.hub import is_hub_id

if TYPE_CHECKING:
    from TIDE.models.sizes import Sizes

SUFFIXES = (".safetensors", ".pt")


def check_router(name: str) -> None:
    """Raise if there are no exits of this name; a hub id is looked up when they are loaded."""
    if name != "default" and not Path(name).exists() and not is_hub_id(name, SUFFIXES):
        raise ValueError(
            f"there is no router file {name}. Make one with tide calibrate, or give 'default' for the shipped one."
        )
    path = Path(name)
    if path.is_file() and path.suffix == ".json":
        raise ValueError(
            f"{name} is no router file: it is {json_kind(path)}. Give one that ends in {' or '.join(SUFFIXES)}, or 'default'."
        )


check_new_router = partial(check_target, suffixes=SUFFIXES)
Router = Annotated[
    str | None,
    option(
        "FILE",
        "A router file, an EAGLE-3 head (folder or hub id), or 'default': the shipped one, used for the default model.",
        check=check_router,
    ),
]
NoExits = Annotated[bool, flag("--no-exits", "Run all layers for every token; needs no router file.")]


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
    if no_exits and router is not None:
        raise WrongUsage("--no-exits uses no router file. Leave out --router or --no-exits.")
    return None if no_exits else router_path(model, router, " Or go without: --no-exits.")


def check_fit(exits: Path, model: str, source: str) -> None:
    """Raise if a router file was made for a model of other sizes, which are known without loading this one.

    Args:
        source: the folder of a model that was downloaded before, if the hub is out of reach; otherwise its name.
    """
    import TIDE
    from TIDE.models.sizes import model_sizes

    if model == "default" and exits == Path(TIDE.default_router()):
        return
    name, made_for = _made_for(exits)
    sizes = model_sizes(source) if made_for is not None else None
    if made_for is not None and sizes is not None and made_for.differ(sizes):
        raise WrongUsage(
            f"{exits} was made for {name} ({made_for.describe()}), and {model} has {sizes.describe()}. Give the router file of "
            f"this model, or make one: tide calibrate {model}."
        )


def _made_for(exits: Path) -> tuple[str, Sizes | None]:
    """Return name and sizes of the model that a .safetensors file was made for; None: only loading it would tell."""
    from safetensors import SafetensorError, safe_open

    from TIDE.models.sizes import Sizes

    if not exits.is_file() or exits.suffix != ".safetensors":
        return "", None
    try:
        with safe_open(exits, framework="numpy") as file:
            made_for = json.loads((file.metadata() or {})["tide"])["fingerprint"]
        return made_for["name"], Sizes(made_for["num_layers"], made_for["hidden_dim"], made_for["vocab_size"])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):  # reading it as a router file says what is wrong
        return "", None


def exits_or_off(model: str, router: str | None, no_exits: bool) -> Path | None:
    """Return the router file of a command that runs without exits where there is none, and says so."""
    if router is None and model != "default" and not no_exits:
        said = f"there is no router file for {model}, so exits are off. Make one: tide calibrate {model}, then give --router."
        typer.echo(said, err=True)
        return None
    return exits_path(model, router, no_exits)
