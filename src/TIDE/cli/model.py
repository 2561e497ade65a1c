"""The model a command works with: the option, what can be said of it at once, and loading it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from TIDE.cli.errors import checked

if TYPE_CHECKING:
    from TIDE.models.load import Loaded

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HELP = "'default', a hub id, or a local path."


def check_model(name: str) -> None:
    """Raise where no model can be behind a name; a hub id is looked up when the model is loaded."""
    if name == "default" or Path(name).exists():
        return
    if name.endswith(".gguf") or name.startswith(".") or not HUB_ID.fullmatch(name):
        raise ValueError(f"there is no {name}. Give a folder with a model, a .gguf file, a hub id, or 'default'.")


Model = Annotated[str, typer.Argument(callback=checked(check_model), help=HELP)]
ModelOption = Annotated[str, typer.Option("--model", callback=checked(check_model), help=HELP)]


def load(name: str, dtype: str | None = None) -> Loaded:
    """The model and its tokenizer, without a bar for its tensors."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    import TIDE

    disable_progress_bar()
    return TIDE.load_model(name, dtype=None if dtype is None else getattr(torch, dtype))
