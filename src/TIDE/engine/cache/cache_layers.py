"""Layers of the cache: keys and values by (row, column), or the running states of a layer."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer


@dataclass
class View:
    """The rows and columns of the pass in progress."""

    segment: int  # the first one of the pass
    rows: list[int]
    starts: list[int]  # first new column of each row
    width: int  # new columns, padding included

    @property
    def start(self) -> int:
        """First new column of all rows, which stand aligned."""
        return self.starts[0]

    @property
    def stop(self) -> int:
        return self.start + self.width


class KVLayer(CacheLayerMixin):
    """Keys and values of one layer, (rows, heads, columns, dim), allocated when the first ones arrive."""

    keys: torch.Tensor
    values: torch.Tensor
    is_initialized: bool
    is_sliding = False  # windows are a matter of the mask here: every column is kept

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 0
        self.rows = 0

    def reserve(self, capacity: int, rows: int) -> None:
        """Make room for `capacity` columns and `rows` rows; what is there stays as it is."""
        if self.is_initialized and (capacity > self.capacity or rows > self.rows):
            grow = (0, 0, 0, capacity - self.capacity, 0, 0, 0, rows - self.rows)
            self.keys = torch.nn.functional.pad(self.keys, grow)
            self.values = torch.nn.functional.pad(self.values, grow)
        self.capacity, self.rows = capacity, rows

    def clear(self, row: int) -> None:
        """Forget a row. Zeros, because what is left there would enter products of the next one: see below."""
        if self.is_initialized and row < self.rows:
            self.keys[row] = 0
            self.values[row] = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # zeros, not empty: a masked column still enters products, and NaN times zero is NaN
        self.keys, self.values = (
            states.new_zeros(self.rows, states.shape[1], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, view: View, offset: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a pass and answer with the history its queries attend to; with `offset`, in shapes that never change."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = _as_slice(view.rows)
        assert key_states.shape[2] == view.width
        if offset is not None:
            columns = offset + torch.arange(view.width, device=offset.device)
            self.keys[rows, :, columns] = key_states
            self.values[rows, :, columns] = value_states
            return self.keys[rows], self.values[rows]
        if rows == slice(0, self.rows):  # `narrow` is the quickest way to a view
            self.keys.narrow(2, view.start, view.width).copy_(key_states)
            self.values.narrow(2, view.start, view.width).copy_(value_states)
            return self.keys.narrow(2, 0, view.stop), self.values.narrow(2, 0, view.stop)
        self.keys[rows, :, view.start : view.stop] = key_states
        self.values[rows, :, view.start : view.stop] = value_states
        return self.keys[rows, :, : view.stop], self.values[rows, :, : view.stop]

    def zero(self, view: View) -> None:
        self.keys[view.rows, :, view.start : view.stop] = 0
        self.values[view.rows, :, view.start : view.stop] = 0

    def copied(self, row: int, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return a copy of (heads, length, dim) keys and values of a row; None: there are none yet."""
        if not self.is_initialized:
            return None
        return self.keys[row, :, start : start + length].clone(), self.values[row, :, start : start + length].clone()

    def paste(self, row: int, copied: tuple[torch.Tensor, torch.Tensor] | None, length: int) -> None:
        """Let a row begin with the first `length` columns of a copy."""
        if copied is not None:
            if not self.is_initialized:
                self.lazy_initialization(copied[0][None], copied[1][None])
            self.keys[row, :, :length], self.values[row, :, :length] = (part[:, :length] for part in copied)

    def move(self, row: int, old: int, new: int, length: int) -> None:
        for states in (self.keys, self.values):
            if states is not None and length:
                states[row, :, new : new + length] = states[row, :, old : old + length].clone()

    # The cache answers for its layers; these are asked of it, never of them.
    def update(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("write through SegmentCache.update")

    def get_seq_length(self) -> int:
        raise NotImplementedError("ask SegmentCache")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        raise NotImplementedError("ask SegmentCache")

    def get_max_length(self) -> int:
        return -1


class StateLayer(LinearAttentionLayer):
    """The running state of one layer: a copy per row for every length the row stopped at.

    While a pass is open this object holds the states of the pass's rows, as transformers expects them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved: dict[int, dict[int, LinearAttentionLayer]] = {}  # row -> length -> its state

    def check_out(self, rows: list[int], length: list[int]) -> None:
        LinearAttentionLayer.__init__(self)
        if any(length[row] for row in rows):
            self.__dict__.update(_joined([self.saved[row][length[row]] for row in rows]).__dict__)

    def check_in(self, rows: list[int], length: list[int]) -> None:
        for index, row in enumerate(rows):
            self.saved.setdefault(row, {})[length[row]] = _part(self, index)

    def clear(self, row: int) -> None:
        """Forget a row."""
        self.saved.pop(row, None)

    def copied(self, row: int, start: int, length: int) -> dict[int, LinearAttentionLayer]:
        """Return the states of a row by length: they are never changed."""
        return {n: state for n, state in self.saved.get(row, {}).items() if n <= length}

    def paste(self, row: int, copied: dict[int, LinearAttentionLayer], length: int) -> None:
        """Let a row begin with the states of a copy, up to that at `length`."""
        self.saved[row] = {n: state for n, state in copied.items() if n <= length}

    def nearest(self, row: int, length: int) -> int:
        return max((n for n in self.saved.get(row, {}) if n <= length), default=0)

    def forget_after(self, row: int, length: int) -> None:
        self.saved[row] = {n: state for n, state in self.saved.get(row, {}).items() if n <= length}

    def forget_before(self, row: int, length: int) -> None:
        oldest = self.nearest(row, length)
        self.saved[row] = {n: state for n, state in self.saved.get(row, {}).items() if n >= oldest}


def _joined(states: list[LinearAttentionLayer]) -> LinearAttentionLayer:
    """One layer state for several rows. Concatenating copies, so what is saved is safe from in-place updates."""
    joined = copy.copy(states[0])
    for name in ("conv_states", "recurrent_states"):
        parts = [getattr(state, name) for state in states]
        merged = {key: None if parts[0][key] is None else torch.cat([part[key] for part in parts]) for key in parts[0]}
        setattr(joined, name, merged)
    return joined


def _part(state: LinearAttentionLayer, index: int) -> LinearAttentionLayer:
    """The state of one row, as a LinearAttentionLayer of its own."""
    part = LinearAttentionLayer()
    part.__dict__.update({key: copy.copy(value) for key, value in state.__dict__.items() if key != "saved"})
    for name in ("conv_states", "recurrent_states"):
        whole = getattr(state, name)
        setattr(part, name, {key: None if x is None else x[index : index + 1].clone() for key, x in whole.items()})
    return part


def _as_slice(rows: list[int]) -> slice | list[int]:
    """Neighbouring rows as a slice: indexing with it is a view, with a list a copy."""
    if rows == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return rows
