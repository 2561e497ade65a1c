"""A chat: its messages so far, the settings of its answers, and the file it is saved to."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import typer

from TIDE.cli.answer import tell_if_cut
from TIDE.cli.files import check_target, decoded
from TIDE.cli.sampling import Sampling
from TIDE.cli.terminal import CtrlC

Messages = list[dict[str, str]]


class Talk(ABC):
    """A chat. A turn without an answer is dropped.

    Args:
        system: the system prompt.
        sampling: settings of the answers.
        depth: answers are coloured by depth.
        as_json: answers are printed as JSON.

    Attributes:
        turns: messages without the system prompt: the user's and the model's, by turns.
        file: where this chat was saved, or loaded from.
        again: how often the last question was answered before.
        is_over: the user has left.
    """

    def __init__(self, system: str | None, sampling: Sampling, depth: bool, as_json: bool) -> None:
        self.system = system
        self.sampling = sampling
        self.depth = depth
        self.as_json = as_json
        self.ctrl_c = CtrlC()
        self.again = 0
        self.is_over = False
        self.reset()

    def reset(self) -> None:
        """Clear the messages, and the file they were saved to."""
        self.turns: Messages = []
        self.file: Path | None = None

    @property
    def messages(self) -> Messages:
        return [*([] if self.system is None else [_message("system", self.system)]), *self.turns]

    @abstractmethod
    def write(self, question: str) -> dict[str, Any]:
        """Print the answer to a question until its end or Ctrl-C, unless as JSON, and return its record."""

    @abstractmethod
    def figures(self, record: dict[str, Any]) -> str | None:
        """Return the figures of an answer in a line; None: they are not shown."""

    @property
    @abstractmethod
    def stats(self) -> str:
        """Facts known of the last answer; empty before the first."""

    def answer(self, question: str) -> None:
        """Print the answer to a question, and keep both."""
        self.ctrl_c.was_pressed = False
        record = self.write(question)
        self.keep(question, record["answer"])
        if self.as_json:
            typer.echo(json.dumps(record))
            return
        if figures := self.figures(record):
            typer.echo(figures, err=True)
        more = f"/set max_new_tokens {2 * record['tokens']} makes room for longer answers."
        tell_if_cut(record["finish_reason"], record["tokens"], self.sampling.max_new_tokens, more)

    def say(self, question: str) -> None:
        """Answer a new question."""
        self.again = 0
        self.answer(question)

    def asked(self, said: str) -> Messages:
        """Return the messages with one more of the user's."""
        return [*self.messages, _message("user", said)]

    def keep(self, said: str, answer: str) -> None:
        """Add a turn, if there is an answer."""
        if answer:
            self.turns = [*self.turns, _message("user", said), _message("assistant", answer)]

    def undo(self) -> str:
        """Drop the last turn and return what was said in it."""
        if not self.turns:
            raise ValueError("there is no answer yet. Say something first.")
        *self.turns, said, _ = self.turns
        return said["content"]

    def regenerate(self) -> None:
        """Answer the last question again. Without a new answer the old one stays."""
        before, said = self.turns, self.undo()
        self.again += 1
        try:
            self.answer(said)
        finally:
            self.turns = self.turns if len(self.turns) == len(before) else before

    def save(self, name: str = "") -> Path:
        """Write the messages as JSON: to a new file, or again to the file of this chat."""
        if not self.turns:
            raise ValueError("there is nothing to save yet. Say something first.")
        path = Path(name).expanduser() if name else self.file or Path(time.strftime("tide-chat-%Y%m%d-%H%M%S.json"))
        check_target(path, (".json",))
        if path.exists() and path != self.file:
            raise FileExistsError(f"there is a {path} already. Give another name.")
        path.write_text(json.dumps(self.messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        self.file = path
        return path

    def load(self, name: str) -> Path:
        """Go on with the messages of a file that `save` wrote."""
        path = Path(name).expanduser()
        if not path.is_file():
            raise ValueError(f"there is no file {path}. Give one that /save wrote.")
        messages = _read(decoded(path.read_bytes(), str(path)))
        system, turns = _split(messages or [])
        if not turns or [turn["role"] for turn in turns] != ["user", "assistant"] * (len(turns) // 2):
            raise ValueError(
                f"{path} is no chat: expected messages of user and assistant by turns. Give a file that /save wrote."
            )
        self.system, self.turns, self.file = system, turns, path
        return path


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _read(text: str) -> Messages | None:
    """Return messages from JSON; None if it holds something else."""
    try:
        found = json.loads(text)
        return [_message(str(one["role"]), str(one["content"])) for one in found]
    except (ValueError, TypeError, LookupError):
        return None


def _split(messages: Messages) -> tuple[str | None, Messages]:
    """Return the system prompt, if there is one, and the other messages."""
    has_system = bool(messages) and messages[0]["role"] == "system"
    return (messages[0]["content"], messages[1:]) if has_system else (None, messages)
