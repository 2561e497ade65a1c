"""Tokens to text, one at a time: characters made of several tokens, and stop strings.

written     H e l l o S T        what tokens have added so far
released    H e l l o            what the client may see: "ST" may yet become the stop string "STOP"
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

CONTEXT = 6  # tokens of the prompt that the first tokens are decoded with
BROKEN = "\ufffd"  # stands for bytes that are no character yet


class Detokenizer:
    """Turns tokens into text. A token's text may depend on those before it, so a few are decoded with it.

    Args:
        prompt: the tokens before the first one.
        keeps_special: special tokens are text too.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], keeps_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.keeps_special = keeps_special
        self._ids = list(prompt[-CONTEXT:])
        self._known = len(self._ids)  # tokens whose text is out
        self._start = 0  # the first token that is decoded with them

    def add(self, token: int) -> str:
        """Return the text that a token adds; none while it is part of a character."""
        self._ids.append(token)
        before, whole = self._decode(self._ids[self._start : self._known]), self._decode(self._ids[self._start :])
        if whole.endswith(BROKEN) or len(whole) <= len(before):
            return ""
        self._start, self._known = self._known, len(self._ids)
        return whole[len(before) :]

    def rest(self) -> str:
        """Return what is left at the end: bytes that became no character."""
        before, whole = self._decode(self._ids[self._start : self._known]), self._decode(self._ids[self._start :])
        self._known = len(self._ids)
        return whole[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return _text(self.tokenizer, tuple(ids), self.keeps_special)


@functools.lru_cache(maxsize=1 << 16)
def _text(tokenizer: Any, ids: tuple[int, ...], keeps_special: bool) -> str:
    """Return the text of a few tokens. Most of them come again, and a tokenizer takes longer than all else for a token."""
    found: str = tokenizer.decode(list(ids), skip_special_tokens=not keeps_special)
    return found


class StopStrings:
    """Releases text up to the first stop string, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = list(stops)
        self.found = False
        self._held = ""

    def add(self, text: str) -> str:
        """Return the text that may be shown now. After a stop string was found there is none."""
        if not self.stops or self.found:
            return "" if self.found else text
        self._held += text
        places = [place for stop in self.stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = max(self._begun(stop) for stop in self.stops)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def rest(self) -> str:
        """Return what was held back and became no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _begun(self, stop: str) -> int:
        """Return how many characters at the end of what is held begin a stop string."""
        longest = min(len(stop) - 1, len(self._held))
        return next((size for size in range(longest, 0, -1) if self._held.endswith(stop[:size])), 0)
