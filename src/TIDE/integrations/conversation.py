"""A conversation: successive requests that reuse the KV cache of their common prefix.

    conversation = TIDE.Conversation(engine)
    for token in conversation.stream(ids, max_new_tokens=64): ...
    for token in conversation.stream(longer_ids, max_new_tokens=64): ...     runs the new part only

Texts may diverge anywhere: K/V are reused up to that point. If the model changed in between (weights, PEFT adapters), nothing
is reused. An engine reuses beginnings of any texts, but in 16 bits on the host, where the order of sums may show, only here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from TIDE.engine.engine import TIDE


class Conversation:
    """Successive requests of one row to an engine."""

    def __init__(self, engine: TIDE) -> None:
        self.engine = engine

    def stream(self, *inputs: Any, **options: Any) -> Iterator[int]:
        """Yield the new tokens of the next request. Takes the arguments of `TIDE.stream`."""
        return self.engine.stream(*inputs, shares=True, **options)
