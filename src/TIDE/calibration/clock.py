"""The minutes of a calibration and what they are spent on: texts first, then training.

    0.4 of the time                 texts and their states, as many as fit; if even a few take long, 0.2 more than these
    0.6 of what is left then        training of a head, and so on for every head that is tried while there is time for it

The least is done whatever it takes: 20 texts, and one head. Numbers of texts and steps follow from speeds measured on this
machine. They are stored in the cache folder, so that calibrating twice gives the same file. Minutes that cannot be kept are
said as soon as the speeds are known, before anything is written.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable
from typing import Any

from TIDE.calibration import timing
from TIDE.calibration.collect import Budget

logger = logging.getLogger(__name__)
TEXTS_SHARE = 0.4
MORE_SHARE, MOST_SHARE = 0.2, 0.7  # few texts take nearly as long to write as many: what more of them may take, and all
HEAD_SHARE = 0.6  # of what is left
ENOUGH = 2000  # texts; exits that learn from fewer agree clearly less
FEW_ON_CPU = 30  # minutes
FEWEST, MOST = 20, 1_000_000  # texts
MOST_EPOCHS = 6  # seeing texts again and again stops helping
DISK_SHARE = 0.5  # of the free space, for states that do not fit into memory


class Clock:
    """Decides how many texts a calibration learns from and for how many steps.

    Args:
        minutes: the time there is.
        key: what decisions are stored under: model, machine and settings.
        is_quick: short texts and small batches were chosen.
    """

    def __init__(self, minutes: float, key: str, is_quick: bool = False) -> None:
        self.minutes, self.seconds = minutes, 60 * minutes
        self.is_quick = is_quick
        self.key = f"{key}|{minutes:g} minutes"
        self.ends = time.monotonic() + self.seconds

    @property
    def left(self) -> float:
        """Seconds."""
        return max(0.0, self.ends - time.monotonic())

    def tell_few(self, device: str) -> None:
        """Say at once that the minutes are few for a CPU: to measure how few takes a part of them."""
        if device == "cpu" and self.minutes < FEW_ON_CPU and not self.is_quick:
            logger.warning(
                "on a CPU exits hardly get enough texts to learn from in less than %d min, found %g min. Give more minutes, "
                "calibrate on a GPU, or only try the calls with `quick`.",
                *(FEW_ON_CPU, self.minutes),
            )

    def texts(self, measure: Callable[[], Callable[[int], float]], measure_head: Callable[[], float], room: int) -> int:
        """Return a number of texts.

        Args:
            measure: returns the time that a number of texts and their states take.
            measure_head: returns the time that the least training of a head takes.
            room: texts whose states can be kept.
        """
        most = max(FEWEST, min(room, MOST))
        kept = self._decided("texts", lambda: self._most_texts(measure(), measure_head(), most))
        self._tell(kept)
        return int(kept["count"])

    def steps(self, depth: int, seconds: Callable[[], float], most: int) -> int:
        """Return the number of training steps for a head that there is time for.

        Args:
            seconds: measures the time of a step.
        """

        def fitting() -> dict[str, Any]:
            each = seconds()  # takes time itself, which is not left then
            return {"count": min(int(HEAD_SHARE * self.left / each), most)}

        kept = self._decided(f"steps at depth {depth}", fitting)
        logger.info("depth %d: time for %d steps, %.0f s are left", depth, kept["count"], self.left)
        return int(kept["count"])

    def is_over(self, depth: int) -> bool:
        """Return True if nothing is left for the exit at a depth."""
        return not self._decided(f"time for depth {depth}", lambda: {"count": math.ceil(self.left)})["count"]

    def _most_texts(self, seconds: Callable[[int], float], head: float, most: int) -> dict[str, Any]:
        """Return the number of texts, their seconds, the seconds of the least calibration, and the minutes that enough texts
        need if these are too few."""
        least = self.seconds - self.left + seconds(FEWEST) + head / HEAD_SHARE
        more = min(seconds(FEWEST) + MORE_SHARE * self.seconds, MOST_SHARE * self.seconds)
        within = max(TEXTS_SHARE * self.seconds, more)
        low, high = FEWEST, most
        while low < high:  # the largest number that fits
            middle = (low + high + 1) // 2
            low, high = (middle, high) if seconds(middle) <= within else (low, middle - 1)
        needed = None
        if low < min(ENOUGH, most):
            enough, few = seconds(ENOUGH), seconds(FEWEST)
            needed = min(enough / TEXTS_SHARE, max((enough - few) / MORE_SHARE, enough / MOST_SHARE)) / 60
        return {"count": low, "seconds": seconds(low), "least_seconds": least, "minutes_needed": needed}

    def _tell(self, kept: dict[str, Any]) -> None:
        """Say what was decided, now or before; older versions kept the number alone."""
        least = kept.get("least_seconds", kept.get("seconds", 0))
        if least > self.seconds:
            others = "or calibrate on a GPU" if self.is_quick else "calibrate on a GPU, or only try the calls with `quick`"
            logger.warning(
                "calibration needs about %g min on this machine: %d texts and one head are the least; asked were %g min. Give "
                "more minutes, %s.",
                *(math.ceil(least / 6) / 10, FEWEST, self.minutes, others),
            )
            return
        if "seconds" in kept:
            logger.info("%d texts: about %.0f s of %.0f", kept["count"], kept["seconds"], self.seconds)
        if kept.get("minutes_needed") is not None:
            logger.warning(
                "in %g min there is time for %d texts on this machine. Exits learn little from fewer than %d, which take about "
                "%.0f min. Give more minutes, or calibrate on a GPU.",
                *(self.minutes, kept["count"], ENOUGH, max(1, kept["minutes_needed"])),
            )

    def _decided(self, what: str, decide: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        kept = timing.kept(f"{self.key}|{what}")
        if kept is None:
            kept = decide()
            timing.keep(f"{self.key}|{what}", kept)
        return kept


def room(budget: Budget, bytes_per_text: int) -> int:
    """Return the number of texts whose states fit into memory and files."""
    return int(budget.left + DISK_SHARE * shutil.disk_usage(budget.folder).free) // bytes_per_text
