"""Storage of a JSON document and tensors in one file.

    router.safetensors    tensors, and the document in the metadata under "tide"
    router.pt             {"tide": document, "tensors": {name: tensor}}, read as plain values only: no code runs

The same content gives the same bytes. One more tensor, "sha256", is the checksum of document and tensors, which detects
changed bytes; files of 0.3.0 have none. A file is written under another name and renamed when complete, so its path holds the
old file or the new one, never a partial one. Compressed matrices are int8 with a scale per row:

    "exits.8.head.down.weight"  (rows, columns) int8        "exits.8.head.down.weight.scale"  (rows,) fp32
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes

SUFFIXES = (".safetensors", ".pt")
KEY, CHECKSUM = "tide", "sha256"
SCALE = ".scale"
MOST_TENSORS = 20_000  # each takes time to read, also one without a number


class TooManyTensors(ValueError):
    """A file that would take long to read."""


class Stored(NamedTuple):
    """The contents of a file."""

    document: str  # JSON
    tensors: dict[str, torch.Tensor]
    checksum: torch.Tensor | None = None  # as stored in the file; None if it has none

    def digest(self) -> torch.Tensor:
        """Return the checksum of the contents, (32,) bytes."""
        found = hashlib.sha256(self.document.encode())
        for name in sorted(self.tensors):
            tensor = self.tensors[name].detach().cpu().contiguous()
            found.update(f"\0{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)

    @property
    def is_changed(self) -> bool:
        """True if the stored checksum does not match the contents."""
        return self.checksum is not None and not torch.equal(self.checksum, self.digest())


def check_suffix(path: Path) -> None:
    if path.suffix not in SUFFIXES:
        raise ValueError(f"a router file ends in .safetensors or .pt, found {path.name!r}. Name it router.safetensors.")


def write(path: Path, stored: Stored) -> None:
    """Write a file in the format of its suffix."""
    check_suffix(path)
    tensors = {name: stored.tensors[name].detach().cpu().contiguous().clone() for name in sorted(stored.tensors)}
    tensors[CHECKSUM] = stored.digest()
    if path.suffix == ".safetensors":
        content = safetensors_bytes(tensors, {KEY: stored.document})
    else:
        buffer = io.BytesIO()  # torch.save to a path would put the file's name into the archive
        torch.save({KEY: stored.document, "tensors": tensors}, buffer)
        content = buffer.getvalue()
    write_atomically(path, content)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a complete file to `path`, or leave `path` as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with unfinished.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def read(path: Path) -> Any:
    """Return `Stored`, with its checksum verified, or the contents of any other .pt file."""
    try:
        content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
        is_changed = isinstance(content, Stored) and content.is_changed
    except TooManyTensors as problem:
        raise ValueError(f"{path} was not loaded: {problem}. Get it again from where it came.") from problem
    except Exception as problem:  # a damaged file can fail in any way
        raise ValueError(
            f"{path} was not loaded: it is truncated, damaged, or holds more than tensors and plain values "
            f"({type(problem).__name__}). Make it again, or get it again from where it came."
        ) from problem
    if is_changed:
        raise ValueError(
            f"{path} was not loaded: its content was changed since it was saved (the checksum does not fit). Make it again, or "
            f"get it again from where it came."
        )
    return content


def _read_safetensors(path: Path) -> Any:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        if KEY not in metadata:
            return metadata
        if (count := len(file.keys())) > MOST_TENSORS:
            raise TooManyTensors(f"it holds {count} tensors, and a router file {MOST_TENSORS} at most")
        # cloned: the tensors are mapped to the file, which may change
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        return Stored(metadata[KEY], tensors, tensors.pop(CHECKSUM, None))


def _read_pt(path: Path) -> Any:
    content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or set(content) != {KEY, "tensors"}:
        return content
    tensors = content["tensors"]
    return Stored(content[KEY], tensors, tensors.pop(CHECKSUM, None) if isinstance(tensors, dict) else None)


def compress(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return matrices as int8 with scales, and everything else unchanged."""
    packed = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2:
            packed[name] = tensor
            continue
        scale = tensor.float().abs().amax(1) / 127
        packed[name] = (tensor.float() / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]).round().to(torch.int8)
        packed[name + SCALE] = scale
    return packed


def restore(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors before `compress`, matrices in bf16."""
    scales = {name for name in tensors if name.endswith(SCALE)}
    whole = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name in scales:
        of = name.removesuffix(SCALE)
        packed, scale = whole[of], tensors[name]
        if packed.dtype != torch.int8 or packed.ndim != 2 or scale.shape != packed.shape[:1]:
            raise ValueError(f"{name} does not fit {of}")
        whole[of] = (packed.float() * scale[:, None]).bfloat16()
    return whole


def plain(value: Any) -> Any:
    """Return a value in JSON types. A number that is not finite was not measured and becomes null."""
    if isinstance(value, dict):
        return {str(name): plain(of) for name, of in value.items()}
    if isinstance(value, list | tuple):
        return [plain(of) for of in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 1) == 0:  # a number of torch or numpy
        return plain(value.item())
    raise ValueError(
        f"a router file holds plain values (numbers, words, lists, names with values), found {type(value).__name__}."
    )
