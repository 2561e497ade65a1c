"""Options of commands, as typer takes them, and checks of their values before any work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer


def option(metavar: str | None, help: str, *names: str, check: Callable[[Any], Any] | None = None, **limits: Any) -> Any:
    """Return an option whose value is checked."""
    return typer.Option(*names, metavar=metavar, help=help, callback=None if check is None else checked(check), **limits)


def flag(name: str, help: str) -> Any:
    return typer.Option(name, help=help)


def checked(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a typer callback that runs `check` on a value; its errors become usage errors."""

    def callback(value: Any) -> Any:
        try:
            if value is not None:
                check(value)
        except (ValueError, OSError) as problem:
            raise typer.BadParameter(str(problem)) from None
        return value

    return callback


def each_of(names: Sequence[str], other: str = "") -> Callable[[list[str]], None]:
    """Return a check of a repeated option, whose values are among `names` or `other`."""

    def check(values: list[str]) -> None:
        if unknown := sorted({*values} - {*names, other}):
            raise ValueError(f"expected {', '.join(names)}{other and f' or {other}'}, found {', '.join(unknown)}.")

    return check
