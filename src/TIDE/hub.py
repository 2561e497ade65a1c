"""Access to the hub: a quick test of the connection, the source of a model, and the check for the package datasets.

Without a connection huggingface_hub retries for a minute. One short request, made first, avoids that wait; if it fails, only
earlier downloads are used.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from TIDE.extras import install_command

TIMEOUT = 5.0  # seconds
EXPECTED = "expected 'default', a folder with a model, a .gguf file, or a hub id that can be reached"
HTTP_LIBRARIES = {"httpx", "httpx2", "requests"}  # that versions of huggingface_hub use
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
GGUF = b"GGUF"  # how such a file begins
GIVE = "Give a folder with a model, a .gguf file, a hub id, or 'default'."


def check_model(name: str) -> None:
    """Raise if no model can have this name; a hub id is looked up when the model is loaded."""
    path = Path(name)
    if name == "default" or (name and path.is_dir()):
        return
    if path.is_file() and name.endswith(".gguf"):
        with path.open("rb") as file:
            if file.read(len(GGUF)) != GGUF:
                raise ValueError(
                    f"{name} is not a GGUF file, or it is damaged (it does not begin with GGUF). Download it again."
                )
        return
    if path.is_file():
        raise ValueError(f"{name} is a file, but not a .gguf file. {GIVE}")
    if name.endswith(".gguf") or name.startswith(".") or not MODEL_ID.fullmatch(name):
        raise FileNotFoundError(f"there is no {name or 'model without a name'}. {GIVE}")


def is_hub_id(source: str | Path, suffixes: tuple[str, ...]) -> bool:
    """Return True if a source is looked for on the hub: nothing here has its name, and no file with these suffixes could."""
    name = str(source)
    return not Path(name).exists() and Path(name).suffix not in suffixes and HUB_ID.fullmatch(name) is not None


def hub_trouble() -> str | None:
    """Return why the hub cannot be reached, in a few words; None if it can."""
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT)
    except Exception as problem:  # the type depends on the HTTP library in use
        return f"{constants.ENDPOINT} does not answer: {problem or type(problem).__name__}"
    return None


def broken_answer(problem: Exception) -> str | None:
    """Return what was wrong with an answer of the hub, in a few words; None: the problem is another one."""
    from huggingface_hub import constants

    if isinstance(problem, json.JSONDecodeError):
        return f"what {constants.ENDPOINT} sent is not what a hub sends; a proxy may have answered in its place"
    libraries = {kind.__module__.partition(".")[0] for kind in type(problem).__mro__}
    if libraries & HTTP_LIBRARIES:
        said = " ".join(str(problem).split()) or type(problem).__name__
        return f"the connection to {constants.ENDPOINT} broke ({said.rstrip('.')})"
    return None


def model_source(name: str, local_files_only: bool = False, **options: Any) -> str:
    """Return the folder or hub id to load a model from; if the hub is out of reach, the folder of an earlier download.

    Args:
        local_files_only: the hub is not to be reached.
        options: of `snapshot_download`, as the revision.
    """
    if Path(name).is_dir():
        return name
    trouble = "local_files_only is set" if local_files_only else hub_trouble()
    if trouble is None:
        return name
    from huggingface_hub import snapshot_download

    try:
        # transformers would still contact the hub for some files
        return str(snapshot_download(name, local_files_only=True, **options))
    except (OSError, ValueError) as problem:  # not downloaded, or not a valid hub id
        raise OSError(
            f"cannot load {name!r}: {EXPECTED}. The hub cannot be reached ({trouble}), and it was not downloaded before."
        ) from problem


def check_dataset(source: str) -> None:
    """Raise if a source of texts is a missing file, or a data set without the package to read it."""
    is_file = source.endswith((".txt", ".jsonl"))
    if is_file and not Path(source).is_file():
        raise ValueError(f"there is no file {source}. Give a .txt or .jsonl file, a data set of the hub, or 'self'.")
    if source.strip() and source != "self" and not is_file:
        check_datasets(source)


def check_datasets(source: str) -> None:
    """Raise if the package that reads data sets of the hub is not installed."""
    if importlib.util.find_spec("datasets") is None:
        raise ImportError(
            f'{source!r} is neither a file here nor "self", and reading a data set needs the package datasets. '
            f"Install with: {install_command('datasets')}"
        )
