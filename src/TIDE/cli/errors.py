"""Errors as one clear line instead of a traceback, with an exit code:

    0  fine        1  something went wrong        2  wrong usage, found before any work        130  interrupted

`tide --debug …` shows the traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

EXPECTED = (OSError, ValueError, TypeError, ImportError, RuntimeError, FloatingPointError)  # their messages tell the next step
UsageError: Any = typer.BadParameter.__base__  # of typer's own click or of click, as the version has it


class WrongUsage(typer.BadParameter):
    """An error in the command line, found before any work."""

    def format_message(self) -> str:
        return self.message


class Commands(TyperGroup):
    """The group of `tide` commands; an error is one line on stderr and an exit code."""

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        if debug := "--debug" in given:
            given.remove("--debug")
        try:
            code = super().main(given, *more, **options | {"standalone_mode": False})
        except Exception as problem:
            wrong_usage = isinstance(problem, UsageError)
            if debug and not wrong_usage:
                raise
            typer.echo(message_of(problem), err=True)
            code = 2 if wrong_usage else 1
        sys.exit(code)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stopped:
            typer.echo(f"\ninterrupted. {stopped}".rstrip(), err=True)
            raise typer.Exit(130) from None


def message_of(problem: Exception) -> str:
    """Return an error as one line, with the next step."""
    if isinstance(problem, UsageError):
        message = problem.format_message().replace("Value error, ", "")  # a prefix of pydantic
        path = problem.ctx.command_path if problem.ctx else "tide"
        message = f"{message}{'' if message.endswith(('.', '?')) else '.'} See {path} --help."
    elif isinstance(problem, EXPECTED):
        message = str(problem)
    else:
        advice = "This should not happen: run again with --debug, and report what it shows."
        message = f"{type(problem).__name__}: {problem}. {advice}"
    return f"error: {' '.join(message.split())}"
