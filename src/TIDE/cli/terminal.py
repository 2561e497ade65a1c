"""The terminal of a chat: what is typed, Ctrl-C, and keys that are not shown while an answer is written.

> one line                      a message
> /name                         a command
> \"\"\"several                    a message too: all lines up to the next three quotes
... lines\"\"\"
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import typer

from TIDE.cli.files import decoded

QUOTES = '"""'
LEAVE = "To leave: /exit or Ctrl-D, or Ctrl-C again."


class Typed(NamedTuple):
    """A message or a command."""

    text: str
    is_command: bool


class CtrlC:
    """Ctrl-C during a chat. It is raised where a line is typed or a server waited for; else it is recorded, so that a step of
    the engine is completed and its K/V stay usable, and one that comes just after an answer has no effect.

    Attributes:
        was_pressed: since it was last set to False.
    """

    def __init__(self) -> None:
        self.was_pressed = False
        self._is_raised = False

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _press(self, *_: object) -> None:
        self.was_pressed = True
        if self._is_raised:
            raise KeyboardInterrupt

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt inside."""
        self._is_raised = True
        try:
            yield
        finally:
            self._is_raised = False


def typed(asks: bool, ctrl_c: CtrlC) -> Iterator[Typed]:
    """Yield what is typed until the end of input. The second Ctrl-C in a row at an empty prompt is raised.

    Args:
        asks: there is somebody to ask; False: input is read as it is.
    """
    was_empty = False  # at a Ctrl-C just before
    while True:
        try:
            with ctrl_c.raised():
                read = _read(asks)
        except KeyboardInterrupt:
            is_empty = not _typed_so_far()
            if not asks or (is_empty and was_empty):
                raise
            was_empty = is_empty
            typer.echo(f"\n{LEAVE}" if is_empty else "")
            continue
        if read is None:
            return
        was_empty = False
        yield read


def _read(asks: bool) -> Typed | None:
    """Return the next message or command; None at the end of input."""
    line = _line("> ", asks)
    if line is None or not line.startswith(QUOTES):
        return line if line is None else Typed(line.strip(), line.startswith("/"))
    text = line.removeprefix(QUOTES)
    while not text.rstrip().endswith(QUOTES) and (more := _line("... ", asks)) is not None:
        text += f"\n{more}"
    return Typed(text.rstrip().removesuffix(QUOTES).strip(), False)


def _line(prompt: str, asks: bool) -> str | None:
    if not asks:
        line = sys.stdin.buffer.readline()
        return decoded(line, "standard input").rstrip("\r\n") if line else None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  gives input() line editing and history
    try:
        return input(prompt)
    except EOFError:
        typer.echo()
        return None


def _typed_so_far() -> str:
    """Return the line that was being typed, where that is known."""
    readline = sys.modules.get("readline")
    return readline.get_line_buffer() if readline is not None else ""


@contextmanager
def without_echo() -> Iterator[None]:
    """Keep keys that are pressed meanwhile off the screen; they are read at the next prompt. Does nothing on Windows or where
    input is no terminal."""
    try:
        import termios
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
