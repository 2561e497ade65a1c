"""The hub: whether it answers, found out in seconds and before anything is asked of it, and what reading data sets needs.

huggingface_hub tries again for a minute where there is no connection. One short request tells whether that is worth waiting
for; without an answer, what was downloaded before is used, and nothing else.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

TIMEOUT = 5.0  # seconds
EXPECTED = "expected 'default', a folder with a model, a .gguf file, or a hub id that can be reached"


def hub_trouble() -> str | None:
    """Return why the hub cannot be reached, in a few words; None: it answers."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as problem:  # of whichever library carries the request
        return f"{constants.ENDPOINT} does not answer: {problem or type(problem).__name__}"
    return None


def model_source(name: str) -> str:
    """Return where to load a model from: a folder or hub id as it is; without the hub, the folder of an earlier download."""
    if Path(name).is_dir():
        return name
    trouble = hub_trouble()
    if trouble is None:
        return name
    from huggingface_hub import snapshot_download

    try:
        # not left to transformers, which would try to reach the hub for some files all the same
        return str(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as problem:  # nothing there, or no name that a hub could have
        raise OSError(
            f"cannot load {name!r}: {EXPECTED}. The hub cannot be reached ({trouble}), and it was not downloaded before."
        ) from problem


def check_datasets(source: str) -> None:
    """Make sure that what reads data sets of the hub is installed."""
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            f'{source!r} is neither a file here nor "self", and reading a data set needs the package datasets. '
            f"Install with: pip install 'tide-inference[datasets]'"
        )
