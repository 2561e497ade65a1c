"""Options of commands that are fields of `TIDEConfig`: names, types, defaults and help come from there."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from TIDE.config import TIDEConfig

RUNNING = ("mode", "exit_threshold", "min_layers", "kv_cache_strategy", "max_pending", "max_exit_share")


def descriptions() -> dict[str, str]:
    """What the docstring of `TIDEConfig` says of each field, in one line."""
    text = inspect.cleandoc(TIDEConfig.__doc__ or "").split("Attributes:\n")[1]
    found = re.findall(r"^    (\w+): (.+?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(said.split()) for name, said in found}


def with_settings(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these fields; it takes what they come to as `config`."""
    types, said = typing.get_type_hints(TIDEConfig), descriptions()

    def option(name: str) -> inspect.Parameter:
        first = re.split(r"[.;] ", said[name])[0]
        annotation = Annotated[types[name], typer.Option(help=first)]  # type: ignore[valid-type]
        default = getattr(TIDEConfig(), name)
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for parameter in signature.parameters.values() if parameter.name != "config"]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            config = TIDEConfig(**{name: given.pop(name) for name in names})
            command(**given, config=config)

        run.__signature__ = signature.replace(parameters=[*own, *map(option, names)])  # type: ignore[attr-defined]
        return run

    return decorate
