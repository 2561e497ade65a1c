"""A certificate: the lowest score at which tokens may exit unverified, the risk, and the settings it was found for.

`TIDE.certify` makes it, a router file stores it, and mode "fast" uses its threshold if the configuration has none and the
settings are those of the certificate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """The settings that affect the text of mode "fast", besides the threshold and the router file."""

    kv_cache_strategy: str
    min_layers: int
    max_pending: int
    max_exit_share: float
    dtype: str  # of the model
    prefill_exits: bool = False

    def differences(self, other: Settings) -> list[str]:
        """Return in words the fields in which another one differs."""
        pairs = zip(self._fields, self, other, strict=True)
        return [f"{name} {found!r} instead of {own!r}" for name, own, found in pairs if own != found]


@dataclass(frozen=True)
class Tested:
    """A tested threshold: its mean loss, and the p-values of "the mean is above the risk"."""

    threshold: float
    mean_loss: float
    hoeffding_bentkus: float
    betting: float
    passed: bool

    @property
    def p_value(self) -> float:
        """Twice the smaller of the two: a p-value again, by the union bound."""
        return min(1.0, 2 * min(self.hoeffding_bentkus, self.betting))


@dataclass(frozen=True)
class Certificate:
    """A bound: with `confidence`, mode "fast" at `threshold` has a mean loss of at most `risk` on prompts like those tested.

    Attributes:
        threshold: score needed to exit, at all checkpoints; None: only "never exit" passed.
        loss: name of the loss against the full model's text, from 0 to 1.
        prompts, new_tokens: number of prompts tested, and most new tokens for each.
        settings: the settings it is valid for.
        tested: thresholds in the order of the test; the last failed unless all passed.
    """

    threshold: float | None
    risk: float
    confidence: float
    loss: str
    prompts: int
    new_tokens: int
    settings: Settings
    tested: tuple[Tested, ...] = ()

    def summary(self) -> str:
        """Return the bound in words, and a line for every threshold tested, with the p-value that decided and its level."""
        seen = f"{self.prompts} prompts, up to {self.new_tokens} new tokens, {_listed(self.settings._asdict())}"
        level = f"{1 - self.confidence:.3g}"
        head = f"threshold  mean loss  Hoeffding-Bentkus    betting  twice the smaller  at most {level}"
        lines = [self._promise(), f"found on {seen}", "", head]
        for row in self.tested:
            lines.append(
                f"{row.threshold:9.4g}  {row.mean_loss:9.4f}  {row.hoeffding_bentkus:17.3g}  {row.betting:9.3g}  "
                f"{row.p_value:17.3g}  {'passed' if row.passed else 'failed'}"
            )
        return "\n".join([*lines, f"A threshold passes if twice the smaller p-value is at most 1 - confidence: {level}."])

    def _promise(self) -> str:
        if self.threshold is None:
            return (
                f"no threshold keeps the mean {self.loss} loss at or below {self.risk:g} with confidence {self.confidence:g}: "
                f'mode "fast" would never exit. Use mode "exact".'
            )
        return (
            f"exit_threshold {self.threshold:g}: with confidence {self.confidence:g} the mean {self.loss} loss is at most "
            f"{self.risk:g}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self) | {"settings": self.settings._asdict(), "tested": [asdict(row) for row in self.tested]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Certificate:
        """Return the certificate of the values from `as_dict`."""
        tested = tuple(Tested(**row) for row in values["tested"])
        return cls(**{**values, "settings": Settings(**values["settings"]), "tested": tested})

    def wrong(self) -> str | None:
        """Return what makes it unusable; None if nothing does."""
        shares = {"risk": self.risk, "confidence": self.confidence}
        if self.threshold is not None:
            shares["threshold"] = self.threshold
        for name, value in shares.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                return f"expected a certificate with a {name} from 0 to 1, found {value!r}"
        return None


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
