"""Prompts that run in another way than through all layers: the interface that an engine's passes call in their place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.passes import PassResult, PassTokens


class PromptPass(ABC):
    """Runs prompts of which some tokens skip layers. Their K/V are not the full model's, so no other row shares them."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Layers that every token runs."""

    @abstractmethod
    def takes(self, row: Row, start: int) -> bool:
        """Return True if a row's tokens from `start` on run in this way."""

    @abstractmethod
    def run(self, runner: Runner, row: Row, tokens: PassTokens, cache: SegmentCache, taps: tuple[int, ...]) -> PassResult:
        """Take tokens of one row through all layers, from their ids; otherwise like `Runner.run`."""

    @abstractmethod
    def why_not_on_slots(self, runner: Runner) -> str | None:
        """Return why its prompts cannot run on slots; None: they can."""

    @abstractmethod
    def prefill(self, *parts: Any) -> Any:
        """Return the `Prefill` of prompts on slots, given the arguments of that class."""
