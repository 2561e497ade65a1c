"""Arrivals: when tokens reach a reader, noted by a streamer.

Drafts that are accepted arrive together with the token that the full model decided: those of one moment share the time since
the moment before, so that a burst of three after 30 ms is three tokens of 10 ms, not one of 30 and two of none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from transformers.generation.streamers import BaseStreamer

TOGETHER = 1e-4  # seconds between tokens that arrive at one moment


class Arrivals(BaseStreamer):
    """Notes when new tokens arrive; what is put first is the prompt."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._has_prompt = False
        self._moments: list[tuple[float, int]] = []  # time, tokens

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        if not self._has_prompt:
            self._has_prompt = True
            return
        tokens = value.shape[1] if value.ndim == 2 else 1  # (1, tokens) of one row, or (rows,) a token of each
        if self._moments and now - self._moments[-1][0] < TOGETHER:
            tokens += self._moments.pop()[1]
        self._moments.append((now, tokens))

    def end(self) -> None:
        """Nothing is held back."""

    @property
    def first(self) -> float | None:
        """Seconds to the first token."""
        return self._moments[0][0] - self._began if self._moments else None

    @property
    def gaps(self) -> list[float]:
        """Seconds of each token after the first moment."""
        return [(now - before) / tokens for (before, _), (now, tokens) in pairwise(self._moments) for _ in range(tokens)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of the values that at least this share of them does not exceed; None: there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None
