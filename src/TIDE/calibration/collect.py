"""Collection: the states of every text at the candidate checkpoints and at full depth, through the adapter.

    texts  →  shards of similar length  →  adapter.run(0, L, taps=depths)  →  the model's device, then disk

A shard holds the texts of one pass. States stay on the model's device until the budget is used up (0.4 of a GPU's free
memory, 1 GiB without one); the rest goes to files, one per shard and depth, and is read back when needed. A candidate's
states are kept only while it is tried, so memory does not grow with the number of candidates.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.calibration.free_memory import free_memory
from TIDE.calibration.grouped_attention import without_plans
from TIDE.calibration.self_texts import context_length
from TIDE.calibration.text import Text

SHARD_TOKENS = 65536  # tokens of one pass, padding included
CPU_SHARD_TOKENS = 8192  # without a GPU
TRIAL_TOKENS = 1024  # of made-up texts, at most
HOST_BUDGET = 1 << 30  # bytes of states kept in memory without a GPU
DEVICE_SHARE = 0.4  # of a GPU's free memory


@dataclass
class Shard:
    """Texts of similar length, padded on the right."""

    ids: torch.Tensor  # (n, T)
    lengths: list[int]
    asked: torch.Tensor  # (n, T) counted positions: those that predict a token the model wrote
    learned: torch.Tensor  # (n, T) positions a head may learn from: all that have a next token
    best: torch.Tensor  # (n, T) the full model's most likely token after each position
    _states: dict[int, torch.Tensor | Path] = field(default_factory=dict)

    def parts(self, tokens: int) -> int:
        """Return its number of batches of about `tokens` tokens."""
        return min(len(self.lengths), -(-self.ids.numel() // tokens))

    def learnable(self, rows: torch.Tensor) -> int:
        """Return the number of positions in some rows (on the CPU) a head may learn from, without waiting for the device."""
        return sum(max(0, self.lengths[row] - 2) for row in rows.tolist())

    def states(self, depth: int) -> torch.Tensor:
        """Return (n, T, hidden) states at a depth, on the model's device."""
        found = self._states[depth]
        if isinstance(found, Path):
            return load_file(found, device=str(self.best.device))["states"]
        return found


class Collection:
    """Shards of training or validation texts."""

    def __init__(self, shards: list[Shard]) -> None:
        self.shards = shards

    @property
    def tokens(self) -> int:
        """Number of counted positions."""
        return sum(int(shard.asked.sum()) for shard in self.shards)

    def batches(self, tokens: int, generator: torch.Generator) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yield every text once, in random order, as shards and rows of about `tokens` tokens at a time."""
        for index in torch.randperm(len(self.shards), generator=generator).tolist():
            shard = self.shards[index]
            rows = torch.randperm(len(shard.lengths), generator=generator)
            for part in rows.chunk(shard.parts(tokens)):
                yield shard, part

    def batch_count(self, tokens: int) -> int:
        """Return the approximate number of batches that `batches` yields."""
        return sum(shard.parts(tokens) for shard in self.shards)

    def in_order(self, tokens: int = SHARD_TOKENS // 2) -> Iterator[tuple[Shard, torch.Tensor]]:
        """Yield every text once, in the order of storage."""
        for shard in self.shards:
            for part in torch.arange(len(shard.lengths), device=shard.ids.device).chunk(shard.parts(tokens)):
                yield shard, part


class Budget:
    """The bytes of states that may stay in memory; the rest goes to files in `folder`."""

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.folder = folder
        self.left = HOST_BUDGET
        if device.type == "cuda":
            self.left = int(free_memory(device) * DEVICE_SHARE)

    def keep(self, states: torch.Tensor) -> torch.Tensor | Path:
        size = states.numel() * states.element_size()
        if size <= self.left:
            self.left -= size
            return states.clone()  # not an inference-mode tensor
        handle, name = tempfile.mkstemp(suffix=".safetensors", dir=self.folder)
        os.close(handle)
        save_file({"states": states.contiguous().cpu()}, name)
        return Path(name)

    def release(self, kept: torch.Tensor | Path) -> None:
        if isinstance(kept, Path):
            kept.unlink(missing_ok=True)
        else:
            self.left += kept.numel() * kept.element_size()


def collect(adapter: ModelAdapter, texts: list[Text], depths: list[int], budget: Budget, title: str) -> Collection:
    """Run texts through the model and keep their states at `depths`, which include full depth."""
    shards = []
    with tqdm(total=len(texts), desc=title, unit="text") as bar:
        for group in _shards(texts, SHARD_TOKENS if adapter.device.type == "cuda" else CPU_SHARD_TOKENS):
            shard = laid_out(group, adapter.device)
            found = _run(adapter, shard, adapter.num_layers, depths)
            shard.best = _best(adapter, found[adapter.num_layers])
            shard._states = {depth: budget.keep(found[depth]) for depth in depths}
            shards.append(shard)
            bar.update(len(group))
    return Collection(shards)


@contextmanager
def extended(adapter: ModelAdapter, collections: Iterable[Collection], depths: list[int], budget: Budget) -> Iterator[None]:
    """Keep states at more depths inside the block."""
    shards = [shard for own in collections for shard in own.shards]
    depths = [depth for depth in depths if any(depth not in shard._states for shard in shards)]
    try:
        for shard in tqdm(shards, desc=f"states at depth {depths}", unit="shard", disable=not depths):
            if depths:
                found = _run(adapter, shard, depths[-1], depths)
                shard._states |= {depth: budget.keep(found[depth]) for depth in depths}
        yield
    finally:
        for shard in shards:
            for depth in depths:
                if depth in shard._states:
                    budget.release(shard._states.pop(depth))


def trial(adapter: ModelAdapter, depths: list[int]) -> Collection:
    """Return the states of made-up texts, to time what is done with states."""
    shard = _made_up(adapter)
    shard._states = {depth: states.clone() for depth, states in _run(adapter, shard, adapter.num_layers, depths).items()}
    return Collection([shard])


def collecting_seconds(adapter: ModelAdapter) -> float:
    """Return the seconds that a token's states take, from a pass of made-up texts."""
    shard = _made_up(adapter)
    for _ in range(2):  # the first one warms up
        began = time.perf_counter()
        _run(adapter, shard, adapter.num_layers, [adapter.num_layers])[adapter.num_layers].sum().item()
    return (time.perf_counter() - began) / shard.ids.numel()


def _made_up(adapter: ModelAdapter) -> Shard:
    length = min(256, context_length(adapter.model))
    return laid_out([Text([1 + place % 97 for place in range(length)], 0, 0)] * (TRIAL_TOKENS // length), adapter.device)


def _run(adapter: ModelAdapter, shard: Shard, stop: int, depths: list[int]) -> dict[int, torch.Tensor]:
    positions = torch.arange(shard.ids.shape[1], device=shard.ids.device).expand(len(shard.ids), -1)
    taps = tuple(depth for depth in depths if depth < stop)
    with without_plans():
        passed = adapter.run(0, stop, PassInputs(shard.ids, positions, None, None), taps=taps)
    return {**passed.taps, stop: passed.states}


def _shards(texts: list[Text], most: int = CPU_SHARD_TOKENS) -> Iterator[list[Text]]:
    group: list[Text] = []
    for text in sorted(texts, key=lambda text: len(text.ids)):
        if group and (len(group) + 1) * len(text.ids) > most:
            yield group
            group = []
        group.append(text)
    if group:
        yield group


def laid_out(texts: list[Text], device: torch.device) -> Shard:
    """Return texts as a shard, without states."""
    width = max(len(text.ids) for text in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.long)
    asked, learned = torch.zeros(2, len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        learned[row, 1 : len(text.ids) - 1] = True
        asked[row, max(text.start - 1, 0) : len(text.ids) - 1] = True
    ids = ids.to(device)
    return Shard(ids, [len(text.ids) for text in texts], asked.to(device), learned.to(device), torch.zeros_like(ids))


def _best(adapter: ModelAdapter, states: torch.Tensor, at_once: int = 4096) -> torch.Tensor:
    flat = states.flatten(0, 1)
    found = [adapter.head(part).argmax(-1) for part in flat.split(at_once)]
    return torch.cat(found).view(states.shape[:2]).clone()
