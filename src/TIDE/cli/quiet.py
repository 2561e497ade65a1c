"""Silence for other libraries: commands show none of their warnings, and no progress bars for quick work.

A library that is already imported is set by its logger; one imported later reads its own environment variable, which a user
may have set to see more. Warnings of TIDE are one line each; progress bars remain for the work of TIDE and for downloads.
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
    """A log handler that prints one line on stderr per record."""

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        typer.echo(kind + " ".join(record.getMessage().split()), err=True)


LINES = _Lines()


def quiet() -> None:
    """Show the log of TIDE, and only errors of other libraries, without importing any of them."""
    warnings.simplefilter("ignore")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("TIDE").addHandler(LINES)  # added once, however often this is called


def without_loading_bars() -> None:
    """Disable the progress bars of transformers and of hub cache lookups."""
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # also disables those of the hub
    disable_progress_bars()
    for name in DOWNLOADS:
        enable_progress_bars(name)
