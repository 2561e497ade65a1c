"""Running a segment: every asked row takes what it has pending there through the segment's layers, in one pass.

Each segment continues its own cache contiguously, so an ordinary causal forward with explicit positions is
exact. Rows with fewer pending tokens than others are padded on the right, where nothing can see it; a segment
with running states takes rows of equal count only, one pass for each count.
"""

from __future__ import annotations

import torch

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.engine.batch import Batch, by_value
from TIDE.engine.cache.pending import Pending
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.plan import Plan
from TIDE.routing.policy import ExitPolicy
from TIDE.stats import ExitStats


class Segments:
    """The segments of one request: its cache, its pending tokens and the window they run through.

    Args:
        watcher: is shown the states at the depths it watches, and told of rollbacks.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: Plan,
        batch: Batch,
        capacity: int,
        stats: ExitStats,
        watcher: ExitPolicy | None = None,
    ) -> None:
        self.adapter = adapter
        self.batch = batch
        self.stats = stats
        self.watcher = watcher
        self.watched = frozenset(watcher.watches if watcher is not None else ())
        self.spans = plan.spans
        self.last = len(plan.spans) - 1
        self.cache = SegmentCache(len(batch), plan.spans, adapter.stores, capacity)
        self.pending = Pending()
        self._embedded: dict[int, tuple[int, torch.Tensor]] = {}  # by row: a position, and states at depth 0 from there on
        has_ids = batch.embeds is None
        self.starts_from_ids = has_ids and not len(plan.spans[0]) and adapter.embed(batch.ids[:1, :1]) is not None

    def length(self, segment: int, row: int) -> int:
        return self.cache.segments[segment].length[row]

    def waiting(self, segment: int, row: int) -> int:
        """Tokens of a row that have reached a segment and not run there."""
        reached = self.batch.size[row] if segment == 0 else self.length(segment - 1, row)
        return reached - self.length(segment, row)

    def skip(self, segment: int, counts: dict[int, int]) -> bool:
        """Let tokens past a first segment without layers, if the next one can start from their ids."""
        if segment or not self.starts_from_ids:
            return False
        for row, count in counts.items():
            self.cache.segments[segment].length[row] += count
        return True

    def entering(self, segment: int, row: int, start: int, stop: int) -> torch.Tensor:
        """(stop - start, hidden) states of a row's tokens where a segment begins."""
        if self.spans[segment].start == 0 and self.starts_from_ids:
            position, states = self._embedded.get(row, (0, None))
            if states is None or (position, len(states)) != (start, stop - start):
                states = self.adapter.embed(self.batch.tokens(row, start, stop))
                assert states is not None
                self._embedded[row] = start, states
            return states
        return self.pending.states(segment, row, start, stop)

    def run(
        self, segment: int, counts: dict[int, int], logits_from: dict[int, int] | None = None, last: int | None = None
    ) -> dict[int, torch.Tensor]:
        """Take the next `counts[row]` tokens of each row through a segment.

        Args:
            logits_from: row -> first position whose logits are wanted; None: no logits.
            last: go on through level segments up to this one, in the same pass.

        Returns:
            (positions, vocabulary) logits of each row asked for.
        """
        counts = {row: count for row, count in counts.items() if count > 0}
        logits: dict[int, torch.Tensor] = {}
        last = segment if last is None else last
        for rows in self._passes(segment, last, list(counts), list(counts.values())):
            logits |= self._pass(segment, last, rows, [counts[row] for row in rows], logits_from)
        return logits

    def reaches(self, segment: int, rows: list[int]) -> int:
        """Return the last segment that one pass of these rows may go through from a segment on."""
        level = (last for last in range(self.last, segment, -1) if self.cache.are_level(segment, last, rows))
        return next(level, segment)

    def write_skipped_kv(self, segment: int, rows: list[int], states: torch.Tensor, strategy: str) -> None:
        """Give the next token of each row K/V in a segment it does not run: from its state, or zeros."""
        if strategy == "zero_pad":
            self.cache.zero_pad(segment, rows)
            return
        starts = [self.length(segment, row) for row in rows]
        with self.cache.open(segment, rows, [1] * len(rows)):
            span, feed = self.spans[segment], self._feed(rows, starts, [1] * len(rows))
            self.adapter.run(span.start, span.stop, feed, hidden=states[:, None], kv_only=True)

    def go_on(self, batch: Batch, stats: ExitStats, length: int) -> None:
        """Serve another request of one row, whose text begins with so many tokens that may have run."""
        self.batch, self.stats = batch, stats
        self.rollback(0, length)

    def rollback(self, row: int, length: int) -> None:
        self.cache.rollback(row, length)
        self.pending.cut(row, length)
        self._embedded.pop(row, None)
        if self.watcher is not None:
            self.watcher.forget(row, length)

    def settle(self, row: int) -> None:
        """Let go of what only a rollback below the full-depth length of the row could need."""
        done = self.length(self.last, row)
        self.pending.drop_before(row, done)
        self.cache.settle(row, done)

    def _passes(self, segment: int, last: int, rows: list[int], counts: list[int]) -> list[list[int]]:
        if self.cache.keeps_state(segment, last):
            return list(by_value(rows, counts).values())
        return [rows] if rows else []

    def _pass(
        self, segment: int, last: int, rows: list[int], counts: list[int], logits_from: dict[int, int] | None
    ) -> dict[int, torch.Tensor]:
        start, stop = self.spans[segment].start, self.spans[last].stop
        starts = [self.length(segment, row) for row in rows]
        if segment == last and self.skip(segment, dict(zip(rows, counts, strict=True))):
            self._show_first(rows, starts, counts)
            return {}
        from_ids = segment == 0 or (start == 0 and self.starts_from_ids)
        hidden = None if from_ids else self._hidden(segment, rows, starts, counts)
        wanted = None if logits_from is None else [logits_from[row] - at for row, at in zip(rows, starts, strict=True)]
        with self.cache.open(segment, rows, counts, last):
            feed = self._feed(rows, starts, counts)
            if from_ids:
                feed = feed._replace(embeds=self._embeds(feed.ids, rows, starts))
            keep = None if wanted is None else _keep(wanted, counts)
            taps = tuple(depth for depth in self.watched if start < depth < stop or 0 == start == depth < stop)
            passed = self.adapter.run(start, stop, feed, hidden=hidden, keep=keep, taps=taps)
        self.stats.layers_run += (stop - start) * feed.ids.numel()
        self._show(passed.taps | {stop: passed.states}, rows, starts, counts)
        if last != self.last:
            for index, row in enumerate(rows):
                self.pending.add(last + 1, row, starts[index], passed.states[index, : counts[index]])
        if wanted is None or passed.logits is None:
            return {}
        return {row: passed.logits[i, : counts[i] - wanted[i]] for i, row in enumerate(rows)}

    def _show_first(self, rows: list[int], starts: list[int], counts: list[int]) -> None:
        """Show states at depth 0 before an exit there is asked."""
        if self.watcher is not None and 0 in self.watched:
            for row, start, count in zip(rows, starts, counts, strict=True):
                self.watcher.observe(0, row, start, self.entering(1, row, start, start + count))

    def _show(self, states: dict[int, torch.Tensor], rows: list[int], starts: list[int], counts: list[int]) -> None:
        if self.watcher is None:
            return
        for depth, found in states.items():
            for index, row in enumerate(rows if depth in self.watched else ()):
                own = found[index]
                self.watcher.observe(depth, row, starts[index], own if counts[index] == len(own) else own[: counts[index]])

    def _feed(self, rows: list[int], starts: list[int], counts: list[int]) -> PassInputs:
        """Ids, positions and mask of a pass, padded on the right with the row's last position."""
        width = max(counts)
        ids = self.batch.ids.new_zeros(len(rows), width)
        positions = torch.empty(len(rows), width, dtype=torch.long)
        for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            ids[index, :count] = self.batch.tokens(row, start, start + count)
            positions[index] = torch.arange(start, start + width).clamp(max=start + count - 1)
        device, mask = self.adapter.device, self.cache.mask()
        return PassInputs(ids.to(device), positions.to(device), None if mask is None else mask.to(device), self.cache)

    def _embeds(self, ids: torch.Tensor, rows: list[int], starts: list[int]) -> torch.Tensor | None:
        """(n, q, hidden) what the tokens of a pass are embedded as, where prompts came as embeddings and are part of it."""
        batch = self.batch
        if batch.embeds is None or all(start >= batch.prompt[row] for row, start in zip(rows, starts, strict=True)):
            return None
        embeds = self.adapter.model.get_input_embeddings()(ids).clone()
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            own = batch.embeds[row, batch.padding[row] + start :]
            embeds[index, : len(own)] = own.to(embeds)
        return embeds

    def _hidden(self, segment: int, rows: list[int], starts: list[int], counts: list[int]) -> torch.Tensor:
        parts = [
            self.entering(segment, row, start, start + count) for row, start, count in zip(rows, starts, counts, strict=True)
        ]
        if len(parts) == 1:
            return parts[0][None]
        if len(set(counts)) == 1:
            return torch.stack(parts)
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _keep(wanted: list[int], counts: list[int]) -> torch.Tensor:
    """(n, kept) indices from `wanted` to the last token of each row, the last one repeated where rows differ."""
    kept = max(count - first for first, count in zip(wanted, counts, strict=True))
    return torch.tensor([[min(first + i, count - 1) for i in range(kept)] for first, count in zip(wanted, counts, strict=True)])
