"""Prefix sharing: whole blocks of texts that begin alike are shared (`cache/prefix_tree.py`).

A row finds those that are there when it joins, and waits for those that a row before it is about to make.
"""

from __future__ import annotations

from collections.abc import Sequence

from TIDE.engine.cache.kv_blocks import BLOCK
from TIDE.engine.cache.prefix_tree import PrefixRef, PrefixTree
from TIDE.engine.rows.row import Row
from TIDE.engine.slots.block_manager import BlockManager
from TIDE.engine.slots.prefill import Entering


class PrefixSharing:
    """The blocks that rows share, the first ones of each."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self._refs: dict[Row, PrefixRef] = {}

    @property
    def prefixes(self) -> PrefixTree:
        return self.blocks.store.prefixes

    def begin(self, own: Entering) -> None:
        """Let a row that joins have the blocks that are there."""
        self._refs[own.row] = self.prefixes.begin(own.row.salt)
        self.find_more(own)

    def find_more(self, own: Entering) -> None:
        """Hold the blocks behind those that a row holds, as far as they are there and it has not run them itself.

        What a memory head remembers of a token lies with the place behind it, in the next block: so the last token of a block
        that was found runs again.
        """
        ref, count = self._refs[own.row], len(self._refs[own.row].nodes)
        while own.done <= BLOCK * len(ref.nodes) and (node := self.prefixes.hold_next(ref, own.text)) is not None:
            self.blocks.put(own.row, len(ref.nodes) - 1, node.block)
            own.done = BLOCK * len(ref.nodes) - (self.blocks.store.head is not None)
        own.row.stats.reused_tokens += BLOCK * (len(ref.nodes) - count)

    def ready(self, entering: Sequence[Entering]) -> list[Entering]:
        """Return the rows whose texts can run now: those that do not wait for a block that one before them makes."""
        found, promised = [], set()
        for own in entering:
            self.find_more(own)
            if own.is_done:
                continue
            ref = self._refs[own.row]
            key = self.prefixes.key(ref, own.text)
            next_block = id(self.prefixes.children(ref)), key
            if len(key) < BLOCK or next_block not in promised:
                found.append(own)
            promised.add(next_block)
        return found

    def has_more_to_keep(self, row: Row) -> bool:
        """Return True if a row has whole blocks of final tokens that it does not share yet."""
        ref = self._refs.get(row)
        return ref is not None and self.prefixes.is_shared(ref) and (len(row.tokens) - 1) // BLOCK > len(ref.nodes)

    def keep(self, row: Row, text: Sequence[int], done: int) -> None:
        """Let others find the whole blocks of a text whose first `done` tokens have run."""
        ref = self._refs.get(row)
        if ref is None or not self.prefixes.is_shared(ref):
            return
        while BLOCK * (len(ref.nodes) + 1) <= done:
            number = len(ref.nodes)
            if (node := self.prefixes.hold_next(ref, text)) is None:
                self.prefixes.add(ref, text, self.blocks.of[row][number])
            else:  # another row has made the same
                self.blocks.put(row, number, node.block)

    def detach(self, row: Row) -> None:
        """Leave in the row's list only the blocks that `BlockManager.free` may give back: the tree keeps those that others can
        find. Where this is broken off, blocks may be lost, but none is given back twice."""
        if (ref := self._refs.get(row)) is None:  # it was about to join
            return
        blocks = self.blocks.of[row]
        del blocks[: len(ref.nodes)]
        del self._refs[row]
        blocks += self.prefixes.release(ref)
