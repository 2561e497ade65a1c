"""Tokens to text, one at a time: characters made of several tokens, and stop strings.

written     H e l l o S T        what tokens have added so far
released    H e l l o            what the client may see: "ST" may yet become the stop string "STOP"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

CONTEXT = 6  # tokens of the prompt that the first tokens are decoded with
BROKEN = "\ufffd"  # stands for bytes that are no character yet
FEW, MOST = 4, 1 << 16  # tokens whose text is remembered, and texts
_KNOWN: WeakKeyDictionary[Any, dict[Any, str]] = WeakKeyDictionary()  # texts of few tokens, by tokenizer


class Detokenizer:
    """Turns tokens into text. A token's text may depend on those before it, so a few are decoded with it.

    Args:
        prompt: the tokens before the first one.
        keeps_special: special tokens are text too.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], keeps_special: bool = False) -> None:
        self.tokenizer = tokenizer
        self.keeps_special = keeps_special
        self._texts = _KNOWN.setdefault(tokenizer, {})
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
        """Return the text of some tokens. Short pieces come again, and a tokenizer takes longer than all else for a token."""
        key = (*ids, self.keeps_special) if len(ids) <= FEW else None
        if key is not None and key in self._texts:
            return self._texts[key]
        found: str = self.tokenizer.decode(ids, skip_special_tokens=not self.keeps_special)
        if key is not None:
            if len(self._texts) == MOST:
                self._texts.clear()
            self._texts[key] = found
        return found


class StopStrings:
    """Releases text up to the first stop string, and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = list(stops)
        self.found = False
        self._held = ""

    def add(self, text: str, may_stop: bool = True) -> str:
        """Return the text that may be shown now. After a stop string was found there is none.

        Args:
            may_stop: False: a stop string that this text completes does not count.
        """
        if not self.stops or self.found:
            return "" if self.found else text
        known = len(self._held)
        self._held += text
        found = [self._held.find(stop, max(0, known - len(stop) + 1)) for stop in self.stops]
        places = [place for place in found if place >= 0]
        if places and may_stop:
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
