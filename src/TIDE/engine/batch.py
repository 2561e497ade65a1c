"""The rows of a request: their tokens, what of them is final, and when they stop.

Rows keep the left padding they came with, because logits processors and stopping criteria are shown what
`model.generate` would show them. Positions and lengths elsewhere count a row's own tokens only. Rows advance at
their own pace; criteria are asked once for every token that is appended.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import defaultdict
from typing import NamedTuple

import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from TIDE.engine.inputs import Context

logger = logging.getLogger(__name__)
QUICK = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)  # criteria that need no tensors
GROW = 256  # columns added at a time


class Decided(NamedTuple):
    """Where a new token was decided."""

    depth: int
    score: float | None = None  # of the router that let it out, where one was asked


class Batch:
    """Token ids of all rows.

    Args:
        ids: (rows, columns) the prompts, left-padded.
        padding: columns of padding before each row.
        criteria: when a row is finished.
        context: a row stops at its limit.
        embeds: (rows, columns, hidden) the prompts as embeddings; then `ids` may be without columns, and processors, criteria
            and the output do not see the prompts.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        padding: list[int],
        criteria: StoppingCriteriaList,
        context: Context | None = None,
        embeds: torch.Tensor | None = None,
    ) -> None:
        rows = len(ids)
        self.unseen = 0 if embeds is None else embeds.shape[1] - ids.shape[1]  # columns without ids
        self.ids = torch.nn.functional.pad(ids, (self.unseen, 0)) if self.unseen else ids.clone()
        self.width = self.ids.shape[1]
        self.embeds = embeds
        self.padding = padding
        self.size = [self.width - pad for pad in padding]  # tokens of each row, drafts included
        self.prompt = list(self.size)
        self.final = list(self.size)  # tokens that will not change any more
        self.finished = [False] * rows
        self.cut_short = [False] * rows  # stopped by the model's context, not by the request
        self.decided: list[list[Decided]] = [[] for _ in range(rows)]  # final new tokens of each row, in order
        self._criteria = criteria
        self._context = context or Context()
        self._has_warned = False
        self._warn_past_context(max(self.size))

    def __len__(self) -> int:
        return len(self.size)

    def unfinished(self) -> list[int]:
        return [row for row in range(len(self)) if not self.finished[row]]

    def columns(self, row: int) -> int:
        return self.padding[row] + self.size[row]

    def tokens(self, row: int, start: int, stop: int) -> torch.Tensor:
        """(stop - start,) ids at the positions [start, stop) of a row."""
        return self.ids[row, self.padding[row] + start : self.padding[row] + stop]

    def append(self, row: int, token: int) -> None:
        column = self.columns(row)
        if column == self.ids.shape[1]:
            self.ids = torch.nn.functional.pad(self.ids, (0, GROW))
        self.ids[row, column] = token
        self.size[row] += 1

    def shown(self, rows: list[int], columns: int) -> torch.Tensor:
        """(n, columns) the first columns of rows, as processors and criteria see them."""
        return self.ids[rows, self.unseen : columns]

    def finish(self, row: int, depth: int, score: float | None = None) -> None:
        """The next token of a row will not change any more."""
        self.final[row] += 1
        self.decided[row].append(Decided(depth, score))

    def truncate(self, row: int, size: int) -> None:
        assert self.final[row] <= size <= self.size[row]
        self.size[row] = size

    def stops(self, rows: list[int]) -> set[int]:
        """Those of `rows` that stop with their newest token."""
        is_quick = all(type(one) in QUICK for one in self._criteria)
        stopped = {row for row in rows if self._stops(row)} if is_quick else self._asked(rows)
        for row in rows:
            if self._context.limit is not None and self.size[row] >= self._context.limit and row not in stopped:
                self.cut_short[row] = True
                stopped.add(row)
        self._warn_past_context(max((self.size[row] for row in rows), default=0))
        return stopped

    def _warn_past_context(self, longest: int) -> None:
        """Warn, once, where a text is longer than the model was made for and the model takes it all the same."""
        if self._context.limit is None and self._context.is_left(longest) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the text is longer than the %d tokens this model was made for. It goes on, as with model.generate; what is "
                "written there may be worse.",
                self._context.made_for,
            )

    def _asked(self, rows: list[int]) -> set[int]:
        """What the criteria say."""
        stopped: set[int] = set()
        for columns, group in by_value(rows, [self.columns(row) for row in rows]).items():
            flags = self._criteria(self.shown(group, columns), None)
            stopped.update(row for row, flag in zip(group, flags.tolist(), strict=True) if flag)
        return stopped

    def _stops(self, row: int) -> bool:
        """What they would say where all are `QUICK`: asking them takes as long as a small kernel."""
        for one in self._criteria:
            if isinstance(one, MaxLengthCriteria):
                done = self.columns(row) - self.unseen >= one.max_length
            elif isinstance(one, MaxTimeCriteria):
                done = time.time() - one.initial_timestamp > one.max_time
            else:
                done = int(self.ids[row, self.columns(row) - 1]) in self._ends
            if done:
                return True
        return False

    @functools.cached_property
    def _ends(self) -> set[int]:
        """Tokens that end a text."""
        return {end for one in self._criteria if isinstance(one, EosTokenCriteria) for end in one.eos_token_id.tolist()}

    def column(self, column: int, pad_token_id: int) -> torch.Tensor:
        """(rows,) final ids of a column, padding where a row ended before it."""
        ids = self.ids[:, column].clone()
        for row in range(len(self)):
            if column >= self.padding[row] + self.final[row]:
                ids[row] = pad_token_id
        return ids

    def final_columns(self) -> int:
        """Columns that are final in every row."""
        going = [self.padding[row] + self.final[row] for row in self.unfinished()]
        return min(going) if going else max(self.padding[row] + self.final[row] for row in range(len(self)))

    def output(self, pad_token_id: int) -> torch.Tensor:
        """(rows, columns) prompts and continuations, padded on the right where rows ended early."""
        width = max(self.columns(row) for row in range(len(self)))
        ids = self.ids[:, :width].clone()
        for row in range(len(self)):
            if self.columns(row) < width:
                ids[row, self.columns(row) :] = pad_token_id
        return ids[:, self.unseen :]


def by_value(rows: list[int], values: list[int]) -> dict[int, list[int]]:
    """Rows grouped by a value of theirs, in order of appearance."""
    groups: dict[int, list[int]] = defaultdict(list)
    for row, value in zip(rows, values, strict=True):
        groups[value].append(row)
    return groups
