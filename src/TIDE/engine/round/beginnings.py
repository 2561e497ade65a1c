"""Beginnings of rows on the host: what was made of a text that begins alike is copied, and kept when a row ends.

The source is a row that is running, or a text that has ended (`cache/texts.py`). A row whose text begins like that of one whose
prompt has not run yet waits for it: eight answers to one prompt run it once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from TIDE.engine.cache.segment_cache import longest_copied
from TIDE.engine.cache.texts import LEAST, Copied, Texts, alike
from TIDE.engine.plan import Plan
from TIDE.engine.round.segments import Segments
from TIDE.engine.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.routing.policy import ExitPolicy

WORTH_WAITING = 64  # tokens that begin alike, and half of the row's own


class Beginnings:
    """Copies beginnings of texts from row to row.

    Args:
        shares: otherwise every row runs all of its text.
    """

    def __init__(self, runner: Runner, plan: Plan, policy: ExitPolicy | None, texts: Texts, shares: bool = True) -> None:
        self.texts = texts
        self.runner = runner
        self.policy = policy
        # what settled in a prompt, or did not catch up, is not the full model's
        self.shares = shares and plan.settles_at is None and (plan.exact or plan.catches_up)
        self._epochs: dict[Row, int] = {}  # the model as it was when a row began

    def begin(self, rows: Sequence[Row], segments: Segments, running: Sequence[Row]) -> None:
        """Let rows that join begin with what was made of the same tokens, where there is something."""
        sharing = [row for row in rows if self._shares(row)]
        if not sharing:
            return
        epoch = self.texts.follow(self.runner.adapter.model)
        for row in sharing:
            self._epochs[row] = epoch
            found = self._found(row, segments, running)
            if found is not None:
                segments.paste(row, *found)
                row.stats.reused_tokens += found[1]

    def _found(self, row: Row, segments: Segments, running: Sequence[Row]) -> tuple[Copied, int] | None:
        """Return a copy of the longest beginning there is, and its tokens."""
        tokens = row.text(0, row.size)
        wanted, found = np.array(tokens[:-1]), self.texts.find(self._owner(row), tokens)
        source, longest = None, LEAST - 1 if found is None else found[1]
        for other in running:
            done = segments.length(segments.last, other)
            if done > longest and self._are_of_one_kind(row, other):
                length = alike(wanted, np.array(other.text(0, done)))
                source, longest = (other, length) if length > longest else (source, longest)
        copied = None if source is None else segments.copied(source, longest)
        if copied is None:
            return found
        length = longest_copied(copied.layers, longest)
        return (copied, length) if length >= LEAST else found

    def should_wait(self, row: Row, joining: Sequence[Row]) -> bool:
        """Return True if a row had better begin when one of those that are joining has run its prompt."""
        if not joining or not self._shares(row):
            return False
        tokens = np.array(row.text(0, row.size))
        least = max(WORTH_WAITING, len(tokens) // 2)
        others = [other for other in joining if other.salt == row.salt and self._shares(other) and other.size >= least]
        return any(alike(tokens, np.array(other.text(0, other.size))) >= least for other in others)

    def keep(self, row: Row, segments: Segments) -> None:
        """Keep what was made of a row that leaves."""
        epoch = self._epochs.pop(row, None)
        length = min(len(row.tokens), segments.length(segments.last, row))
        if epoch is None or row.error is not None or length < LEAST or segments.cache.bytes_of(length) > self.texts.most:
            return
        try:
            copied = segments.copied(row, length)
        except torch.OutOfMemoryError:
            return  # it is only for others
        if copied is not None:
            self.texts.keep(self._owner(row), epoch, row.text(0, length), copied)

    def _are_of_one_kind(self, row: Row, other: Row) -> bool:
        return row is not other and row.salt == other.salt and self._epochs[row] == self._epochs.get(other)

    def _shares(self, row: Row) -> bool:
        """Return True if K/V of a row are like those of others."""
        runner = self.runner
        if not self.shares or not runner.is_checked or row.embeds is not None or runner.rope.switches_at is not None:
            return False
        return runner.shares or row.salt is not None

    def _owner(self, row: Row) -> Hashable:
        return self.runner, self.policy, row.salt
