"""The `tide` command. One file per subcommand; this one only gathers them."""

from __future__ import annotations

import typer

import TIDE
from TIDE.cli.analyze import analyze
from TIDE.cli.calibrate import calibrate
from TIDE.cli.certify import certify
from TIDE.cli.demo import demo
from TIDE.cli.inspect import inspect
from TIDE.cli.tune import tune

app = typer.Typer(help="TIDE: a frozen causal LM that does not run every layer for every token.", no_args_is_help=True)
app.command()(analyze)
app.command()(demo)
app.command()(calibrate)
app.command()(certify)
app.command()(tune)
app.command()(inspect)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"tide-inference {TIDE.__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    app()


if __name__ == "__main__":
    main()
