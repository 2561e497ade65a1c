"""The `tide` command. One file per subcommand; this one only gathers them."""

from __future__ import annotations

import os
import sys

import typer

import TIDE
from TIDE.cli.analyze import analyze
from TIDE.cli.bench import bench
from TIDE.cli.calibrate import calibrate
from TIDE.cli.certify import certify
from TIDE.cli.chat import chat
from TIDE.cli.demo import demo
from TIDE.cli.errors import DEBUG
from TIDE.cli.generate import generate
from TIDE.cli.inspect import inspect
from TIDE.cli.report import report
from TIDE.cli.tune import tune

app = typer.Typer(help="TIDE: a frozen causal LM that does not run every layer for every token.", no_args_is_help=True)
for command in (demo, calibrate, generate, chat, tune, certify, analyze, bench, report, inspect):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tide-inference {TIDE.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(False, "--debug", help="Show tracebacks; also behind a command."),
) -> None:
    if debug:
        os.environ[DEBUG] = "1"


def main() -> None:
    if "--debug" in sys.argv[1:]:
        sys.argv.remove("--debug")
        os.environ[DEBUG] = "1"
    app()


if __name__ == "__main__":
    main()
