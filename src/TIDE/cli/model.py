"""The model of a command: its option, the check of its name, loading it, and the length of its answers."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from TIDE.cli.errors import WrongUsage, checked
from TIDE.cli.quiet import without_loading_bars
from TIDE.cli.router import check_fit
from TIDE.hub import GIVE, check_model, model_source

if TYPE_CHECKING:
    from TIDE.models.gguf import Loaded

PATIENCE = 3.0  # seconds before it is said what takes so long
HELP = "A hub id, a local path, or 'default'."
UNLESS_GIVEN = "A hub id, a local path, or 'default', the model used unless given."

ModelOption = Annotated[
    str,
    typer.Option("--model", metavar="MODEL", callback=checked(check_model), show_default=False, help=UNLESS_GIVEN),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Longest answer, in tokens.")]


def with_model(command: Callable[..., None]) -> Callable[..., None]:
    """Let a command take its `model` as the argument MODEL or as the option --model."""
    signature = inspect.signature(command, eval_str=True)
    default = signature.parameters["model"].default
    said, check = HELP if default is inspect.Parameter.empty else UNLESS_GIVEN, checked(check_model)
    argument = Annotated[str | None, typer.Argument(metavar="MODEL", callback=check, help=said)]
    option = Annotated[str | None, typer.Option("--model", metavar="MODEL", callback=check, help="Same as MODEL.")]
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in signature.parameters.values()
        if parameter.name != "model"
    ]

    @functools.wraps(command)
    def run(*, model: str | None, model_option: str | None, **given: Any) -> None:
        if model is not None and model_option is not None and model != model_option:
            raise WrongUsage(f"expected one model, found {model} and --model {model_option}. Leave one out.")
        chosen = next((name for name in (model, model_option, default) if name is not None), None)
        if chosen is inspect.Parameter.empty:
            raise WrongUsage(f"expected a model, found none. {GIVE}")
        command(model=chosen, **given)

    places = [
        inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=argument),
        inspect.Parameter("model_option", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option),
    ]
    run.__signature__ = signature.replace(parameters=[*places, *own])  # type: ignore[attr-defined]
    return run


def model_words(name: str) -> str:
    return "the default model" if name == "default" else name


def say(text: str, nl: bool = True) -> None:
    """Print what a command is doing."""
    typer.echo(text, err=True, nl=nl)


def is_watched() -> bool:
    return sys.stderr.isatty()


@contextmanager
def said_if_slow(text: str) -> Iterator[None]:
    """Tell who sits at a terminal what a command is doing, if it takes long."""
    note = threading.Timer(PATIENCE, say, [text])
    if is_watched():
        note.start()
    try:
        yield
    finally:
        note.cancel()


def load_quietly(name: str, exits: Path | None = None) -> Loaded:
    """Load a model for a command that says nothing before its answer, unless that takes long."""
    with said_if_slow(f"loading {model_words(name)}"):
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
