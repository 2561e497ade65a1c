"""Verification: what was drafted against what the deep pass says, rolled back at the first difference.

    tokens      … a  b | x  y  z          final up to b; x, y, z are drafts, each decided at an exit
    deep pass        b  x  y  z           gives the full model's token after each of them
    full model       x  y  w  –           x and y stand, z becomes w; what followed z is forgotten

After a verification every token of the row is final. A draft that ends the text (`closed`) is not extended; the
row is verified in the next step without a new token.
"""

from __future__ import annotations

import torch

from TIDE.engine.batch import Batch
from TIDE.engine.round.sampler import Draft, Sampler
from TIDE.engine.round.segments import Segments
from TIDE.stats import ExitStats


class Verifier:
    """The drafts of each row and their judgement."""

    def __init__(self, batch: Batch, sampler: Sampler, segments: Segments, stats: ExitStats) -> None:
        self.batch = batch
        self.sampler = sampler
        self.segments = segments
        self.stats = stats
        self.drafts: list[list[Draft]] = [[] for _ in range(len(batch))]
        self.closed: set[int] = set()  # rows whose newest draft ends the text

    def add(self, rows: list[int], drafts: list[Draft]) -> None:
        """Extend rows by drafts, to be verified later."""
        for row, draft in zip(rows, drafts, strict=True):
            self.batch.append(row, draft.token)
            self.drafts[row].append(draft)
        self.closed |= self.batch.stops(rows)

    def verify(self, logits: dict[int, torch.Tensor]) -> None:
        """Judge rows by their full-depth logits, (tokens, vocabulary) each, from the last final token on."""
        open_rows, step = list(logits), 0
        while open_rows := [row for row in open_rows if step < len(logits[row])]:
            drafts = [self._next_draft(row) for row in open_rows]
            sizes = [self.batch.final[row] for row in open_rows]
            found = self.sampler.judge(open_rows, sizes, _side_by_side([logits[row][step] for row in open_rows]), drafts)
            step += 1
            open_rows = self._settle(open_rows, drafts, found, step)

    def _next_draft(self, row: int) -> Draft | None:
        return self.drafts[row][0] if self.drafts[row] else None

    def _settle(self, rows: list[int], drafts: list[Draft | None], found: list[int], step: int) -> list[int]:
        """Accept or replace the token `step` after the last final one of each row; return the rows with more to verify."""
        going, fresh = [], []
        for row, draft, token in zip(rows, drafts, found, strict=True):
            if draft is not None and draft.token == token:
                self._accept(row, draft, step)
                going.append(row)
                continue
            if draft is not None:
                self._reject(row)
            self.batch.append(row, token)
            self._final(row, self.stats.num_layers, None, step)
            fresh.append(row)
        for row in self.batch.stops(fresh):
            self.batch.finished[row] = True
        return going

    def _accept(self, row: int, draft: Draft, step: int) -> None:
        self.drafts[row].pop(0)
        self._final(row, draft.depth, draft.score, step)
        if row in self.closed and not self.drafts[row]:
            self.closed.discard(row)
            self.batch.finished[row] = True

    def _reject(self, row: int) -> None:
        size = self.batch.final[row]
        self.stats.rollbacks += 1
        self.stats.rejected += len(self.drafts[row])
        self.batch.truncate(row, size)
        self.segments.rollback(row, size)
        self.drafts[row].clear()
        self.closed.discard(row)
        self.batch.cut_short[row] = False

    def _final(self, row: int, depth: int, score: float | None, step: int) -> None:
        self.batch.finish(row, depth, score)
        self.stats.count_token(depth, step)


def _side_by_side(rows: list[torch.Tensor]) -> torch.Tensor:
    """(n, vocabulary); one row is not copied."""
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)
