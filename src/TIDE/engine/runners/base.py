"""A runner executes a model's layers: through the model's own modules, or through compiled code.

    modules     every family on every device; the reference for the others
    numba       compiled layers on a CPU
    triton      compiled layers on a GPU, and whole rounds in CUDA graphs

`why_not(row)` says in words why a runner cannot take a row's rounds as a whole; such a row is decoded on the host, pass by
pass, by the same runner.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.rope import Rope
from TIDE.adapters.snapshot import ModelSnapshot
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.passes import PassResult, PassTokens

if TYPE_CHECKING:
    from TIDE.engine.rows.row import Row
    from TIDE.engine.runners.int8_head import Int8LMHead


class Runner(ABC):
    """Executes spans of layers.

    Attributes:
        name: as `TIDE_BACKEND` spells it.
        reason: why a faster runner was not taken; None: this is the fastest there is.
        is_checked: its results were compared with the model's. An unchecked runner is not used for small passes.
        snapshot: the model as it was when the runner was made; None: the runner does not depend on it.
        gathers_rows: K/V of some rows of a cache are copied for a pass of theirs.
    """

    name: str
    gathers_rows = True
    is_checked = True
    snapshot: ModelSnapshot | None = None

    def __init__(self, adapter: ModelAdapter, reason: str | None = None) -> None:
        self.adapter = adapter
        self.reason = reason
        self.head = LMHead(self)

    @property
    def num_layers(self) -> int:
        return self.adapter.num_layers

    @property
    def rope(self) -> Rope:
        return self.adapter.rope

    @property
    def device(self) -> torch.device:
        return self.adapter.device

    def follow(self) -> None:  # noqa: B027 (most have nothing to follow)
        """Notice, before a request, what may have changed of the model's weights since the last one."""

    def grad_off(self) -> AbstractContextManager[Any]:
        """Return the context that passes run in."""
        return self.adapter.grad_off()

    def threads(self) -> AbstractContextManager[None]:
        """Return the context of a round, in which torch uses as many threads as pay."""
        return nullcontext()

    @property
    @abstractmethod
    def words(self) -> str:
        """The runner in words, for `engine.backend`."""

    def why_not(self, row: Row) -> str | None:
        """Return why whole rounds of a row cannot run on the device; None: they can."""
        return f"there are no whole rounds on {self.device.type}" if self.reason is None else self.reason

    @abstractmethod
    def run(
        self,
        span: range,
        tokens: PassTokens,
        cache: SegmentCache,
        hidden: torch.Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> PassResult:
        """Take tokens through the layers of a span.

        Args:
            cache: opened for the tokens.
            hidden: (n, hidden) their states before the span; None: from their ids or embeddings.
            taps: depths whose states are wanted too.
        """

    @abstractmethod
    def write_skipped_kv(
        self,
        span: range,
        tokens: PassTokens,
        states: torch.Tensor,
        cache: SegmentCache,
    ) -> None:
        """Write K/V made of (n, hidden) states into the layers of a span, which the tokens do not run."""

    def is_ragged(self, tokens: PassTokens) -> bool:
        """Return True if rows of a pass may stand at columns of their own; otherwise their histories are aligned first."""
        return False

    def embed(self, ids: list[int]) -> torch.Tensor | None:
        """Return the (n, hidden) states of tokens at depth 0, if they cost no more than a look-up."""
        return None

    def logits(self, states: torch.Tensor, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
        """Return (n, vocabulary) logits of (n, hidden) states at full depth."""
        return self.adapter.head(states, vocabulary)

    def int8_head(self, vocabulary: torch.Tensor | None) -> Int8LMHead | None:
        """Return the LM head for exits, in 8 bits, if there is compiled code for it."""
        return None


class LMHead:
    """The model's final norm and LM head as exit policies use them."""

    def __init__(self, runner: Runner) -> None:
        self._runner: Runner = weakref.proxy(runner)  # an engine that is dropped lets its model go at once

    def __call__(self, states: torch.Tensor, vocabulary: torch.Tensor | None = None) -> torch.Tensor:
        return self._runner.logits(states, vocabulary)

    def int8(self, vocabulary: torch.Tensor | None) -> Int8LMHead | None:
        """Return the same in 8 bits, if there is compiled code for it."""
        return self._runner.int8_head(vocabulary)
