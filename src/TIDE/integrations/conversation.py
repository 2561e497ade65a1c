"""A conversation: successive requests that reuse the KV cache of their common prefix.

    conversation = TIDE.Conversation(engine)
    for token in conversation.stream(ids, max_new_tokens=64): ...
    for token in conversation.stream(longer_ids, max_new_tokens=64): ...     runs the new part only

Texts may diverge anywhere: K/V are reused up to that point. If the model changed in between (weights, PEFT adapters), nothing
is reused. If rounds run as CUDA graphs, every prompt is run as a whole, by one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from TIDE.engine.decoding import Decoding
from TIDE.engine.engine import TIDE
from TIDE.engine.runners.snapshot import ModelSnapshot


class Conversation:
    """Successive requests of one row to an engine."""

    def __init__(self, engine: TIDE) -> None:
        self.engine = engine
        self._last: tuple[Decoding, ModelSnapshot] | None = None

    def stream(self, *inputs: Any, **options: Any) -> Iterator[int]:
        """Yield the new tokens of the next request. Takes the arguments of `TIDE.stream`."""
        return self.engine.stream(*inputs, after=self._follow, **options)

    def _follow(self, decoding: Decoding) -> None:
        last, model = self._last, self.engine.model
        if last is not None and last[1].matches(model):
            decoding.reuse_prefix(last[0])
        self._last = decoding, ModelSnapshot(model, values=True)
