"""Options of commands that are fields of `TIDEConfig`: types, defaults, choices and help come from there."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, Literal

from TIDE.cli.errors import WrongUsage
from TIDE.cli.options import flag, option
from TIDE.config import CHOICES, TIDEConfig
from TIDE.hub import check_dataset

RUNNING = ("mode", "exit_threshold", "min_layers", "kv_cache_strategy", "max_pending", "max_exit_share", "prefill_exits")
CHECKS = {"calibration_dataset": check_dataset}
METAVARS = {int: "N", float: "NUMBER", str: "NAME"}
HELP = {  # if the first clause of a field's description is not enough
    "mode": "exact: the text of the full model; fast: exit predictions, unverified. Unless given: exact, or fast with "
    "--kv-cache-strategy propagate or zero_pad, or --prefill-exits.",
    "prefill_exits": "Exits in the prompt, for mode fast: calibrate fits them, other commands use them where they were fitted.",
    "cache_gib": "Most GiB of K/V: on a GPU of all texts, unless given nine tenths of its free memory; on a CPU of texts that "
    "have ended and may begin others, unless given a third of what the weights take, from 0.125 to 1.",
    "kv_cache_strategy": "Treatment of skipped layers: run later, K/V written from the exit state, or K/V of zeros.",
}


def descriptions() -> dict[str, str]:
    """Return the description of each field in the docstring of `TIDEConfig`, as one line."""
    text = inspect.cleandoc(TIDEConfig.__doc__ or "").split("Attributes:\n")[1]
    found = re.findall(r"^    (\w+): (.+?)(?=^    \w+: |\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: " ".join(said.split()) for name, said in found}


def with_settings(*names: str, **renamed: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of these fields; it receives them as one `config`.

    Args:
        renamed: option -> field, for options with a shorter name.
    """
    fields = {name: name for name in names} | renamed

    def make(**given: Any) -> TIDEConfig:
        return TIDEConfig(**{fields[name]: value for name, value in given.items()})

    return with_options("config", [_option(name, field) for name, field in fields.items()], make)


def with_options(
    name: str, options: list[inspect.Parameter], make: Callable[..., object], is_first: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command options that it receives as one object, the parameter `name`.

    Args:
        make: makes the object of the values; its `ValueError` is wrong usage.
        is_first: the options come before the other parameters of the command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        parameters = [*options, *others] if is_first else [*others, *options]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            try:
                made = make(**{option.name: given.pop(option.name) for option in options})
            except ValueError as problem:
                raise WrongUsage(str(problem)) from None
            command(**given, **{name: made})

        by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = signature.replace(parameters=by_keyword)  # type: ignore[attr-defined]
        return run

    return decorate


def _option(name: str, field: str) -> inspect.Parameter:
    """Return the option of a field."""
    said = re.split(r"[.;] ", descriptions()[field].removeprefix("calibration: "))[0].rstrip(".")
    said = HELP.get(field, f"{said[0].upper()}{said[1:]}.")
    default = getattr(TIDEConfig(), field)
    if isinstance(default, bool):
        annotation: Any = Annotated[bool, flag(f"--{name.replace('_', '-')}", said)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    kind: Any = Literal[CHOICES[field]] if field in CHOICES else typing.get_type_hints(TIDEConfig)[field]
    kind = kind | None if default is None else kind
    metavar = None if field in CHOICES else next(METAVARS[own] for own in (kind, *typing.get_args(kind)) if own in METAVARS)
    annotation = Annotated[kind, option(metavar, said, check=CHECKS.get(field))]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
