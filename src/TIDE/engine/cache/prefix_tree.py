"""Prefixes: whole blocks of K/V that are kept when their rows have gone, and shared by rows whose texts begin alike.

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


class Node:
    """A block of a text that is kept."""

    __slots__ = ("block", "children", "holders", "key", "siblings")

    def __init__(self, block: int, key: Key, siblings: dict[Key, Node]) -> None:
        self.block = block
        self.key = key
        self.siblings = siblings
        self.children: dict[Key, Node] = {}
        self.holders = 1


class Root:
    """The beginning of all texts of a salt."""

    __slots__ = ("branches", "rows")

    def __init__(self) -> None:
        self.branches: dict[Key, Node] = {}
        self.rows = 0  # that began there and have not gone


class Held(NamedTuple):
    """The blocks that a row holds, from its first token on."""

    salt: Hashable
    root: Root
    nodes: list[Node]


class Prefixes:
    """Blocks by the texts they hold.

    Args:
        size: tokens of a block.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._roots: dict[Hashable, Root] = {}
        self._idle: dict[Node, Hashable] = {}  # that nobody holds, with their salts; the least recently used first

    @property
    def idle(self) -> int:
        """Blocks that can go."""
        return len(self._idle)

    def begin(self, salt: Hashable = None) -> Held:
        """Return what a row holds that has nothing yet."""
        root = self._roots.setdefault(salt, Root())
        root.rows += 1
        return Held(salt, root, [])

    def is_shared(self, held: Held) -> bool:
        """Return True if what a row holds can be found: it began after everything was forgotten the last time."""
        return self._roots.get(held.salt) is held.root

    def key(self, held: Held, text: Sequence[int]) -> Key:
        """Return the tokens of the block that follows those a row holds; fewer than a block has: there is none."""
        first = len(held.nodes) * self.size
        return tuple(text[first : first + self.size])

    def behind(self, held: Held) -> dict[Key, Node]:
        """Return the blocks that follow those a row holds."""
        return held.nodes[-1].children if held.nodes else held.root.branches

    def hold_next(self, held: Held, text: Sequence[int]) -> Node | None:
        """Let a row hold the block that follows, if it is there."""
        node = self.behind(held).get(self.key(held, text)) if self.is_shared(held) else None
        if node is not None:
            node.holders += 1
            self._idle.pop(node, None)
            held.nodes.append(node)
        return node

    def add(self, held: Held, text: Sequence[int], block: int) -> None:
        """Keep a block that a row has made behind those it holds, which is not there yet; the row holds it from now on."""
        key, siblings = self.key(held, text), self.behind(held)
        assert len(key) == self.size and key not in siblings and self.is_shared(held)
        siblings[key] = Node(block, key, siblings)
        held.nodes.append(siblings[key])

    def release(self, held: Held) -> list[int]:
        """Let go what a row holds; return the blocks that nobody can find any more."""
        is_shared, lost = self.is_shared(held), []
        while held.nodes:
            node = held.nodes.pop()  # the last one of a text is the first to go
            node.holders -= 1
            if not node.holders and is_shared:
                self._idle[node] = held.salt
            elif not node.holders:
                lost.append(node.block)
        held.root.rows -= 1
        if is_shared:
            self._prune(held.salt)
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
        """Forget everything, because the model is another one now; return the blocks that nobody holds."""
        found = [node.block for node in self._idle]
        self._roots, self._idle = {}, {}
        return found
