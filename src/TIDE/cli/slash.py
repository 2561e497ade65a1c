"""Slash commands of a chat, in one table: /help, the errors and the dispatch follow it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from TIDE.cli.talk import Talk


class Command(NamedTuple):
    """A command: its name and argument, what it does in words, and what does it and returns the text to print."""

    usage: str
    words: str
    obey: Callable[[Talk, str], str]

    @property
    def name(self) -> str:
        return self.usage.partition(" ")[0]

    @property
    def argument(self) -> str:
        return self.usage.partition(" ")[2]


def _set_system(talk: Talk, text: str) -> str:
    talk.system = text or None
    return "system prompt set." if text else "no system prompt."


def _set(talk: Talk, argument: str) -> str:
    if not argument:
        return talk.sampling.summary()
    name, _, value = argument.partition(" ")
    name, value = name.removeprefix("--").replace("-", "_"), value.strip()
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":  # quotation marks keep spaces at its ends
        value = value[1:-1]
    talk.sampling = talk.sampling.with_value(name, value)
    return talk.sampling.shown(name)


def _load(talk: Talk, name: str) -> str:
    path = talk.load(name)
    turns = len(talk.turns) // 2
    return f"loaded: {path}, {turns} turn{'s' * (turns != 1)}"


def _leave(talk: Talk, _: str) -> str:
    talk.is_over = True
    return ""


def _reset(talk: Talk, _: str) -> str:
    talk.reset()
    return "conversation cleared."


def _regenerate(talk: Talk, _: str) -> str:
    talk.regenerate()
    return ""


def _stats(talk: Talk, _: str) -> str:
    if not talk.stats:
        raise ValueError("there is no answer yet. Say something first.")
    return talk.stats


COMMANDS = (
    Command("/help", "show these commands", lambda *_: HELP),
    Command("/set [NAME VALUE]", "change a setting of the answers, such as temperature; alone: show them", _set),
    Command("/system [TEXT]", "set the system prompt; alone: remove it", _set_system),
    Command("/regenerate", "answer the last question again, with another seed if there is one", _regenerate),
    Command("/undo", "take back the last question and its answer", lambda talk, _: f"taken back: {talk.undo()}"),
    Command("/reset", "clear the conversation", _reset),
    Command("/save [FILE]", "write the conversation to a JSON file", lambda talk, name: f"written: {talk.save(name)}"),
    Command("/load FILE", "go on with a conversation that /save wrote", _load),
    Command("/stats", "show where the tokens of the last answer were decided", _stats),
    Command("/exit", "leave (also /quit, Ctrl-D, or Ctrl-C twice)", _leave),
)
HELP: str = "\n".join(
    [
        *(f"{command.usage:19}{command.words}" for command in COMMANDS),
        'A message of several lines stands between """ and """.',
        "Ctrl-C stops the current answer.",
    ]
)


def obeyed(line: str, talk: Talk) -> str:
    """Run a slash command and return the text to print."""
    name, _, argument = line.partition(" ")
    name, argument = "/exit" if name == "/quit" else name, argument.strip()
    command = next((one for one in COMMANDS if one.name == name), None)
    if command is None or (argument and not command.argument):
        listed = ", ".join(one.usage for one in COMMANDS)
        raise ValueError(f"there is no command {line}. There are {listed}. Put a space before it to say it to the model.")
    if not argument and command.argument and not command.argument.startswith("["):
        raise ValueError(f"expected {command.usage}, found {line}.")
    return command.obey(talk, argument)
