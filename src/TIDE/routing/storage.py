"""Storage of a JSON document and tensors in one file.

    router.safetensors    tensors, and the document in the metadata under "tide"
    router.pt             {"tide": document, "tensors": {name: tensor}}, read as plain values only: no code runs

The same content gives the same bytes. One more tensor, "sha256", is the checksum of document and tensors, which detects
changed bytes; files of 0.3.0 have none. A file is written under another name and renamed when complete, so its path holds the
old file or the new one, never a partial one. Compressed matrices are int8 with a scale per row:

    "exits.8.head.down.weight"  (rows, columns) int8        "exits.8.head.down.weight.scale"  (rows,) fp32

A file may come from a stranger: it takes no more memory than a few times its size, and little time to refuse.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import secrets
import zipfile
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save as safetensors_bytes

SUFFIXES = (".safetensors", ".pt")
KEY, CHECKSUM = "tide", "sha256"
SCALE = ".scale"
MAX_TENSORS = 10_000  # an exit at each of 126 layers has about 2,500
MAX_SHOWN = 300  # characters of a file in an error message


class Refused(ValueError):
    """A file that is not read, and why."""


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

    def check(self) -> None:
        """Raise if the tensors cannot be used, or the stored checksum does not match the contents."""
        if not are_whole(self.tensors.values()):
            raise Refused("expected tensors that have each a number of their own in the file, found others")
        if self.checksum is not None and not torch.equal(self.checksum, self.digest()):
            raise Refused("its content was changed since it was saved (the checksum does not fit)")


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
        if isinstance(content, Stored):
            content.check()
    except Refused as problem:
        raise ValueError(f"{path} was not loaded: {problem}. Make it again, or get it again from where it came.") from problem
    except Exception as problem:  # a damaged file can fail in any way
        raise ValueError(
            f"{path} was not loaded: it is truncated, damaged, or holds more than tensors and plain values "
            f"({type(problem).__name__}). Make it again, or get it again from where it came."
        ) from problem
    return content


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a .safetensors file."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        _check_count(len(names))
        # cloned: the tensors are mapped to the file, which may change
        return {name: file.get_tensor(name).clone() for name in names}, file.metadata() or {}


def read_pickle(path: Path) -> Any:
    """Return the tensors and plain values of a .pt file, of which no code runs."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
        size, inflated = path.stat().st_size, sum(entry.file_size for entry in entries)
        if inflated > size:
            raise Refused(f"expected at most its {size} bytes, found {inflated} compressed into them")
    return torch.load(path, map_location="cpu", weights_only=True)


def are_whole(tensors: Collection[torch.Tensor]) -> bool:
    """Return True if each number of each tensor has memory of its own: none is sparse, meta, expanded or shared."""
    if any(tensor.layout != torch.strided or tensor.is_meta for tensor in tensors):
        return False
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) <= sum(storages.values())


def shown(content: object) -> str:
    """Return content of a file for an error message: on one line, printable, shortened."""
    text = " ".join(str(content)[: 10 * MAX_SHOWN].split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def _check_count(count: int) -> None:
    if count > MAX_TENSORS:
        raise Refused(f"expected at most {MAX_TENSORS} tensors, found {count}")


def _read_safetensors(path: Path) -> Any:
    tensors, metadata = read_tensors(path)
    return Stored(metadata[KEY], tensors, tensors.pop(CHECKSUM, None)) if KEY in metadata else metadata


def _read_pt(path: Path) -> Any:
    content = read_pickle(path)
    if not isinstance(content, dict) or set(content) != {KEY, "tensors"}:
        return content
    tensors = content["tensors"]
    if not isinstance(tensors, dict):
        raise Refused(f"expected tensors by name, found {type(tensors).__name__}")
    _check_count(len(tensors))
    return Stored(content[KEY], tensors, tensors.pop(CHECKSUM, None))


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
