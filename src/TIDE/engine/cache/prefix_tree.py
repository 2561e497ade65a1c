"""The prefix tree: whole blocks of K/V, kept when their rows have gone and shared by rows with a common prefix.

    salt ── block 0 ── block 1 ── block 2          a text; each block is found by its tokens behind those before it
                  └─── block 1'                    another one that begins alike

Only what the full model made is kept. A row that holds a block holds all blocks before it, so those that nobody holds are the
ends of branches: they can go, the least recently used first. Whoever has a block has its bits: K/V do not depend on who made
them. Blocks of other salts are never found.
"""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Sequence
from typing import NamedTuple

Key = tuple[int, ...]  # the tokens of a block


def new_salt() -> str:
    """Return a salt that no text has. With it nothing of a prompt is found: measurements want that."""
    return uuid.uuid4().hex


class PrefixNode:
    """A block of a text that is kept."""

    __slots__ = ("block", "children", "holders", "key", "siblings")

    def __init__(self, block: int, key: Key, siblings: dict[Key, PrefixNode]) -> None:
        self.block = block
        self.key = key
        self.siblings = siblings
        self.children: dict[Key, PrefixNode] = {}
        self.holders = 1


class PrefixRoot:
    """The beginning of all texts of a salt."""

    __slots__ = ("branches", "rows")

    def __init__(self) -> None:
        self.branches: dict[Key, PrefixNode] = {}
        self.rows = 0  # that began there and have not gone


class PrefixRef(NamedTuple):
    """The blocks of the tree that a row holds, from its first token on."""

    salt: Hashable
    root: PrefixRoot
    nodes: list[PrefixNode]


class PrefixTree:
    """Blocks by the texts they hold.

    Args:
        size: tokens of a block.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._roots: dict[Hashable, PrefixRoot] = {}
        self._idle: dict[PrefixNode, Hashable] = {}  # that nobody holds, with their salts; the least recently used first

    @property
    def idle(self) -> int:
        """Blocks that can go."""
        return len(self._idle)

    def begin(self, salt: Hashable = None) -> PrefixRef:
        """Return an empty reference."""
        root = self._roots.setdefault(salt, PrefixRoot())
        root.rows += 1
        return PrefixRef(salt, root, [])

    def is_shared(self, ref: PrefixRef) -> bool:
        """Return True if its blocks can be found: it began after the tree was dropped the last time."""
        return self._roots.get(ref.salt) is ref.root

    def key(self, ref: PrefixRef, text: Sequence[int]) -> Key:
        """Return the tokens of the next block of a text; fewer than a block has: there is none."""
        first = len(ref.nodes) * self.size
        return tuple(text[first : first + self.size])

    def children(self, ref: PrefixRef) -> dict[Key, PrefixNode]:
        """Return the blocks that may follow."""
        return ref.nodes[-1].children if ref.nodes else ref.root.branches

    def hold_next(self, ref: PrefixRef, text: Sequence[int]) -> PrefixNode | None:
        """Hold the next block of a text, if it is there."""
        node = self.children(ref).get(self.key(ref, text)) if self.is_shared(ref) else None
        if node is not None:
            node.holders += 1
            self._idle.pop(node, None)
            ref.nodes.append(node)
        return node

    def add(self, ref: PrefixRef, text: Sequence[int], block: int) -> None:
        """Insert the next block of a text into the tree, and hold it."""
        key, siblings = self.key(ref, text), self.children(ref)
        assert len(key) == self.size and key not in siblings and self.is_shared(ref)
        siblings[key] = PrefixNode(block, key, siblings)
        ref.nodes.append(siblings[key])

    def release(self, ref: PrefixRef) -> list[int]:
        """Let the blocks of a row go; return those that nobody can find any more."""
        is_shared, lost = self.is_shared(ref), []
        while ref.nodes:
            node = ref.nodes.pop()  # the last one of a text is the first to go
            node.holders -= 1
            if not node.holders and is_shared:
                self._idle[node] = ref.salt
            elif not node.holders:
                lost.append(node.block)
        ref.root.rows -= 1
        if is_shared:
            self._prune(ref.salt)
        return lost

    def evict(self) -> int:
        """Forget the least recently used block, and return its number."""
        node = next(iter(self._idle))
        assert not node.children, "there are blocks behind it that were used less recently"
        del node.siblings[node.key]
        self._prune(self._idle.pop(node))
        return node.block

    def _prune(self, salt: Hashable) -> None:
        """Forget a salt that no text and no row has."""
        root = self._roots[salt]
        if not root.branches and not root.rows:
            del self._roots[salt]

    def drop(self) -> list[int]:
        """Empty the tree, because the model is another one now; return the blocks that nobody holds."""
        found = [node.block for node in self._idle]
        self._roots, self._idle = {}, {}
        return found
