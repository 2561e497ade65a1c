"""Outcomes: scores and speeds of contenders on a task, each beside those of exits off on the same questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from TIDE.calibration.losses import LOSSES
from TIDE.evals.answers import Answer
from TIDE.evals.contenders import FAST, OFF, Contender
from TIDE.evals.intervals import Interval, bootstrap, difference_interval, discordant_p

CLOSE = 1e-5  # log-likelihoods that differ by less, relatively, are the same answer


@dataclass(frozen=True)
class Scored:
    """Scores of a contender on the questions of a task by one metric, and the function that makes one number of them."""

    metric: str
    values: list[Any]
    whole: Callable[[Sequence[Any]], float]
    higher_is_better: bool = True

    @property
    def is_share(self) -> bool:
        """True if every question is answered right or wrong."""
        return all(value in (0, 1) for value in self.values if not isinstance(value, list | tuple)) and not any(
            isinstance(value, list | tuple) for value in self.values
        )


@dataclass(frozen=True)
class Quality:
    """A score, and its difference from that of exits off.

    Attributes:
        retained: the score as a share of that of exits off; the other way round where lower is better.
        interval: of the difference.
        lost, gained, p: questions that exits off alone, or this contender alone, answers right, and the p-value of "as many
            are lost as gained"; None where answers are not right or wrong.
    """

    metric: str
    higher_is_better: bool
    is_share: bool
    score: float
    difference: float
    interval: Interval
    retained: float | None
    lost: int | None = None
    gained: int | None = None
    p: float | None = None


@dataclass(frozen=True)
class Loss:
    """How far texts are from those of exits off, by the loss of the certificate or by ROUGE-L."""

    name: str
    mean: float
    interval: Interval
    new_tokens: int | None  # compared, at most; None: all


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task for a contender.

    Attributes:
        same: questions with the answer of exits off: the same tokens, or log-likelihoods that are the same up to rounding.
        tokens: generated; where nothing is generated, read.
        speedup: tokens per second over those of exits off. Answers that differ may have other lengths.
    """

    contender: str
    mode: str
    questions: int
    same: int
    quality: list[Quality]
    tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float
    speedup_interval: Interval
    exit_rate: float
    loss: Loss | None
    certificate: dict[str, Any] | None


def outcome(
    contender: Contender, answers: list[Answer], scored: list[Scored], full: list[Answer], full_scored: list[Scored]
) -> Outcome:
    """Compare a contender with exits off: answers and scores of the same questions, in the same order."""
    pairs = list(zip(answers, full, strict=True))
    tokens, seconds = sum(one.tokens for one in answers), sum(one.seconds for one in answers)
    certificate = contender.certificate
    return Outcome(
        contender=contender.name,
        mode=contender.mode,
        questions=len(answers),
        same=sum(is_same(one, other) for one, other in pairs),
        quality=[quality(own, other) for own, other in zip(scored, full_scored, strict=True)],
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds,
        speedup=_speedup(pairs),
        speedup_interval=Interval(1.0, 1.0) if contender.mode == OFF else bootstrap(pairs, _speedup),
        exit_rate=sum(one.exited for one in answers) / max(1, tokens),
        loss=_loss(contender, pairs) if contender.mode == FAST and any(full[0].ids) else None,
        certificate=None if certificate is None else _bound(certificate.as_dict()),
    )


def is_same(one: Answer, other: Answer) -> bool:
    """Return True if two answers are the same."""
    if any(one.ids) or any(other.ids):
        return one.ids == other.ids
    return all(map(_close, one.replies, other.replies))


def quality(scored: Scored, full: Scored) -> Quality:
    """Compare scores with those of exits off."""
    score, against = scored.whole(scored.values), full.whole(full.values)
    pairs = list(zip(scored.values, full.values, strict=True))
    best, other = (score, against) if scored.higher_is_better else (against, score)
    common: dict[str, Any] = dict(
        metric=scored.metric,
        higher_is_better=scored.higher_is_better,
        score=score,
        difference=score - against,
        retained=best / other if other else None,
    )
    if scored.is_share and full.is_share:
        lost, gained = sum(own < off for own, off in pairs), sum(own > off for own, off in pairs)
        interval = difference_interval(lost, gained, len(pairs))
        return Quality(**common, is_share=True, interval=interval, lost=lost, gained=gained, p=discordant_p(lost, gained))

    def difference(drawn: Sequence[tuple[Any, Any]]) -> float:
        return scored.whole([own for own, _ in drawn]) - scored.whole([off for _, off in drawn])

    return Quality(**common, is_share=False, interval=bootstrap(pairs, difference))


def _speedup(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    own, full = (sum(pair[place].tokens for pair in pairs) / sum(pair[place].seconds for pair in pairs) for place in (0, 1))
    return own / full if full else 0.0


def _loss(contender: Contender, pairs: Sequence[tuple[Answer, Answer]]) -> Loss:
    """Measure what the certificate bounds, on as many tokens."""
    held = contender.certificate
    name = held.loss if held is not None and held.loss in LOSSES else "rouge_l"
    most = held.new_tokens if held is not None else None
    losses = [
        LOSSES[name](own[:most], full[:most]) for one, other in pairs for own, full in zip(one.ids, other.ids, strict=True)
    ]
    return Loss(name, fmean(losses), bootstrap(losses, fmean), most)


def _bound(certificate: dict[str, Any]) -> dict[str, Any]:
    kept = ("threshold", "risk", "confidence", "loss", "prompts", "new_tokens")
    return {name: certificate[name] for name in kept}


def _close(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, float):
        return abs(one - other) <= CLOSE * max(1.0, abs(one), abs(other))
    return bool(one == other)


def plain(found: Outcome) -> dict[str, Any]:
    """Return plain values, for JSON."""
    return asdict(found)
