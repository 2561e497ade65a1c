"""A search for prompts that are bad for an engine: change a few tokens, keep the change if the prompt got worse, go on.

It sees nothing but the engine's answers and counts, as a client of a server would (`usage` has the drafts).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from kept import Kept, Record

CHANGED = 4  # tokens that a change replaces


def search(
    kept: Kept, starts: list[list[int]], harm: Callable[[list[int]], Record], steps: int, words: list[int]
) -> list[Record]:
    """Return for every start the record of the worst prompt found, with its "ids"; "harm" of a record is what grows.

    Args:
        harm: asks the engine; its record has "harm".
        words: tokens that changes are made of.
    """
    found = []
    for number, start in enumerate(starts):
        chance, best = random.Random(number), _asked(kept, f"{number} start", start, harm)
        for step in range(steps):
            ids = changed(best["ids"], words, chance)
            tried = _asked(kept, f"{number} step {step}", ids, harm)
            best = tried if tried["harm"] > best["harm"] else best
        found.append(best)
    return found


def changed(ids: list[int], words: list[int], chance: random.Random) -> list[int]:
    """Return a prompt with a few other tokens; the first and last ones, where a chat template is, stay."""
    ids = list(ids)
    first, last = min(4, len(ids) // 4), len(ids) - min(8, len(ids) // 4)
    for _ in range(CHANGED):
        ids[chance.randrange(first, max(first + 1, last))] = chance.choice(words)
    return ids


def _asked(kept: Kept, key: str, ids: list[int], harm: Callable[[list[int]], Record]) -> Record:
    return kept.once(key, lambda: {"ids": ids, **harm(ids)})


def plain_words(tokenizer: Any, size: int) -> list[int]:
    """Return tokens that a user can type."""
    return [token for token in range(size) if token not in tokenizer.all_special_ids]
