"""How often drafts are accepted, by their number in the round, and rests for texts in which they are not."""

from __future__ import annotations

FIRST_REST, LONGEST_REST = 16, 256  # a rest; each one in a text is twice as long as the one before
KEPT = 0.98  # weight of earlier drafts when a new one is recorded
PRIOR = 4.0  # drafts that count as seen before any was


class Acceptance:
    """Drafts accepted against drafts expected to be, by number."""

    def __init__(self) -> None:
        self._seen: dict[int, list[float]] = {}  # number -> accepted, expected

    def add(self, number: int, accepted: bool, expected: float = 1.0, rows: int = 1) -> None:
        """Record draft `number` of a round of `rows` rows, which was accepted with the probability `expected`."""
        seen, kept = self._at(number), KEPT ** (1 / rows)
        seen[0] = kept * seen[0] + accepted
        seen[1] = kept * seen[1] + expected

    def share(self, number: int) -> float:
        """Return accepted drafts by expected ones."""
        accepted, expected = self._at(number)
        return accepted / expected

    def fade(self) -> None:
        """Let what was seen so far count for no more than the prior: another text begins."""
        for seen in self._seen.values():
            seen[:] = [count * min(1.0, PRIOR / seen[1]) for count in seen]

    def clear(self) -> None:
        self._seen.clear()

    def _at(self, number: int) -> list[float]:
        return self._seen.setdefault(number, [PRIOR, PRIOR])


class Rest:
    """The length of the next rest of a text."""

    def __init__(self, length: int = FIRST_REST) -> None:
        self.length = length

    def take(self) -> int:
        """Return the length of this rest; the next one is twice as long."""
        length = self.length
        self.length = min(2 * length, LONGEST_REST)
        return length

    def reset(self) -> None:
        self.length = FIRST_REST
