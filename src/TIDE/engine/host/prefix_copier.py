"""Beginnings of rows on the host: what was made of a text that begins alike is copied, and kept when a row ends.

The source is a row that is running, or a text that has ended (`cache/prefix_store.py`). A row whose text begins like that of
one whose prompt has not run yet waits for it: eight answers to one prompt run it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from TIDE.adapters.weights import is_quantized
from TIDE.engine.cache.prefix_store import LEAST, Copied, Texts, alike
from TIDE.engine.cache.segment_cache import longest_copied
from TIDE.engine.host.segments import Segments
from TIDE.engine.request.plan import Plan
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.routing.policy import ExitPolicy

WORTH_WAITING = 64  # tokens that need not run then, and half of the row's own


class Source(NamedTuple):
    """A beginning that can be copied: of a row that is running, or one that was kept."""

    row: Row | None
    copied: Copied | None
    length: int


class Beginnings:
    """Copies beginnings of texts from row to row.

    Args:
        policy: the exits; None: there are none.
        watcher: what it has started for the rows at hand.
        texts: that have ended; None: every row runs all of its text.
    """

    def __init__(
        self, runner: Runner, plan: Plan, policy: ExitPolicy | None, watcher: ExitPolicy | None, texts: Texts | None
    ) -> None:
        self.texts = texts or Texts(0)
        self.runner = runner
        self.policy = policy
        # what skipped layers and did not catch up is not the full model's
        are_whole = plan.prompt_pass is None and (plan.exact or plan.catches_up)
        has_copies = watcher is None or not watcher.watches or type(watcher).copied is not ExitPolicy.copied
        self.shares = texts is not None and are_whole and has_copies and runner.rope.switches_at is None
        self._epoch: int | None = None  # the model as it is now; None: nothing is shared
        self._shares_unasked = False
        self._epochs: dict[Row, int] = {}  # as it was when a row began

    def follow(self) -> None:
        """Look at the model before rows join."""
        model = self.runner.adapter.model
        is_plain = self.shares and not torch.is_autocast_enabled(self.runner.device.type)
        self._epoch = self.texts.follow(model) if is_plain else None
        self._shares_unasked = model.dtype == torch.float32 and not is_quantized(model)

    def begin(self, row: Row, segments: Segments, running: Sequence[Row]) -> None:
        """Let a row that joins begin with what was made of the same tokens, if there is something."""
        if self._epoch is None or not self._shares(row):
            return
        self._epochs[row] = self._epoch
        if row.size <= LEAST:
            return
        source = self._source(row, segments, running)
        if source.length >= LEAST:
            copied = source.copied if source.row is None else segments.copied(source.row, source.length)
            assert copied is not None
            segments.paste(row, copied, source.length)
            row.stats.reused_tokens += source.length

    def should_wait(self, row: Row, segments: Segments, running: Sequence[Row], joining: Sequence[Row]) -> bool:
        """Return True if a row had better begin when one of those that are joining has run its prompt."""
        least = max(WORTH_WAITING, row.size // 2)
        if row.size <= least:
            return False
        others = [other for other in joining if other.size > least and self._is_like(row, other)]
        if not others or not self._shares(row) or segments.cache.keeps_state(0, segments.last):
            return False  # running states are there at the ends of prompts only
        wanted = np.array(row.text(0, row.size - 1))
        most = max(alike(wanted, np.array(other.text(0, other.size))) for other in others)
        return most >= least and most - self._source(row, segments, running).length >= least

    def keep(self, row: Row, segments: Segments) -> None:
        """Keep what was made of a row that leaves."""
        epoch = self._epochs.pop(row, None)
        length = min(len(row.tokens), segments.length(segments.last, row))
        if epoch is None or length < LEAST or row.error is not None or segments.cache.bytes_of(length) > self.texts.most:
            return
        try:
            copied = segments.copied(row, length)
        except (RuntimeError, MemoryError):
            return  # there is no memory for what others might use
        if longest_copied(copied.layers, length) >= LEAST:
            self.texts.keep(self._owner(row), epoch, row.text(0, length), copied)

    def _source(self, row: Row, segments: Segments, running: Sequence[Row]) -> Source:
        """Return where the longest beginning of a row's text is. Its last token runs in any case: its logits are wanted."""
        wanted = np.array(row.text(0, row.size - 1))
        best = Source(None, *(self.texts.find(self._owner(row), wanted) or (None, 0)))
        for other in running:
            done = segments.length(segments.last, other)
            if done > best.length and self._is_like(row, other):
                length = segments.cache.usable(other.slot, alike(wanted, np.array(other.text(0, done))))
                best = Source(other, None, length) if length > best.length else best
        return best

    def _is_like(self, row: Row, other: Row) -> bool:
        return row is not other and row.salt == other.salt and self._epochs.get(other) == self._epoch is not None

    def _shares(self, row: Row) -> bool:
        """Return True if a row shares unasked, as in fp32, where the order of sums shows in no text, or is asked to."""
        return row.embeds is None and (row.shares or self._shares_unasked)

    def _owner(self, row: Row) -> Hashable:
        return self.runner, self.policy, row.salt
