"""The tokens of a pass on the host, and what comes out of it: flat lists, row after row, of any number of tokens each.

rows      0        1  2              cache rows
counts    3        1  2              tokens of each
tokens    a b c    d  e f            states, ids and logits are in this order
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class PassTokens(NamedTuple):
    """The tokens of a pass."""

    rows: list[int]  # rows of the cache
    starts: list[int]  # position of the first token of each row
    counts: list[int]  # tokens of each row
    ids: list[int]
    embeds: torch.Tensor | None = None  # (n, hidden) instead of ids
    kept: list[int] | None = None  # how many of the last tokens of each row logits are wanted of; None: of none
    best_only: bool = False  # of these logits only the highest matter

    @property
    def width(self) -> int:
        """Tokens of the longest row."""
        return max(self.counts)

    def positions(self) -> list[int]:
        """Return the position of every token."""
        return [start + i for start, count in zip(self.starts, self.counts, strict=True) for i in range(count)]

    def kept_places(self) -> list[int]:
        """Return the places of the tokens whose logits are wanted."""
        assert self.kept is not None
        places: list[int] = []
        end = 0
        for count, kept in zip(self.counts, self.kept, strict=True):
            end += count
            places += range(end - kept, end)
        return places


class PassResult(NamedTuple):
    """The result of a span of layers."""

    states: torch.Tensor  # (n, hidden) after the last layer
    logits: torch.Tensor | None  # (kept, vocabulary)
    taps: dict[int, torch.Tensor]  # (n, hidden) at each depth asked for
    computed: list[int]  # (layer, token) pairs that ran for each row, padding included


def padded(flat: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return (n, ...) values row after row as (rows, width, ...), padded on the right."""
    if len(counts) == 1:
        return flat[None]
    if len(set(counts)) == 1:
        return flat.unflatten(0, (len(counts), counts[0]))
    return torch.nn.utils.rnn.pad_sequence(flat.split(counts), batch_first=True)


def flat(values: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Return (rows, width, ...) values without their padding, row after row."""
    if len(counts) == 1:
        return values[0, : counts[0]]
    if set(counts) == {values.shape[1]}:
        return values.flatten(0, 1)
    return torch.cat([own[:count] for own, count in zip(values, counts, strict=True)])
