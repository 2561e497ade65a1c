"""Files that commands read and write: what is wrong with one is said before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from TIDE.cli.errors import checked


def check_target(path: Path, suffixes: tuple[str, ...]) -> None:
    """Raise where no such file could be written."""
    if path.suffix not in suffixes:
        raise ValueError(f"expected a file that ends in {' or '.join(suffixes)}, found {path.name!r}.")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} to. Make it first.")


def check_prompts(path: Path) -> None:
    if path.suffix != ".jsonl":
        raise ValueError(f"expected a .jsonl file with a prompt a line, found {path.name!r}.")


def check_dataset(source: str) -> None:
    """Raise where a source of texts is a file that is not there."""
    if source.endswith((".txt", ".jsonl")) and not Path(source).is_file():
        raise ValueError(f"there is no file {source}. Give a .txt or .jsonl file, a data set of the hub, or 'self'.")


Prompts = Annotated[
    Path,
    typer.Option(
        exists=True, dir_okay=False, callback=checked(check_prompts), help="A .jsonl file: an object with 'prompt' a line."
    ),
]
PromptFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="A prompt per line, or .jsonl with 'prompt' or 'turns'.")
]
