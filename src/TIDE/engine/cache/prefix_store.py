"""Texts: K/V of rows that have ended, kept on the host for rows whose texts begin alike.

    kept        system prompt · question · answer
    next row    system prompt · question · answer · another question          runs its last part only

What is found is copied into the row that needs it, so texts that are kept never change, and any may go at any time: the least
recently used first, once there are more bytes than wanted. Only what the full model made is kept. Texts of another runner, exit
policy or salt are never found, and all are forgotten when the model's weights or adapters have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import LinearAttentionLayer

from TIDE.adapters.snapshot import ModelSnapshot, has_hooks
from TIDE.engine.cache.segment_cache import longest_copied

LEAST = 16  # tokens that are worth a copy
LEAST_GIB, MOST_GIB = 0.125, 1.0  # of texts, unless given


class Copied(NamedTuple):
    """The K/V, running states and exit memory of a text's first tokens."""

    layers: list[Any]  # K/V, or running states, of every layer that keeps any
    memory: Any  # of the exit policy


class Text(NamedTuple):
    """A text that is kept."""

    owner: Hashable
    tokens: np.ndarray
    copied: Copied
    bytes: int


class Texts:
    """Texts that have ended, of all requests to an engine. Any thread may use it.

    Args:
        gib: that they may take together.
    """

    def __init__(self, gib: float) -> None:
        self.most = int(gib * 2**30)
        self._texts: list[Text] = []  # the least recently used first
        self._model: ModelSnapshot | None = None
        self._epoch = 0  # counts the models that there have been
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """That all of them take."""
        return sum(text.bytes for text in self._texts)

    def follow(self, model: nn.Module) -> int | None:
        """Forget everything if the model is another one now; return a number for the model as it is. None: it has hooks, which
        may do something else each time, or want to see every token."""
        with self._lock:
            if self._model is None or not self._model.matches(model):
                self._model = ModelSnapshot(model, values=True)
                self._texts = []
                self._epoch += 1
        return None if any(map(has_hooks, model.modules())) else self._epoch

    def clear(self) -> None:
        """Forget everything, also what rows that are running would leave."""
        with self._lock:
            self._texts, self._model = [], None
            self._epoch += 1

    def find(self, owner: Hashable, wanted: np.ndarray) -> tuple[Copied, int] | None:
        """Return what is kept of the text that is alike for the longest, and how many tokens of it can be used."""
        with self._lock:
            own = [text for text in self._texts if text.owner == owner]
            lengths = [longest_copied(text.copied.layers, alike(wanted, text.tokens)) for text in own]
            length, best = max(zip(lengths, own, strict=True), key=lambda found: found[0], default=(0, None))
            if best is None or length < LEAST:
                return None
            self._texts = [*(text for text in self._texts if text is not best), best]
        return best.copied, length

    def keep(self, owner: Hashable, epoch: int, tokens: Sequence[int], copied: Copied) -> None:
        """Keep a text that was made by the model with this number. Beginnings of it need not be kept any more."""
        size = bytes_in(copied)
        new = Text(owner, np.array(tokens), copied, size)
        with self._lock:
            if epoch != self._epoch or size > self.most:
                return
            kept = [text for text in self._texts if text.owner != owner or not _begins(new, text)]
            while size + sum(text.bytes for text in kept) > self.most:
                kept.pop(0)
            self._texts = [*kept, new]


def default_gib(model: nn.Module) -> float:
    """Return the GiB of texts to keep for a model: a third of what its weights take, within limits."""
    return min(max(bytes_in(list(model.parameters())) / 3 / 2**30, LEAST_GIB), MOST_GIB)


def alike(some: np.ndarray, others: np.ndarray) -> int:
    """Return how many tokens two texts begin with alike."""
    count = min(len(some), len(others))
    differ = np.flatnonzero(some[:count] != others[:count])
    return int(differ[0]) if len(differ) else count


def bytes_in(found: Any) -> int:
    """Return the bytes of all tensors in something."""
    if isinstance(found, torch.Tensor):
        return found.nbytes
    if isinstance(found, dict):
        return sum(map(bytes_in, found.values()))
    if isinstance(found, list | tuple):
        return sum(map(bytes_in, found))
    return bytes_in(vars(found)) if isinstance(found, LinearAttentionLayer) else 0


def _begins(whole: Text, part: Text) -> bool:
    """Return True if one text has all that another one is good for."""
    count = len(part.tokens)
    return alike(whole.tokens, part.tokens) == count and longest_copied(whole.copied.layers, count) == count
