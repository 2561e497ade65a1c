"""The `tide` command. One file per subcommand; this one only gathers them."""

from __future__ import annotations

import typer

import TIDE
from TIDE.cli.analyze import analyze
from TIDE.cli.bench import bench
from TIDE.cli.calibrate import calibrate
from TIDE.cli.certify import certify
from TIDE.cli.chat import chat
from TIDE.cli.demo import demo
from TIDE.cli.errors import Commands
from TIDE.cli.eval import eval
from TIDE.cli.export import export
from TIDE.cli.generate import generate
from TIDE.cli.inspect import inspect
from TIDE.cli.quiet import quiet
from TIDE.cli.report import report
from TIDE.cli.serve import serve
from TIDE.cli.tune import tune

app = typer.Typer(cls=Commands, pretty_exceptions_enable=False, rich_markup_mode=None)
for command in (demo, calibrate, generate, chat, serve, tune, certify, analyze, bench, eval, inspect, export, report):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tide-inference {TIDE.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _main(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
    debug: bool = typer.Option(
        False, "--debug", help="Show tracebacks (also accepted after the subcommand)."
    ),  # read by Commands
) -> None:
    """TIDE: faster decoding for a frozen causal LM, which does not run every layer for every token.

    \b
    Examples:
      tide demo
      tide generate "Why is the sky blue?" --depth
      tide calibrate my-org/my-model -o my.safetensors
      tide chat my-org/my-model --router my.safetensors
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)
    quiet()


def main() -> None:
    app()


if __name__ == "__main__":
    main()
