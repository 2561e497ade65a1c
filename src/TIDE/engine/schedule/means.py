"""Means that forget: what a machine and a text are like just now."""

from __future__ import annotations

NEWEST = 0.2  # weight of the newest measurement


class RunningMean:
    """A mean that forgets."""

    def __init__(self, mean: float | None = None) -> None:
        self.mean = mean

    def add(self, value: float) -> None:
        self.mean = value if self.mean is None else self.mean + NEWEST * (value - self.mean)


class ClippedMean(RunningMean):
    """The machine may look away, but it never runs ahead: long times count for twice the mean at most, short ones at once."""

    def add(self, value: float) -> None:
        if self.mean is None or value < self.mean / 2:
            self.mean = value
        else:
            super().add(min(value, 2 * self.mean))
