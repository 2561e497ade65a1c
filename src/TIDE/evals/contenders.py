"""Contenders: the settings of one engine that are compared with each other, exits off first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from TIDE.config import TIDEConfig
from TIDE.engine.engine import TIDE
from TIDE.routing.certificate import Certificate

OFF, EXACT, FAST = "off", "exact", "fast"
MODES = (OFF, EXACT, FAST)


class Contender(NamedTuple):
    """A setting of an engine: see `TIDE.using`."""

    name: str  # a mode; for mode fast with a threshold of its own, both
    mode: str
    config: TIDEConfig
    certificate: Certificate | None = None  # that gives its threshold

    @property
    def exits(self) -> bool:
        return self.mode != OFF


def contenders(engine: TIDE, modes: Sequence[str] = MODES, thresholds: Sequence[float] = ()) -> list[Contender]:
    """Return exits off, which the others are compared with, and the modes asked for.

    Args:
        thresholds: exit thresholds of mode fast, a contender each; none: the threshold of the certificate or of the file.
    """
    if unknown := sorted({*modes} - {*MODES}):
        raise ValueError(f"expected modes {', '.join(MODES)}, found {', '.join(unknown)}.")
    if engine.policy is None and {*modes} - {OFF}:
        raise ValueError("modes exact and fast need exits. Make the engine with a router file, or compare nothing but off.")
    config = replace(engine.config, exit_threshold=None)
    exact = config.in_mode_exact()
    found = [Contender(OFF, OFF, exact)]
    found += [Contender(EXACT, EXACT, exact)] if EXACT in modes else []
    if FAST in modes:
        fast = replace(config, mode=FAST)
        found += [_certified(engine, fast)] if not thresholds else []
        found += [Contender(f"{FAST} {float(one)!r}", FAST, replace(fast, exit_threshold=one)) for one in thresholds]
    return found


def _certified(engine: TIDE, fast: TIDEConfig) -> Contender:
    """Return mode fast as it is without a threshold, with the certificate it goes by, if it goes by one."""
    held = engine.policy.certificate if engine.policy is not None else None
    with engine.using(fast):
        in_use = held is not None and (held.threshold is None or engine.plan.exit_threshold == held.threshold)
    return Contender(FAST, FAST, fast, held if in_use else None)
