"""The model of a command: its option, the check of its name, loading it, and the length of its answers."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from TIDE.cli.errors import WrongUsage
from TIDE.cli.options import checked, option
from TIDE.cli.quiet import without_loading_bars
from TIDE.cli.router import check_fit
from TIDE.cli.settings import with_options
from TIDE.hub import GIVE, check_model, model_source

if TYPE_CHECKING:
    from TIDE.models.gguf import Loaded

PATIENCE = 3.0  # seconds before the notice of slow work
HELP = "A hub id, a local path, or 'default'."
UNLESS_GIVEN = "A hub id, a local path, or 'default', the model used unless given."

ModelOption = Annotated[str, option("MODEL", UNLESS_GIVEN, "--model", check=check_model, show_default=False)]
MaxNewTokens = Annotated[int, option("N", "Longest answer, in tokens.", "--max-new-tokens", min=1)]


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its `model` as the argument MODEL or as the option --model."""
    default = inspect.signature(command).parameters["model"].default
    help, check = HELP if default is inspect.Parameter.empty else UNLESS_GIVEN, checked(check_model)
    argument = Annotated[str | None, typer.Argument(metavar="MODEL", callback=check, help=help)]
    option = Annotated[str | None, typer.Option("--model", metavar="MODEL", callback=check, help="Same as MODEL.")]

    def chosen(model: str | None, model_option: str | None) -> str:
        if model is not None and model_option is not None and model != model_option:
            raise WrongUsage(f"expected one model, found {model} and --model {model_option}. Leave one out.")
        name: Any = next((name for name in (model, model_option, default) if name is not None), None)
        if name is inspect.Parameter.empty:
            raise WrongUsage(f"expected a model, found none. {GIVE}")
        return name

    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in (("model", argument), ("model_option", option))
    ]
    return with_options("model", options, chosen, is_first=True)(command)


def model_words(name: str) -> str:
    return "the default model" if name == "default" else name


def say(text: str, nl: bool = True) -> None:
    """Print what a command is doing."""
    typer.echo(text, err=True, nl=nl)


def is_watched() -> bool:
    return sys.stderr.isatty()


@contextmanager
def notify_if_slow(text: str) -> Iterator[None]:
    """Print what a command is doing if it takes long, on a terminal only."""
    timer = threading.Timer(PATIENCE, say, [text])
    if is_watched():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def load_quietly(name: str, exits: Path | None = None) -> Loaded:
    """Load a model for a command that says nothing before its answer, unless that takes long."""
    with notify_if_slow(f"loading {model_words(name)}"):
        return load(name, exits=exits)


def load(name: str, dtype: str | None = None, trust_remote_code: bool = False, exits: Path | None = None) -> Loaded:
    """Load the model and its tokenizer, without a loading bar. Fail at once if the hub is needed and not reachable.

    Args:
        exits: a router file for it; one of another model is refused before the model is loaded.
    """
    source = name if name == "default" or name.endswith(".gguf") else model_source(name)
    if exits is not None:
        check_fit(exits, name, source)

    import torch

    import TIDE

    without_loading_bars()
    wanted = None if dtype is None else getattr(torch, dtype)
    return TIDE.load_model(name, dtype=wanted, trust_remote_code=trust_remote_code)
