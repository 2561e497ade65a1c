"""A conversation: requests that go on from each other, so that what their texts share is run once.

    conversation = TIDE.Conversation(engine)
    for token in conversation.stream(ids, max_new_tokens=64): ...
    for token in conversation.stream(longer_ids, max_new_tokens=64): ...     runs what is new in them

Texts may part anywhere: K/V are kept up to there. If the model was changed in between (weights, adapters), nothing is kept.
On a GPU in rounds every prompt is run as a whole, by one graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from TIDE.engine.engine import TIDE
from TIDE.engine.round.decoding import Decoding
from TIDE.engine.runners.snapshot import ModelSnapshot


class Conversation:
    """Requests of one row to an engine, one after the other."""

    def __init__(self, engine: TIDE) -> None:
        self.engine = engine
        self._last: tuple[Decoding, ModelSnapshot] | None = None

    def stream(self, *inputs: Any, **options: Any) -> Iterator[int]:
        """Yield the new tokens of the next text. Takes what `TIDE.stream` takes."""
        return self.engine.stream(*inputs, after=self._follow, **options)

    def _follow(self, decoding: Decoding) -> None:
        last, model = self._last, self.engine.model
        if last is not None and last[1].matches(model):
            decoding.reuse_prefix(last[0])
        self._last = decoding, ModelSnapshot(model, values=True)
