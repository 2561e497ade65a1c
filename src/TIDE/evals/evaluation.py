"""Evaluation: tasks of the harness, asked of all contenders, and what came of it.

For every task the harness asks once per contender. The first time questions are put to all contenders, interleaved; then the
answers are there, and the harness only scores them: its own prompts, filters and metrics, for all alike.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from TIDE.evals.answers import Answer
from TIDE.evals.harness import without_bars
from TIDE.evals.model import Compared
from TIDE.evals.outcomes import Outcome, Quality, Scored, outcome, plain
from TIDE.evals.tasks import Chosen

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskResult:
    """The outcomes of a task; none where something went wrong, which `error` tells."""

    task: str
    outcomes: list[Outcome] = field(default_factory=list)
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"task": self.task, "error": self.error, "outcomes": [plain(one) for one in self.outcomes]}

    def table(self) -> str:
        """Return the outcomes as a table for the terminal."""
        if self.error is not None:
            return f"{self.task}: not measured. {self.error}"
        first = self.outcomes[0]
        head = f"{self.task}: {first.questions} questions, {first.quality[0].metric}"
        cells = [["mode", "score", "minus off (95 %)", "same", "tok/s", "x off (95 %)", "exits", "seconds"]]
        cells += [_line(one) for one in self.outcomes]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        return "\n".join([head, *lines, *(_losses(one) for one in self.outcomes if one.loss is not None)])


def evaluate(model: Compared, tasks: dict[str, Chosen], limit: int | None = None) -> list[TaskResult]:
    """Ask tasks, one after the other. One that fails is told, and the others go on.

    Args:
        limit: questions of each task, at most.
    """
    found = []
    for name, chosen in tasks.items():
        if chosen.error is not None:
            found.append(TaskResult(name, error=chosen.error))
            continue
        try:
            found.append(TaskResult(name, _outcomes(model, name, chosen, limit)))
        except Exception as problem:  # of any library or task; what was measured before is kept
            said = " ".join(f"{type(problem).__name__}: {problem}".split())
            logger.debug("task %s failed", name, exc_info=True)
            found.append(TaskResult(name, error=said))
    return found


def _outcomes(model: Compared, name: str, chosen: Chosen, limit: int | None) -> list[Outcome]:
    from lm_eval.evaluator import evaluate as scored_by_harness

    chat = chosen.chat and model.tokenizer.chat_template is not None
    scores: list[list[Scored]] = []
    answers: list[list[Answer]] = []
    for contender in model.compared:
        with model.showing(contender), without_bars():
            found = scored_by_harness(
                model, {name: chosen.task}, limit=limit, bootstrap_iters=0, apply_chat_template=chat, log_samples=True
            )
        assert found is not None
        scores.append(_scored(chosen.task, found["samples"][name]))
        answers.append([model.answers.get(contender.name, question) for question in model.asked])
    return [
        outcome(contender, own, scored, answers[0], scores[0])
        for contender, own, scored in zip(model.compared, answers, scores, strict=True)
    ]


def _scored(task: Any, samples: Sequence[dict[str, Any]]) -> list[Scored]:
    """Return the scores of a task's questions, by metric and filter."""
    values: dict[tuple[str, str], list[Any]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            values.setdefault((metric, sample["filter"]), []).append(sample[metric])
    aggregations, higher = task.aggregation(), task.higher_is_better()
    return [
        Scored(
            metric if kind == "none" else f"{metric} ({kind})",
            own,
            aggregations.get(metric, fmean),
            bool(higher.get(metric, True)),
        )
        for (metric, kind), own in values.items()
    ]


def _line(one: Outcome) -> list[str]:
    best = one.quality[0]
    is_off = one.mode == "off"
    return [
        one.contender,
        _shown(best, best.score),
        "-"
        if is_off
        else f"{_shown(best, best.difference, '+')} ({_shown(best, best.interval.low, '+')} to "
        f"{_shown(best, best.interval.high, '+')})",
        "-" if is_off else f"{one.same} of {one.questions}",
        f"{one.tokens_per_second:.1f}",
        "-" if is_off else f"{one.speedup:.2f} ({one.speedup_interval.low:.2f} to {one.speedup_interval.high:.2f})",
        "-" if is_off else f"{one.exit_rate:.1%}",
        f"{one.seconds:.1f}",
    ]


def _shown(quality: Quality, value: float, sign: str = "") -> str:
    if math.isnan(value):
        return "nan"
    return f"{value:{sign}.1%}" if quality.is_share else f"{value:{sign}.4g}"


def _losses(one: Outcome) -> str:
    assert one.loss is not None
    low, high = one.loss.interval
    tokens = "" if one.loss.new_tokens is None else f" of up to {one.loss.new_tokens} tokens"
    said = f"{one.contender}: mean {one.loss.name} loss{tokens} {one.loss.mean:.4f} ({low:.4f} to {high:.4f})"
    if one.certificate is None:
        return f"{said}; no certificate, so nothing is promised"
    held = one.certificate
    bound = "no token leaves" if held["threshold"] is None else f"at most {held['risk']:g}"
    return (
        f"{said}; certificate: {bound}, with confidence {held['confidence']:g}, found on {held['prompts']} prompts with up to "
        f"{held['new_tokens']} new tokens"
    )
