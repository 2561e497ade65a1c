"""The hub: whether it answers, found out in seconds and before anything is asked of it, and what reading data sets needs.

huggingface_hub tries again for a minute where there is no connection. One short request tells whether that is worth waiting
for; without an answer, what was downloaded before is used, and nothing else.
"""

from __future__ import annotations

import importlib.util

TIMEOUT = 5.0  # seconds


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


def check_datasets(source: str) -> None:
    """Make sure that what reads data sets of the hub is installed."""
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            f'{source!r} is neither a file here nor "self", and reading a data set needs the package datasets. '
            f"Install with: pip install 'tide-inference[datasets]'"
        )
