"""Sources of exits: a router file, a folder, or an id on the Hugging Face hub.

router.safetensors, router.pt      a router file
a folder, or owner/name            one with router.safetensors in it, or an EAGLE-3 head: config.json and weights
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

from TIDE.hub import broken_answer, hub_trouble, is_hub_id
from TIDE.routing.eagle3.files import read_config
from TIDE.routing.eagle3.imported import read_folder
from TIDE.routing.router_file import HUB_FILE, RouterFile
from TIDE.routing.storage import SUFFIXES


def load_router(source: str | Path) -> RouterFile:
    """Read exits; raise with the reason if they are not usable."""
    if is_hub_id(source, SUFFIXES):
        name = Path(source).as_posix()
        return _from_hub(name)
    path = Path(source)
    return _from_folder(path, None) if path.is_dir() else RouterFile.load(path)


def _from_folder(folder: Path, name: str | None) -> RouterFile:
    if (folder / HUB_FILE).is_file():
        return RouterFile.load(folder / HUB_FILE)
    return read_folder(folder, name)


def _from_hub(name: str) -> RouterFile:
    """Look at the small files first: a whole model would be fetched for nothing."""
    trouble = hub_trouble()
    folder = _downloaded(name, [HUB_FILE, "config.json"], trouble)
    if not (folder / HUB_FILE).is_file():
        read_config(folder)
        folder = _downloaded(name, ["config.json", "*.safetensors", "*.bin"], trouble)
    return _from_folder(folder, name)


def _downloaded(name: str, files: list[str], trouble: str | None) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=files, local_files_only=trouble is not None))
    except LocalEntryNotFoundError as problem:
        raise OSError(
            f"cannot load exits from {name!r}: there is no such file or folder here, the hub cannot be reached "
            f"({trouble or problem}), and it was not downloaded before. Check the connection, or give a file or folder."
        ) from problem
    except HfHubHTTPError as problem:
        is_missing = isinstance(problem, RepositoryNotFoundError)
        said = "there is no such repository, or it is not public" if is_missing else " ".join(str(problem).split())
        raise OSError(f"cannot load exits from {name!r}: {said}. Check the name, or give a file or a folder.") from problem
    except Exception as problem:  # the type depends on the HTTP library in use
        if (why := broken_answer(problem)) is None:
            raise
        raise OSError(f"cannot load exits from {name!r}: {why}. Try again, or give a file or a folder.") from problem
