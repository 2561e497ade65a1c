"""Answers, kept question by question in a file, so that an interrupted evaluation goes on where it stopped.

    {"settings": {...}}                                                                   what answers depend on
    {"question": "9f2c…", "contender": "off", "replies": [...], "seconds": 1.2, ...}      a line per question and contender

The answers of all contenders to a question are written together, once all have answered: their times are then of the same
minute. A line that an interruption cut off is dropped. A question is known by a hash of all that is asked, so other data or
other options are other questions.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Answer:
    """A contender's reply to a question, and what it took.

    Attributes:
        replies: one per request of the harness: a text, [log-likelihood, is greedy] or a log-likelihood.
        ids: generated token ids of each text.
        tokens: tokens generated; where nothing is generated, tokens read.
        exited: tokens of these decided at an exit.
        seconds: wall clock; in a batch, an equal share of its time.
    """

    question: str
    contender: str
    replies: list[Any]
    ids: list[list[int]]
    tokens: int
    exited: int
    seconds: float


def question_of(kind: str, requests: Sequence[Sequence[Any]]) -> str:
    """Return the hash of a question: the kind of its requests and their arguments."""
    return hashlib.sha256(json.dumps([kind, requests], sort_keys=True, default=str).encode()).hexdigest()[:24]


def difference(held: dict[str, Any], settings: dict[str, Any]) -> str:
    """Return in words where settings are others than those that were held; empty: nowhere."""
    different = sorted(key for key in {*held, *settings} if held.get(key) != settings.get(key))
    return ", ".join(f"{key} {settings.get(key)!r} instead of {held.get(key)!r}" for key in different)


class Answers:
    """All answers so far.

    Args:
        path: where they are kept; None: in memory only.
        settings: what answers depend on besides the question; a file begun with other ones is refused.
    """

    def __init__(self, path: Path | None = None, settings: dict[str, Any] | None = None) -> None:
        self.path = path
        self._held: dict[tuple[str, str], Answer] = {}
        if path is not None:
            self._open(path, json.loads(json.dumps(settings or {})))

    def __len__(self) -> int:
        return len(self._held)

    def get(self, contender: str, question: str) -> Answer:
        return self._held[contender, question]

    def has(self, contenders: Iterable[str], question: str) -> bool:
        """Return True if all of them have answered a question."""
        return all((contender, question) in self._held for contender in contenders)

    def keep(self, answers: Sequence[Answer]) -> None:
        """Keep answers, on disk before this returns."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(f"{json.dumps(asdict(answer))}\n" for answer in answers))
                file.flush()
                os.fsync(file.fileno())
        self._held |= {(answer.contender, answer.question): answer for answer in answers}

    def _open(self, path: Path, settings: dict[str, Any]) -> None:
        text = path.read_text("utf-8") if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if not whole:
            path.write_text(json.dumps({"settings": settings}) + "\n", "utf-8")
            return
        first, *rest = whole.splitlines()
        self._check(path, _parsed(path, 1, first).get("settings"), settings)
        for number, line in enumerate(rest, 2):
            try:
                answer = Answer(**_parsed(path, number, line))
            except TypeError:
                raise ValueError(f"{path}, line {number} is not an answer of this version. Move the file away.") from None
            self._held[answer.contender, answer.question] = answer
        if whole != text:
            os.truncate(path, len(whole.encode()))

    @staticmethod
    def _check(path: Path, found: Any, settings: dict[str, Any]) -> None:
        if not isinstance(found, dict):
            raise ValueError(f"{path} does not begin as a file of answers. Move it away, or choose another --output.")
        if said := difference(found, settings):
            raise ValueError(
                f"{path} has answers that were given with other settings: found {said}. Use the same ones to go on, or choose "
                f"another --output."
            )


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path}, line {number} is not JSON. Take the line out to lose that answer only.")
    return found
