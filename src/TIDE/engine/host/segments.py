"""Running a segment: every row that is asked takes what it has pending there through the segment's layers, in one pass.

Each segment continues its own cache contiguously, so an ordinary causal forward with explicit positions is exact. A segment
with running states takes rows of equal count only, one pass for each count. Rows go alone where rotary frequencies follow the
longest text of a pass and one is past the switch. Prompts go in passes of about equal lengths:

    lengths     980 1000 | 300 | 98 99 100         a model's own modules pad each pass to its longest row
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from TIDE.adapters.rotary_table import RotaryTable
from TIDE.engine.cache.pending import Pending
from TIDE.engine.cache.prefix_store import Copied
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.passes import PassTokens
from TIDE.engine.runners.prompt_pass import PromptPass
from TIDE.routing.policy import ExitPolicy

MOST_PADDING = 0.03  # of the tokens that a pass of prompts computes
PASS_COST = 16  # tokens that take about as long to compute as one pass more does


class Segments:
    """The segments of rows that are decoded together: their cache, their pending tokens and the runner they run on.

    Args:
        spans: the layers of each segment.
        rows: to begin with, in slots numbered from 0; `make_room` and `clear` are for those that come and go.
        capacity: columns of the cache to begin with.
        watcher: is shown the states at the depths it watches, and told of rollbacks.
        prompt_pass: how prompts run; None: through all layers.
    """

    def __init__(
        self,
        runner: Runner,
        spans: Sequence[range],
        rows: Sequence[Row],
        capacity: int,
        watcher: ExitPolicy | None = None,
        prompt_pass: PromptPass | None = None,
    ) -> None:
        self.runner = runner
        self._changing = None if runner.rope.switches_at is None else RotaryTable(runner.adapter.model)
        self.prompt_pass = prompt_pass
        self.watcher = watcher
        self.watched = frozenset(watcher.watches if watcher is not None else ())
        self.spans = spans
        self.last = len(spans) - 1
        self.cache = SegmentCache(len(rows), spans, runner.adapter.stores, capacity)
        self.pending = Pending()
        self._embedded: dict[Row, tuple[int, torch.Tensor]] = {}  # a position, and states at depth 0 from there on
        self.starts_from_ids = not len(spans[0]) and runner.embed([0]) is not None

    def make_room(self, rows: int) -> None:
        """Have slots for `rows` rows."""
        self.cache.make_room(rows)

    def clear(self, row: Row) -> None:
        """Forget all of a row: its slot is for another one."""
        self.cache.clear(row.slot)
        self._forget(row, 0)

    def copied(self, row: Row, length: int) -> Copied:
        """Return a copy of what was made of a row's first tokens, for others that begin alike."""
        memory = self.watcher.copied(row.slot) if self.watcher is not None and self.watched else None
        return Copied(self.cache.copied(row.slot, length), memory)

    def paste(self, row: Row, copied: Copied, length: int) -> None:
        """Let a new row begin with the first `length` tokens of a copy."""
        self.cache.paste(row.slot, copied.layers, length)
        if self.watcher is not None and self.watched:
            self.watcher.paste(row.slot, copied.memory, length)

    def length(self, segment: int, row: Row) -> int:
        """Return how many tokens of a row have run in a segment."""
        return self.cache.segments[segment].length[row.slot]

    def waiting(self, segment: int, row: Row) -> int:
        """Return how many tokens of a row have reached a segment and not run there."""
        reached = row.size if segment == 0 else self.length(segment - 1, row)
        return reached - self.length(segment, row)

    def skip(self, segment: int, counts: dict[Row, int]) -> bool:
        """Let tokens past a first segment without layers, if the next one can start from their ids."""
        if segment or not self.starts_from_ids:
            return False
        for row, count in counts.items():
            self.cache.segments[segment].length[row.slot] += count
        return True

    def entering(self, segment: int, row: Row, start: int, stop: int) -> torch.Tensor:
        """Return the (stop - start, hidden) states of a row's tokens where a segment begins."""
        if self.spans[segment].start == 0 and self.starts_from_ids:
            position, states = self._embedded.get(row, (0, None))
            if states is None or (position, len(states)) != (start, stop - start):
                ids = row.text(start, stop)
                given = self._embeds([row], [start], [stop - start], ids)
                states = self.runner.embed(ids) if given is None else given
                assert states is not None
                self._embedded[row] = start, states
            return states
        return self.pending.states(segment, row.slot, start, stop)

    def run(
        self,
        segment: int,
        counts: dict[Row, int],
        logits_from: dict[Row, int] | None = None,
        last: int | None = None,
        best_only: bool = False,
        are_prompts: bool = False,
    ) -> dict[Row, torch.Tensor]:
        """Take the next `counts[row]` tokens of each row through a segment.

        Args:
            logits_from: the position of each row from which on logits are wanted; at full depth only.
            last: run the segments from `segment` to this one, which stand alike, in one pass.
            best_only: of the logits only the highest matter.
            are_prompts: rows whose counts differ much run in passes of their own, so that little of it is padding.

        Returns:
            (tokens, vocabulary) logits of each row.
        """
        counts = {row: count for row, count in counts.items() if count > 0}
        logits: dict[Row, torch.Tensor] = {}
        last = segment if last is None else last
        for rows in self._passes(segment, last, counts, are_prompts):
            logits |= self._pass(segment, last, rows, [counts[row] for row in rows], logits_from, best_only)
        return logits

    def run_prompts(
        self, counts: dict[Row, int], logits_from: dict[Row, int] | None = None, best_only: bool = False
    ) -> dict[Row, torch.Tensor]:
        """Take the next tokens of rows through all layers, or as `prompt_pass` takes them; otherwise like `run`."""
        logits, special = dict[Row, torch.Tensor](), self.prompt_pass
        taken = [row for row, n in counts.items() if n > 0 and special is not None and special.takes(row, self.length(0, row))]
        for row in taken:
            logits |= self._pass(0, self.last, [row], [counts[row]], logits_from, best_only, special)
        counts, segment = {row: count for row, count in counts.items() if row not in taken}, 0
        while segment <= self.last:
            reached = self.reaches(segment, list(counts))
            wanted = logits_from if reached == self.last else None
            logits |= self.run(segment, counts, wanted, reached, best_only, are_prompts=True)
            segment = reached + 1
        return logits

    def reaches(self, segment: int, rows: list[Row]) -> int:
        """Return the last segment that one pass of these rows may go through from a segment on."""
        slots = [row.slot for row in rows]
        level = (last for last in range(self.last, segment, -1) if self.cache.are_level(segment, last, slots))
        return next(level, segment)

    def write_skipped_kv(self, segment: int, rows: list[Row], states: torch.Tensor, strategy: str) -> None:
        """Give the next token of each row K/V in a segment it does not run: from its (rows, hidden) state, or zeros."""
        slots = [row.slot for row in rows]
        if strategy == "zero_pad":
            self.cache.zero_pad(segment, slots)
            return
        tokens = self._tokens(rows, [self.length(segment, row) for row in rows], [1] * len(rows))
        with self.cache.open(segment, slots, tokens.counts):
            self.runner.write_skipped_kv(self.spans[segment], tokens, states, self.cache)

    def rollback(self, row: Row, length: int) -> None:
        """Forget the tokens of a row from position `length` on."""
        self.cache.rollback(row.slot, length)
        self._forget(row, length)

    def _forget(self, row: Row, length: int) -> None:
        self.pending.cut(row.slot, length)
        self._embedded.clear()
        if self.watcher is not None:
            self.watcher.forget(row.slot, length)

    def commit(self, row: Row) -> None:
        """Drop what only a rollback below the full-depth length of the row could need."""
        done = self.length(self.last, row)
        self.pending.drop_before(row.slot, done)
        self.cache.commit(row.slot, done)

    def _passes(self, segment: int, last: int, counts: dict[Row, int], are_prompts: bool) -> list[list[Row]]:
        """Return the rows of each pass, in the order the cache has them: neighbours are not copied."""
        rows = sorted(counts, key=lambda row: row.slot)
        switch = self.runner.rope.switches_at
        if switch is not None and any(self.length(segment, row) + count > switch for row, count in counts.items()):
            return [[row] for row in rows]
        if self.cache.keeps_state(segment, last):
            groups: dict[tuple[int, bool], list[Row]] = defaultdict(list)
            for row in rows:
                groups[counts[row], self.length(segment, row) > 0].append(row)  # a first state is made by the model
            return list(groups.values())
        if not are_prompts or not rows or self._is_ragged(segment, rows, counts):
            return [rows] if rows else []
        return [sorted(own, key=lambda row: row.slot) for own in about_as_long(counts)]

    def _is_ragged(self, segment: int, rows: list[Row], counts: dict[Row, int]) -> bool:
        starts = [self.length(segment, row) for row in rows]
        return self.runner.is_ragged(self._tokens(rows, starts, [counts[row] for row in rows]))

    def _pass(
        self,
        segment: int,
        last: int,
        rows: list[Row],
        counts: list[int],
        logits_from: dict[Row, int] | None,
        best_only: bool,
        prompt_pass: PromptPass | None = None,
    ) -> dict[Row, torch.Tensor]:
        span = range(self.spans[segment].start, self.spans[last].stop)
        starts = [self.length(segment, row) for row in rows]
        if segment == last and self.skip(segment, dict(zip(rows, counts, strict=True))):
            self._show_first(rows, starts, counts)
            return {}
        from_ids = segment == 0 or (span.start == 0 and self.starts_from_ids)
        hidden = None if from_ids else self._entering(segment, rows, starts, counts)
        tokens = self._tokens(rows, starts, counts)
        if self._changing is not None:
            self._changing.restart()
        if logits_from is not None:
            kept = [start + count - logits_from[row] for row, start, count in zip(rows, starts, counts, strict=True)]
            tokens = tokens._replace(kept=kept, best_only=best_only)
        taps = tuple(depth for depth in self.watched if span.start < depth < span.stop or 0 == span.start == depth < span.stop)
        with self.cache.open(segment, tokens.rows, counts, last, aligned=not self.runner.is_ragged(tokens)):
            if prompt_pass is not None:
                passed = prompt_pass.run(self.runner, rows[0], tokens, self.cache, taps)
            else:
                passed = self.runner.run(span, tokens, self.cache, hidden, taps)
        for row, computed in zip(rows, passed.computed, strict=True):
            row.stats.layers_run += computed
        self._show(passed.taps | {span.stop: passed.states}, rows, starts, counts)
        if last != self.last:
            for row, start, states in zip(rows, starts, passed.states.split(counts), strict=True):
                self.pending.add(last + 1, row.slot, start, states)
        if passed.logits is None or tokens.kept is None:
            return {}
        return dict(zip(rows, passed.logits.split(tokens.kept), strict=True))

    def _tokens(self, rows: list[Row], starts: list[int], counts: list[int]) -> PassTokens:
        ids = [token for row, start, n in zip(rows, starts, counts, strict=True) for token in row.text(start, start + n)]
        return PassTokens([row.slot for row in rows], starts, counts, ids, self._embeds(rows, starts, counts, ids))

    def _embeds(self, rows: list[Row], starts: list[int], counts: list[int], ids: list[int]) -> torch.Tensor | None:
        """Return the (n, hidden) embeddings of the tokens, if prompts came as embeddings and are part of the pass."""
        if all(row.embeds is None or start >= len(row.embeds) for row, start in zip(rows, starts, strict=True)):
            return None
        embedded = self.runner.adapter.model.get_input_embeddings()(torch.tensor(ids, device=self.runner.device))
        embeds = list(embedded.split(counts))
        for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True)):
            if row.embeds is not None and start < len(row.embeds):
                given = row.embeds[start : start + count].to(embeds[index])
                embeds[index] = torch.cat([given, embeds[index][len(given) :]])
        return torch.cat(embeds)

    def _entering(self, segment: int, rows: list[Row], starts: list[int], counts: list[int]) -> torch.Tensor:
        """Return (n, hidden) states of the tokens of a pass, row after row."""
        parts = [
            self.entering(segment, row, start, start + count) for row, start, count in zip(rows, starts, counts, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _show_first(self, rows: list[Row], starts: list[int], counts: list[int]) -> None:
        """Show states at depth 0 before an exit there is asked."""
        if self.watcher is not None and 0 in self.watched:
            for row, start, count in zip(rows, starts, counts, strict=True):
                self.watcher.observe(0, row.slot, start, self.entering(1, row, start, start + count))

    def _show(self, states: dict[int, torch.Tensor], rows: list[Row], starts: list[int], counts: list[int]) -> None:
        if self.watcher is None:
            return
        for depth in self.watched & states.keys():
            for row, start, own in zip(rows, starts, states[depth].split(counts), strict=True):
                self.watcher.observe(depth, row.slot, start, own)


def about_as_long(counts: dict[Row, int]) -> list[list[Row]]:
    """Return rows in groups whose passes compute little padding; all in one where more passes would take longer than that."""
    groups: list[list[Row]] = []
    total = 0  # tokens of the newest group
    for row in sorted(counts, key=counts.__getitem__, reverse=True):
        total += counts[row]
        if groups and _pads_little(total, counts[groups[-1][0]], len(groups[-1]) + 1):
            groups[-1].append(row)
        else:
            groups.append([row])
            total = counts[row]
    apart = sum(len(rows) * counts[rows[0]] for rows in groups) + PASS_COST * (len(groups) - 1)
    return groups if apart < len(counts) * max(counts.values()) else [list(counts)]


def _pads_little(total: int, longest: int, rows: int) -> bool:
    """Return True if little of a pass is padding: its rows have `total` tokens together, the longest `longest`."""
    return total >= (1 - MOST_PADDING) * longest * rows
