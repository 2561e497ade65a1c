"""The `tide` command, run inside the test's own process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from TIDE.cli.app import app


def tide(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
