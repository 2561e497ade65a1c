"""Generated code, run where it can do no harm: a process of its own (`confined.py`) with limits that the kernel holds.

    time        wall clock and CPU; the process is killed
    memory      address space
    processes   none besides it, no threads either
    files       none is written, anywhere
    network     no sockets

Files can be read, but nothing leads out: a verdict of a few bytes is all that comes back. Other processes cannot be looked into
where the kernel has Landlock. Where a kernel cannot hold the other limits nothing is run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

CONFINED = Path(__file__).with_name("confined.py")
MOST_BYTES = 4096  # of a verdict
GRACE = 0.2  # seconds


class Limits(NamedTuple):
    """Limits on a program."""

    seconds: float = 20.0
    bytes: int = 1 << 29


USUAL = Limits()


class Verdict(NamedTuple):
    """How a program ended: it passed if it ran to its end; otherwise what kept it from that, in words."""

    passed: bool
    said: str = ""


def check_sandbox() -> None:
    """Raise where code cannot be confined."""
    if not run_code("pass").passed:
        raise RuntimeError(f"the sandbox does not run even an empty program here ({run_code('pass').said}).")


@functools.lru_cache(maxsize=4096)  # modes often answer alike
def run_code(code: str, limits: Limits = USUAL) -> Verdict:
    """Run a program in the sandbox, without its output."""
    token = secrets.token_hex(16)
    asked = json.dumps({"token": token, "code": code, "seconds": limits.seconds, "bytes": limits.bytes})
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CONFINED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            said = _exchange(process, asked.encode(), time.monotonic() + limits.seconds)
        finally:
            _end(process)
    if said is None:
        return Verdict(False, f"still running after {limits.seconds:g} s")
    return _verdict(said, token, process.returncode)


def _exchange(process: subprocess.Popen[bytes], asked: bytes, until: float) -> bytes | None:
    """Write a program to its process and return what comes back; None: it was still running."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # where it ended first, its exit status tells
        process.stdin.write(asked)
    said = b""
    while len(said) <= MOST_BYTES:
        left = until - time.monotonic()
        if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
            return None
        more = os.read(process.stdout.fileno(), MOST_BYTES)
        if not more:
            break
        said += more
    return said


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a process is over; one that has said all it had to say may end by itself."""
    assert process.stdout is not None
    with process.stdout, contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE)
    process.kill()
    process.wait()


def _verdict(said: bytes, token: str, code: int) -> Verdict:
    """Read a first line, written before the program ran, and a second one, to which a program can write anything."""
    confinement, _, outcome = said.partition(b"\n")
    if unconfined := _object(confinement).get("unconfined"):
        raise RuntimeError(f"generated code cannot be confined here: {unconfined}. Leave out --execute-code.")
    found = _object(outcome)
    if found.get("token") == token:
        return Verdict(True)
    told = str(found.get("error", f"ended without a verdict (exit status {code})"))
    return Verdict(False, told.encode(errors="backslashreplace").decode())


def _object(said: bytes) -> dict[str, Any]:
    try:
        found = json.loads(said)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
