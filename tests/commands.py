"""The `tide` command, run in four ways:

tide       inside the test's own process
script     the console script, started afresh: for what needs no model
Terminal   the console script, started afresh in a terminal of its own: for keys
Warm       the console script in a process that has torch and transformers already: importing them takes longer than
           a tiny model to answer
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from TIDE.cli.app import app

SCRIPT = Path(sys.executable).with_name("tide")
COMMANDS = ("demo", "calibrate", "generate", "chat", "serve", "tune", "certify")
COMMANDS += ("analyze", "bench", "eval", "inspect", "export", "report")
Done = subprocess.CompletedProcess[str]


def tide(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="tide")


def script(*arguments: object, stdin: str = "", **environment: str) -> Done:
    command = [str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=480, env={**os.environ, **environment})


class Terminal:
    """The console script in a terminal, and what it shows there."""

    def __init__(self, *arguments: object) -> None:
        command = [str(SCRIPT), *map(str, arguments)]
        self.process, self.keys = pty.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background ignores it, and so would what starts there
            settings = termios.tcgetattr(0)
            settings[3] |= termios.NOFLSH  # or Ctrl-C throws away what is not read yet, even what is said to it
            termios.tcsetattr(0, termios.TCSANOW, settings)
            os.execve(command[0], command, {**os.environ, "TERM": "dumb"})
        self.seen = ""

    def wait_for(self, pattern: str, again: str = "", seconds: float = 480) -> str:
        """Read on until a pattern is shown, and return what was shown up to its end; where nothing happens for a second, press
        keys again."""
        until = time.monotonic() + seconds
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            assert time.monotonic() < until, f"expected {pattern!r}, found {self.seen!r}"
            if select.select([self.keys], [], [], 1)[0]:
                self.seen += os.read(self.keys, 4096).decode("utf-8", "replace")
            else:
                self.press(again)
        shown, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return shown

    def press(self, keys: str) -> None:
        if keys == "\x03":
            time.sleep(0.3)  # Python sees a Ctrl-C between prompt and input only after the next line
        os.write(self.keys, keys.encode())

    def exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


class Warm:
    """Scripts in processes of their own, forked from one that has done the imports (`warm.py`)."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("warm.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.imports = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def run(self, path: Path, *arguments: object, stdin: str = "") -> Done:
        assert self.process.stdin is not None
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder) / name for name in ("in", "out", "err")]
            streams[0].write_text(stdin)
            argv = [str(path), *map(str, arguments)]
            self.process.stdin.write(json.dumps(dict(argv=argv, cwd=os.getcwd(), streams=list(map(str, streams)))) + "\n")
            self.process.stdin.flush()
            return subprocess.CompletedProcess(argv, self._answer(), streams[1].read_text(), streams[2].read_text())

    def tide(self, *arguments: object, stdin: str = "") -> Done:
        return self.run(SCRIPT, *arguments, stdin=stdin)

    def close(self) -> None:
        self.process.communicate()  # the end of its input ends it


def fits(found: object, shape: object) -> bool:
    """Whether JSON is of a shape: a type, several, [what each item is], or {key: what it is} with just these keys."""
    if isinstance(shape, list):
        return isinstance(found, list) and bool(found) and all(fits(item, shape[0]) for item in found)
    if isinstance(shape, dict):
        return isinstance(found, dict) and found.keys() == shape.keys() and all(fits(found[key], shape[key]) for key in shape)
    return isinstance(found, shape) and (shape is bool or not isinstance(found, bool))  # type: ignore[arg-type]
