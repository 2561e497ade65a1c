"""Changed files: each is refused in words that name it, or loads and writes the same text. Memory and time are bounded."""

from __future__ import annotations

import functools
import io
import json
import random
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from attempts import AGAIN, attempt, in_parts
from eagle_heads import a_head
from families import VOCAB, build
from router_files import made, original_file
from TIDE import TIDE, TIDEConfig
from TIDE.routing import storage

MOST_MEMORY, MOST_SECONDS = 300 << 20, 10  # more than before, and of this process, for a file of up to a megabyte
pytestmark = pytest.mark.full

MOST_SAID = 2000
ROUTERS = [f"{strategy}.{suffix}" for strategy in ("identity", "lens", "memory") for suffix in ("safetensors", "pt")]
ASKED = dict(do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0)
PROMPT = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(2))
outcomes: list[bool] = []  # loaded or not

HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 7, 0.0, -0.0, 1e-300, 1e308, 10**18, 10**40, "", "0", "x" * 10_000, "\x1b[2J\n\0"),
    *("../../etc/passwd", "\ud800", [], {}, [[]], [1, 2], {"a": 1}, {"0": {}}, float("nan"), float("inf"), list(range(5000))),
]
NAMES = ["", "x" * 10_000, "../../x", "\x1b[31m", "exits.0.head.down.weight.scale", "exits.99.router.up.weight", "a\nb", "é"]


# ---- valid files, made once --------------------------------------------------------------------------------------------------


@functools.cache
def valid(folder: Path) -> dict[str, Path]:
    """A file or folder of every kind."""
    found = {}
    for name in ROUTERS:
        file = made(name.split(".")[0])
        file.save(folder / name)
        file.save(folder / f"small-{name}", compress=True)
        found |= {name: folder / name, f"small-{name}": folder / f"small-{name}"}
    found["original.pt"] = original_file(folder / "original.pt")
    for layout in ("original", "speculators"):
        found[layout] = a_head(folder / layout, layout=layout)
        found[f"{layout}-bin"] = shutil.copytree(found[layout], folder / f"{layout}-bin")
        torch.save(load_file(found[layout] / "model.safetensors"), found[f"{layout}-bin"] / "pytorch_model.bin")
        (found[f"{layout}-bin"] / "model.safetensors").unlink()
    return found


# ---- changes -----------------------------------------------------------------------------------------------------------------


def flip(chance: random.Random, content: bytearray) -> bytearray:
    for _ in range(chance.choice([1, 1, 4, 64])):
        content[chance.randrange(len(content))] ^= chance.randrange(1, 256)
    return content


def flip_near_an_end(chance: random.Random, content: bytearray) -> bytearray:
    """Headers are at the beginning, the directory of an archive at the end."""
    place = chance.randrange(min(400, len(content)))
    content[place if chance.random() < 0.5 else -1 - place] = chance.randrange(256)
    return content


def truncate(chance: random.Random, content: bytearray) -> bytearray:
    return content[: chance.randrange(len(content))]


def insert(chance: random.Random, content: bytearray) -> bytearray:
    at = chance.randrange(len(content))
    return content[:at] + chance.randbytes(chance.choice([1, 8, 1000])) + content[at:]


def repeat(chance: random.Random, content: bytearray) -> bytearray:
    at, size = chance.randrange(len(content)), chance.choice([8, 64, 4096])
    return content[: at + size] + content[at:]


def erase(chance: random.Random, content: bytearray) -> bytearray:
    at, size = chance.randrange(len(content)), chance.choice([1, 8, 64, 4096])
    content[at : at + size] = bytes(len(content[at : at + size]))
    return content


def deflate(chance: random.Random, content: bytearray) -> bytearray:
    target = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in source.namelist():
                archive.writestr(name, source.read(name) + bytes(chance.choice([0, 100_000_000])))
    except zipfile.BadZipFile:  # a .safetensors file
        return truncate(chance, content)
    return bytearray(target.getvalue())


def header(chance: random.Random, content: bytearray) -> bytearray:
    """Another header of a .safetensors file: names, types, shapes and places of its tensors."""
    size = int.from_bytes(content[:8], "little")
    try:
        document = json.loads(content[8 : 8 + size])
    except ValueError:  # a .pt file
        return erase(chance, content)
    again = json.dumps(changed(chance, document)).encode()
    claimed = chance.choice([len(again)] * 8 + [0, 2**63, 10**9])
    return bytearray(claimed.to_bytes(8, "little") + again + content[8 + size :])


BYTES = [flip, flip_near_an_end, truncate, insert, repeat, erase, deflate, header]


def changed(chance: random.Random, document: Any) -> Any:
    """The same document, but at one place."""
    if isinstance(document, dict) and document and chance.random() < 0.9:
        name = chance.choice(sorted(document))
        match chance.choice(["inside"] * 6 + ["gone", "renamed", "more"]):
            case "gone":
                return {key: value for key, value in document.items() if key != name}
            case "renamed":
                return {(chance.choice(NAMES) if key == name else key): value for key, value in document.items()}
            case "more":
                return document | {chance.choice(NAMES): chance.choice(HOSTILE)}
        return document | {name: changed(chance, document[name])}
    if isinstance(document, list) and document and chance.random() < 0.7:
        at = chance.randrange(len(document))
        return [*document[:at], changed(chance, document[at]), *document[at + 1 :]]
    if isinstance(document, int | float) and not isinstance(document, bool) and chance.random() < 0.5:
        return chance.choice([-document, document + 1, document * 2, document / 2, document * 1e6, str(document)])
    return chance.choice(HOSTILE)


def another(chance: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor in the place of one."""
    wide = 1 << 30
    numbers = [float("nan"), float("inf"), 0.0, -1.0, 1e38, 1e-45] if tensor.is_floating_point() else [0, 1]
    number = chance.choice(numbers)
    spoilt = tensor.clone().flatten()
    if spoilt.numel():
        spoilt[chance.randrange(spoilt.numel())] = number
    makers: list[Callable[[], torch.Tensor]] = [
        lambda: spoilt.view_as(tensor),
        lambda: torch.full_like(tensor, number),
        lambda: tensor.to(chance.choice([torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool])),
        lambda: tensor.flatten(),
        lambda: tensor[None],
        lambda: tensor.flatten()[:0],
        lambda: tensor.to(torch.complex64),
        lambda: torch.zeros(1).expand(wide, wide),
        lambda: torch.zeros(1).expand(tensor.shape) if tensor.numel() > 1 else tensor[None],
        lambda: torch.zeros(1).expand(20_000, 25_000),
        lambda: torch.empty(wide, wide, device="meta"),
        lambda: tensor.to_sparse(),
        lambda: tensor.t().contiguous().t() if tensor.ndim == 2 else tensor,
        lambda: torch.tensor(float("nan")),
    ]
    return chance.choice(makers)()


def other_tensors(chance: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = chance.choice(sorted(tensors))
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    match chance.choice(["another"] * 5 + ["gone", "renamed", "more", "thousands"]):
        case "gone":
            return rest
        case "renamed":
            return rest | {chance.choice(NAMES): tensors[name]}
        case "more":
            return tensors | {chance.choice(NAMES): another(chance, tensors[name].clone())}
        case "thousands":
            return tensors | {f"exits.{depth}.x": torch.zeros(0) for depth in range(20_000)}
    return rest | {name: another(chance, tensors[name])}


def can_be_mapped(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() < 10**7


def of_safetensors(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items() if can_be_mapped(tensor)}


def rewrite(chance: random.Random, path: Path) -> None:
    """Another document or other tensors in a router file, with the checksum that they should have where there can be one."""
    stored = storage.read(path)
    document, tensors = stored.document, stored.tensors
    if chance.random() < 0.6:
        document = json.dumps(changed(chance, json.loads(document)))
    else:
        tensors = other_tensors(chance, tensors)
    if all(map(can_be_mapped, tensors.values())):
        tensors = tensors | {"sha256": storage.Stored(document, tensors).digest()}
    else:
        tensors = tensors | {"sha256": torch.zeros(32, dtype=torch.uint8)}
    if path.suffix == ".pt":
        torch.save({"tide": document, "tensors": tensors}, path)
    else:
        save_file(of_safetensors(tensors), path, {"tide": document})


def rewrite_original(chance: random.Random, path: Path) -> None:
    content = torch.load(path, weights_only=True)
    if chance.random() < 0.5:
        name = chance.choice(sorted(content))
        content[name] = changed(chance, content[name]) if name != "router_layers" else chance.choice(HOSTILE)
    else:
        layer = chance.choice(sorted(content["router_layers"]))
        content["router_layers"][layer] = other_tensors(chance, dict(content["router_layers"][layer]))
    torch.save(content, path)


def rewrite_folder(chance: random.Random, folder: Path) -> None:
    config = folder / "config.json"
    if chance.random() < 0.6:
        config.write_text(json.dumps(changed(chance, json.loads(config.read_text()))))
        return
    (path,) = [path for path in folder.iterdir() if path != config]
    if path.suffix == ".bin":
        torch.save(other_tensors(chance, torch.load(path, weights_only=True)), path)
    else:
        save_file(of_safetensors(other_tensors(chance, load_file(path))), path)


def mutate(chance: random.Random, path: Path) -> str:
    """Change a file or folder; return how."""
    if chance.random() < 0.55:
        rewriting = rewrite_folder if path.is_dir() else rewrite_original if path.stem == "original" else rewrite
        rewriting(chance, path)
        return rewriting.__name__
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file, change = chance.choice(files), chance.choice(BYTES)
    file.write_bytes(change(chance, bytearray(file.read_bytes())))
    return change.__name__


# ---- what must hold ----------------------------------------------------------------------------------------------------------


def memory(name: str) -> int:
    """VmRSS or VmHWM, its peak, of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@functools.cache
def model(name: str):
    """Of eight layers for EAGLE-3 heads, which are tried on it."""
    return build("llama", num_hidden_layers=4 if name.endswith((".safetensors", ".pt")) else 8)


@functools.cache
def text(name: str) -> torch.Tensor:
    with TIDE(model(name)) as engine:
        return engine.generate(PROMPT, **ASKED)


def load(name: str, path: Path) -> None:
    """Load a file and compare the text, or be told in words why not."""
    try:
        engine = TIDE(model(name), path, TIDEConfig(mode="exact", min_layers=0))
    except (ValueError, FileNotFoundError) as problem:
        said = str(problem)
        assert path.name in said and said.isprintable() and len(said) < MOST_SAID, said[:MOST_SAID]
        outcomes.append(False)
        return
    with engine:
        assert torch.equal(engine.generate(PROMPT, **ASKED), text(name))
    outcomes.append(True)


def attack(chance: random.Random, folder: Path) -> None:
    (folder / "valid").mkdir(exist_ok=True)
    name = chance.choice(sorted(valid(folder / "valid")))
    source, path = valid(folder / "valid")[name], folder / name
    shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
    try:
        how = mutate(chance, path)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
        before, began = memory("VmRSS"), time.process_time()
        try:
            load(name, path)
        except Exception as problem:
            raise AssertionError(f"{name}, {how}: {type(problem).__name__}: {problem}") from problem
        taken, seconds = memory("VmHWM") - before, time.process_time() - began
        assert taken < MOST_MEMORY, f"{name}, {how}: {taken >> 20} MiB"
        assert seconds < MOST_SECONDS, f"{name}, {how}: {seconds:.1f} s"
    finally:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.long
@pytest.mark.invariant(10)
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux's /proc")
@in_parts
def test_a_changed_file_is_refused_in_words_or_writes_the_same_text(part, tmp_path):
    """60 files; 1,000 others with TIDE_LONG=1."""
    outcomes.clear()
    attempt(lambda chance: attack(chance, tmp_path), few=60, many=1000)
    assert AGAIN or 0 < sum(outcomes) < len(outcomes)
