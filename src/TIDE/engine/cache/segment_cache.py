"""The cache: K/V written at explicit (row, column), with a length for every (segment, row).

A segment's rows may have seen different numbers of tokens. A pass needs their histories to end at the same
column, so that an ordinary causal forward continues each of them:

    before a pass        after aligning                     the pass writes columns 5 and 6
    row 0  t0 t1 t2 t3 t4     t0 t1 t2 t3 t4 | n  n          all rows start at column 5
    row 1  t0 t1 t2           ·  ·  t0 t1 t2 | n  -          origin 2: columns before it are masked

Row 1 takes one token where row 0 takes two: its second column (-) is padding, invisible to what stands before
it and overwritten later. A length says how far a row is valid, so rolling back is changing a length. Layers
with a running state instead of K/V (linear attention, convolutions) keep a copy of it at every length they
stopped at, and roll back to the nearest one at or below. Rows come and go: room for more is made when it is
needed, and the row of a text that is over is cleared for another one.

Invariants: for every row the lengths never grow from a segment to the next; columns before a row's origin and
after its length are never attended to by its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache

from TIDE.adapters.probe import Store
from TIDE.adapters.span import KVWritten
from TIDE.engine.cache.cache_layers import KVLayer, StateLayer, View

STEP = 256  # columns added at a time


def longest_copied(layers: list[Any], length: int) -> int:
    """Return how many of a copy's first `length` tokens can be taken: running states are there at some lengths only."""
    states = [part for part in layers if isinstance(part, dict)]
    before = -1
    while length != before:
        before = length
        for part in states:
            length = max((n for n in part if n <= length), default=0)
    return length


@dataclass
class SegmentLengths:
    """Lengths of all rows in one segment, and the columns where their tokens begin."""

    layers: range
    length: list[int]
    origin: list[int]
    capacity: int = 0

    def end(self, row: int) -> int:
        return self.origin[row] + self.length[row]


class SegmentCache(Cache):
    """One row per sequence, one length per segment.

    Args:
        rows: sequences in the batch.
        spans: the layers of each segment.
        stores: what each layer keeps.
        capacity: columns to allocate at first.
        static: never grow and always answer with all columns, so that shapes do not change between passes.
    """

    def __init__(self, rows: int, spans: Sequence[range], stores: Sequence[Store], capacity: int = STEP, static: bool = False):
        makers = {Store.KV: KVLayer, Store.STATE: StateLayer}
        super().__init__(layers=[makers[store]() for store in stores if store is not Store.SHARED])
        self.static = static
        self.leave_after_write = False
        self.segments = [SegmentLengths(span, [0] * rows, [0] * rows, capacity) for span in spans]
        self._stores = tuple(stores)
        self._view: View | None = None
        self._offset = torch.zeros((), dtype=torch.long)  # static: where the pass writes, as a tensor

    @property
    def view(self) -> View:
        assert self._view is not None, "the cache is used outside a pass"
        return self._view

    @property
    def rows(self) -> int:
        return len(self.segments[0].length)

    def make_room(self, rows: int) -> None:
        """Make room for `rows` rows; more than there are at least double them."""
        if rows > self.rows:
            more = [0] * (max(rows, 2 * self.rows) - self.rows)
            for own in self.segments:
                own.length += more
                own.origin += more

    def clear(self, row: int) -> None:
        """Forget all of a row, for another text to come."""
        for own in self.segments:
            own.length[row] = own.origin[row] = 0
        for layer in self.layers:
            layer.clear(row)

    def lengths(self, row: int) -> list[int]:
        return [segment.length[row] for segment in self.segments]

    def keeps_state(self, segment: int, last: int | None = None) -> bool:
        """True if a layer from a segment to the last one keeps a running state: passes there must not contain padding."""
        return bool(self._states_of(self._from_to(segment, last)))

    def _from_to(self, segment: int, last: int | None) -> list[SegmentLengths]:
        return self.segments[segment : (segment if last is None else last) + 1]

    # ---- a pass -----------------------------------------------------------------------------------

    def are_level(self, first: int, last: int, rows: list[int]) -> bool:
        """True if rows stand alike in segments that follow each other, so that one pass may go through all of them."""
        owns = self._from_to(first, last)
        if self._states_of(owns):
            return False  # rolling back to a saved state may need what stood between the segments
        stands = [(own.capacity, *((own.length[row], own.origin[row]) for row in rows)) for own in owns]
        return all(stand == stands[0] for stand in stands)

    @contextmanager
    def open(
        self, segment: int, rows: list[int], counts: list[int], last: int | None = None, aligned: bool = True
    ) -> Iterator[View]:
        """Make room for `counts` new tokens of `rows` in a segment; lengths grow when the pass succeeds.

        Args:
            last: the pass goes through the level segments from `segment` to this one.
            aligned: move histories so that they end at one column, as a model's own modules need it. Otherwise every row goes
                on where it stands.
        """
        assert len(rows) == len(counts) > 0 and min(counts) > 0
        assert not self.keeps_state(segment, last) or len(set(counts)) == 1, "padding would enter a running state"
        owns = self._from_to(segment, last)
        width = max(counts)
        if aligned:
            starts, *others = [[self._align(own, rows, width)] * len(rows) for own in owns]
        else:
            starts, *others = [self._make_room(own, rows, counts) for own in owns]
        assert all(other == starts for other in others), "segments of one pass stand at different columns"
        self._view = View(segment, rows, starts, width)
        self._offset.fill_(starts[0])
        for layer, own in self._states_of(owns):
            layer.check_out(rows, own.length)
        try:
            yield self._view
            for own in owns:
                for row, count in zip(rows, counts, strict=True):
                    own.length[row] += count
            for layer, own in self._states_of(owns):
                layer.check_in(rows, own.length)
        finally:
            self._view = None

    @contextmanager
    def open_at(self, column: torch.Tensor, width: int) -> Iterator[None]:
        """A pass of the only row of a static cache, from a column that only the device knows. Lengths stay as they are."""
        assert self.static and len(self.segments) == len(self.segments[0].length) == 1
        self._view, self._offset = View(0, [0], [0], width), column
        try:
            yield
        finally:
            self._view = None

    def mask(self) -> torch.Tensor | None:
        """(n, columns) 1 where a column belongs to the row; None where that is everywhere."""
        view, own = self.view, self.segments[self.view.segment]
        origins = [own.origin[row] for row in view.rows]
        # ALiBi wants a mask as wide as the keys it gets, running states one that ends with the pass.
        whole = self.static and not self.keeps_state(view.segment)
        if not any(origins) and not whole:
            return None
        columns = torch.arange(own.capacity if whole else view.stop)
        return ((columns >= torch.tensor(origins)[:, None]) & (columns < view.stop)).long()

    def zero_pad(self, segment: int, rows: list[int]) -> None:
        """Advance rows by one token whose K/V are zeros."""
        with self.open(segment, rows, [1] * len(rows)) as view:
            for index in self.segments[segment].layers:
                if self._stores[index] is Store.KV:
                    self.layers[index].zero(view)

    def rollback(self, row: int, length: int) -> None:
        """Forget the tokens of a row from position `length` on, or from a little before where a state demands it."""
        for own in self.segments:
            length = min(length, own.length[row])
            states = self._states_of([own])
            for layer, _ in states:
                length = min(length, layer.nearest(row, length))
            own.length[row] = length
            for layer, _ in states:
                layer.forget_after(row, length)

    def commit(self, row: int, length: int) -> None:
        """The row will not be rolled back below `length` any more: older states can go."""
        for layer, own in self._states_of(self.segments):
            layer.forget_before(row, min(length, own.length[row]))

    def copied(self, row: int, length: int) -> list[Any]:
        """Return a copy of what every layer has of a row's first tokens, which have run all of them."""
        assert all(own.length[row] >= length for own in self.segments)
        return [layer.copied(row, self._owner(index).origin[row], length) for index, layer in enumerate(self.layers)]

    def paste(self, row: int, layers: list[Any], length: int) -> None:
        """Let an empty row begin with the first `length` tokens of a copy, as many as `longest_copied` allows."""
        for own in self.segments:
            self._reserve(own, length)
        for layer, copied in zip(self.layers, layers, strict=True):
            layer.paste(row, copied, length)
        for own in self.segments:
            own.origin[row], own.length[row] = 0, length

    def usable(self, row: int, length: int) -> int:
        """Return how many of a row's first `length` tokens others can begin with: see `longest_copied`."""
        return longest_copied([layer.copied(row, 0, length) for layer, _ in self._states_of(self.segments)], length)

    def bytes_of(self, length: int) -> int:
        """Return the bytes of `length` tokens' K/V."""
        filled = [layer for layer in self.layers if isinstance(layer, KVLayer) and layer.is_initialized]
        parts = [part for layer in filled for part in (layer.keys, layer.values)]
        return sum(length * part.shape[1] * part.shape[3] * part.element_size() for part in parts)

    def kv(self, layer: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(heads, length, dim) keys and values of a row, for inspection."""
        own = self._owner(layer)
        columns = slice(own.origin[row], own.end(row))
        return self.layers[layer].keys[row, :, columns], self.layers[layer].values[row, :, columns]

    def shared_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K/V of a layer in an earlier segment, with its columns moved to where this pass has them."""
        view, source = self.view, self.layers[layer]
        own = self.segments[view.segment]
        theirs = self._owner(layer)
        columns = torch.arange(source.keys.shape[2] if self.static else view.stop, device=source.keys.device)
        moved = [columns - own.origin[row] + theirs.origin[row] for row in view.rows]
        index = torch.stack(moved).clamp(0, source.keys.shape[2] - 1)[:, None, :, None]
        keys, values = source.keys[view.rows], source.values[view.rows]
        return tuple(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (keys, values))

    def kv_buffers(self, layer: int, heads: int, dim: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, (rows, heads, columns, dim), for a pass that writes them itself."""
        own = self.layers[layer]
        if not own.is_initialized:
            nothing = like.new_empty(1, heads, 0, dim)
            own.lazy_initialization(nothing, nothing)
        return own.keys, own.values

    def adopt(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Use these tensors, (rows, heads, columns, dim), for a layer."""
        own = self.layers[layer]
        own.keys, own.values = keys, values
        own.rows, own.capacity, own.is_initialized = len(keys), keys.shape[2], True

    def _owner(self, layer: int) -> SegmentLengths:
        """The segment a layer belongs to."""
        return next(segment for segment in self.segments if layer in segment.layers)

    def _align(self, own: SegmentLengths, rows: list[int], width: int) -> int:
        """Move the histories of `rows` so that they end at one column; return it."""
        start, longest = max(own.end(row) for row in rows), max(own.length[row] for row in rows)
        if start + width > own.capacity or start >= longest + STEP:  # a longer row may have gone
            start = longest
        self._reserve(own, start + width)
        for row in rows:
            if own.end(row) != start:
                self._move(own, row, start - own.length[row])
        return start

    def _make_room(self, own: SegmentLengths, rows: list[int], counts: list[int]) -> list[int]:
        """Return the columns at which `rows` go on, with room for their new tokens."""
        self._reserve(own, max(own.end(row) + count for row, count in zip(rows, counts, strict=True)))
        return [own.end(row) for row in rows]

    def _reserve(self, own: SegmentLengths, columns: int) -> None:
        if columns > own.capacity:
            if self.static:
                raise ValueError(
                    f"the static cache holds {own.capacity} tokens and {columns} are needed. Make it with a larger capacity."
                )
            own.capacity = -(-columns // STEP) * STEP
        for index in own.layers:
            if self._stores[index] is Store.KV:
                self.layers[index].reserve(own.capacity, len(own.length))

    def _move(self, own: SegmentLengths, row: int, origin: int) -> None:
        for index in own.layers:
            if self._stores[index] is Store.KV:
                self.layers[index].move(row, own.origin[row], origin, own.length[row])
        own.origin[row] = origin

    def _states_of(self, owns: list[SegmentLengths]) -> list[tuple[StateLayer, SegmentLengths]]:
        return [(self.layers[index], own) for own in owns for index in own.layers if self._stores[index] is Store.STATE]

    # ---- what a model's forward asks of a cache -----------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.static and self._offset.device != key_states.device:
            self._offset = self._offset.to(key_states.device)
        answer = self.layers[layer_idx].write(key_states, value_states, self.view, self._offset if self.static else None)
        if self.leave_after_write:
            raise KVWritten
        return answer

    @property
    def is_compileable(self) -> bool:
        return self.static  # makes transformers mask the columns that are not filled yet

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.view.start

    def get_query_offset(self, layer_idx: int = 0) -> int | torch.Tensor:
        return self._offset if self.static else self.view.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        own = self.segments[self.view.segment]
        return (own.capacity if self.static else self.view.stop), 0
