"""One clear line instead of a traceback; `tide --debug …` shows the traceback."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import typer

EXPECTED = (OSError, ValueError, TypeError, ImportError, FloatingPointError)  # what we raise with the next step in it
DEBUG = "TIDE_DEBUG"


def one_line(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose errors are a line and an exit code: 1, or 130 where it was interrupted."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("\ninterrupted.", err=True)
            raise typer.Exit(130) from None
        except EXPECTED as problem:
            if os.environ.get(DEBUG):
                raise
            typer.echo(f"error: {' '.join(str(problem).split())}", err=True)
            raise typer.Exit(1) from None

    return run
