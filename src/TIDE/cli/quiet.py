"""What other libraries say on stderr is left out of every command: their warnings, and bars for what takes no time.

A library that is there already is told by its logger; one that is imported later reads its own environment variable, which a
user may have set to see more. Warnings of TIDE are a line each; bars stay for what TIDE does, and for real downloads.
"""

from __future__ import annotations

import logging
import os
import warnings

import typer

LIBRARIES = ("transformers", "huggingface_hub", "datasets", "accelerate", "torch", "torchao", "bitsandbytes", "numba", "httpx")
ENVIRONMENT = {  # of libraries that set the level of their logger when they are imported
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "DATASETS_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TORCH_LOGS": "-torch",  # errors only
}
DOWNLOADS = ("huggingface_hub.http_get", "huggingface_hub.xet_get")


class _Lines(logging.Handler):
    """A line on stderr for each record."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        typer.echo(kind + " ".join(record.getMessage().split()), err=True)


LINES = _Lines()


def quiet() -> None:
    """Hear TIDE, and of other libraries only errors. Nothing is imported for it."""
    warnings.simplefilter("ignore")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("TIDE").addHandler(LINES)  # once, however often it is asked for


def without_loading_bars() -> None:
    """Leave out the bars of transformers and of looking through the hub's cache."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # all of the hub's too
    disable_progress_bars()
    for name in DOWNLOADS:
        enable_progress_bars(name)
