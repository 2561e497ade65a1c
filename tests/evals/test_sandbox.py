"""The sandbox: programs that loop, fork, allocate, write, send or leave early are really run, and held."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from TIDE.evals.sandbox import MACHINES, SCRIPT, Verdict, check_sandbox, run_code

on_linux = pytest.mark.skipif(
    not sys.platform.startswith("linux") or platform.machine() not in MACHINES,
    reason="code is confined by seccomp, on Linux on x86_64 and aarch64",
)
pytestmark = [pytest.mark.full, on_linux]
SHORT = 3.0  # seconds
REFUSED = "Operation not permitted"


def confined_processes() -> list[int]:
    """The processes of sandboxes that are running now, of this test's process."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command, status = (entry / "cmdline").read_bytes(), (entry / "stat").read_text()
            except OSError:
                continue
            if str(SCRIPT).encode() in command and int(status.rpartition(")")[2].split()[1]) == os.getpid():
                found.append(int(entry.name))
    return found


def has_landlock() -> bool:
    return ctypes.CDLL(None).syscall(444, None, 0, 1) > 0  # landlock_create_ruleset, which says its version


def test_a_program_that_runs_to_its_end_passes():
    assert run_code("def add(a, b): return a + b\nassert add(1, 2) == 3") == Verdict(True)


def test_programs_may_use_the_standard_library():
    names = "math, re, collections, itertools, functools, typing, hashlib, heapq, random, string, datetime, decimal, json"
    assert run_code(f"import {names}\nassert hashlib.md5(b'x').hexdigest() and math.pi > 3") == Verdict(True)


@pytest.mark.parametrize(
    "code",
    [
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 0\nassert A().x == 0",
        "def f(x: int): pass\nassert f.__annotations__['x'] is int",
        "import sys\nx = 1\nassert sys.modules[__name__].x == 1",
        "from typing import NamedTuple, get_type_hints\nclass A(NamedTuple):\n    x: 'A'\nassert get_type_hints(A) == {'x': A}",
        "from __future__ import annotations\ndef f(x: int): pass\nassert f.__annotations__['x'] == 'int'",
    ],
)
def test_a_program_runs_as_a_module_of_its_own(code):
    assert run_code(code) == Verdict(True)


def test_a_program_that_fails_says_why():
    assert run_code("assert 1 == 2, 'one is not two'") == Verdict(False, "AssertionError: one is not two")
    assert run_code("def broken(:").said.startswith("SyntaxError")


@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "raise SystemExit(0)", "import sys; sys.exit()"])
def test_leaving_early_is_no_success(leave):
    assert not run_code(leave + "\nassert False").passed


def test_a_loop_is_ended():
    assert run_code("while True: pass", SHORT) == Verdict(False, "still running after 3 s")
    assert confined_processes() == []


def test_a_loop_that_ignores_signals_is_ended():
    code = "import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)"
    assert run_code(code, SHORT).said == "still running after 3 s"
    assert confined_processes() == []


@pytest.mark.parametrize(
    "start",
    [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.Popen(['/bin/true'])",
        "os.system('/bin/true') and bad()",
        "os.execv('/bin/true', ['true'])",
        "threading.Thread(target=print).start()",
    ],
)
def test_nothing_is_started(start):
    verdict = run_code(f"import os, subprocess, threading\ndef bad(): raise OSError('{REFUSED}')\n{start}", SHORT)
    assert not verdict.passed
    assert REFUSED in verdict.said or "can't start new thread" in verdict.said


def test_a_fork_bomb_makes_no_process():
    bomb = (
        "import os\nrefused = 0\nfor _ in range(1000):\n    try: os.fork()\n    except OSError: refused += 1\n"
        "assert refused == 1000"
    )
    assert run_code(bomb) == Verdict(True)  # it saw a thousand refusals
    assert confined_processes() == []


def test_a_big_allocation_is_refused():
    assert run_code("held = bytearray(1 << 30)") == Verdict(False, "MemoryError: ")
    assert not run_code("held = []\nwhile True: held.append(bytes(1 << 20))").passed


@pytest.mark.parametrize(
    "write",
    [
        "open({path!r}, 'w').write('x')",
        "open({path!r}, 'ab').write(b'x')",
        "os.open({path!r}, os.O_RDWR | os.O_CREAT)",
        "os.mkdir({path!r})",
        "os.symlink('/etc', {path!r})",
        "os.mkfifo({path!r})",
        "os.rename({kept!r}, {path!r})",
        "os.unlink({kept!r})",
        "os.truncate({kept!r}, 0)",
        "os.chmod({kept!r}, 0)",
        "open('here', 'w')",
    ],
)
def test_no_file_is_written_or_changed(write, tmp_path):
    kept, path = tmp_path / "kept", tmp_path / "new"
    kept.write_text("as it was")
    verdict = run_code("import os\n" + write.format(path=str(path), kept=str(kept)))
    assert not verdict.passed and REFUSED in verdict.said
    assert sorted(tmp_path.iterdir()) == [kept] and kept.read_text() == "as it was" and kept.stat().st_mode & 0o400


def test_no_socket_is_made():
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}))"
        verdict = run_code(code)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not verdict.passed and REFUSED in verdict.said
    assert REFUSED in run_code("import socket\nsocket.socketpair()").said


def test_no_signal_is_sent():
    code = f"import os\nos.kill({os.getpid()}, {int(signal.SIGTERM)})"
    assert REFUSED in run_code(code).said


def test_no_signal_is_sent_by_way_of_a_file(tmp_path):
    received = []
    held = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        code = (
            f"import fcntl, os\nplace = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
            f"fcntl.fcntl(place, fcntl.F_SETSIG, {int(signal.SIGUSR1)})\nfcntl.fcntl(place, fcntl.F_SETOWN, os.getppid())\n"
            "fcntl.fcntl(place, fcntl.F_NOTIFY, fcntl.DN_ACCESS)\nos.listdir(place)"
        )
        assert REFUSED in run_code(code).said
    finally:
        signal.signal(signal.SIGUSR1, held)
    assert received == []


@pytest.mark.parametrize("command", ["F_SETSIG", "F_SETOWN", "F_NOTIFY", "F_SETFL", "F_SETLK", "F_SETLEASE"])
def test_fcntl_commands_that_reach_beyond_a_descriptor_are_refused(command, tmp_path):
    code = f"import fcntl, os\nfcntl.fcntl(os.open({str(tmp_path)!r}, os.O_RDONLY), fcntl.{command}, 0)"
    assert REFUSED in run_code(code).said


def test_descriptors_can_be_copied_and_kept_to_oneself(tmp_path):
    code = (
        f"import fcntl, os\nplace = os.open({str(tmp_path)!r}, os.O_RDONLY)\nos.set_inheritable(place, True)\n"
        "os.set_inheritable(place, False)\nother = fcntl.fcntl(place, fcntl.F_DUPFD_CLOEXEC, 0)\n"
        "assert other != place and not os.get_inheritable(other) and not os.isatty(other)"
    )
    assert run_code(code) == Verdict(True)


def test_a_file_s_attributes_are_not_changed(tmp_path):
    (kept := tmp_path / "kept").write_text("as it was")
    for request in (0x80086601, 0x40086602):  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
        code = f"import fcntl, os\nfcntl.ioctl(os.open({str(kept)!r}, os.O_RDONLY), {request}, bytearray(8))"
        assert REFUSED in run_code(code).said


def test_limits_cannot_be_raised():
    code = "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))"
    assert not run_code(code).passed


def test_code_below_python_is_held_too():
    """System calls without the standard library's checks."""
    code = "import ctypes\nassert ctypes.CDLL(None, use_errno=True).{call} == -1 and ctypes.get_errno() == 1"
    for call in ("socket(2, 1, 0)", "fork()", "creat(b'x', 0o600)", "syscall(425, 1, 0)"):  # 425: io_uring_setup
        assert run_code(code.format(call=call)) == Verdict(True), call


def test_output_of_a_program_is_dropped():
    assert run_code("import os\nprint('x' * 1_000_000)\nos.write(1, b'x' * 100_000)") == Verdict(True)


def test_a_flood_at_the_verdict_is_cut_off():
    write = "try: os.write(place, b'{' * 4096)\n        except OSError: pass"
    flood = f"import os\nwhile True:\n    for place in range(3, 8):\n        {write}"
    assert run_code(flood, SHORT) == Verdict(False, "still running after 3 s")
    assert run_code(flood.replace("while True", "for _ in range(9)")) == Verdict(
        False, "ended without a verdict (exit status 1)"
    )


AT_THE_VERDICT = """
import os
for place in range(3, 8):
    try:
        os.write(place, {forged!r})
    except OSError:
        pass
{then}
"""


@pytest.mark.parametrize("then", ["os._exit(0)", "pass"], ids=["and leaves", "and goes on"])
@pytest.mark.parametrize(
    "forged",
    [
        b"[" * 4000,
        b'{"unconfined": "x"}',
        b'\n{"unconfined": "x"}\n',
        b"1" * 4000,
        b'{"error": "\\ud800"}',
        b"\xff\n\n{}\n",
        b'{"error": {"token": []}}',
    ],
    ids=["nested", "unconfined", "unconfined on a line", "number", "surrogate", "bytes", "objects"],
)
def test_a_program_that_writes_a_verdict_of_its_own_fails_and_the_next_one_runs(forged, then):
    verdict = run_code(AT_THE_VERDICT.format(forged=forged, then=then))
    assert not verdict.passed
    verdict.said.encode()  # it goes into a file of results
    assert run_code("pass") == Verdict(True)


def test_an_error_with_half_a_character_can_be_written_to_a_file():
    assert run_code("raise ValueError(chr(0xd800))").said == "ValueError: \\ud800"


@pytest.mark.parametrize("path", ["environ", "mem", "maps", "fd/0", "cwd"])
def test_the_process_that_asked_cannot_be_looked_into(path, monkeypatch):
    if not has_landlock():
        pytest.skip("this kernel has no Landlock")
    monkeypatch.setenv("TIDE_API_KEY", "secret")
    look = "os.listdir" if path == "cwd" else "open"
    assert "PermissionError" in run_code(f"import os\n{look}('/proc/{os.getpid()}/{path}')").said
    assert run_code("import os\nassert os.getcwd() and open('/proc/self/environ', 'rb').read() == b''") == Verdict(True)


def test_pipes_of_the_process_that_asked_are_not_emptied():
    if not has_landlock():
        pytest.skip("this kernel has no Landlock")
    read, write = os.pipe()
    os.write(write, b"PARENT-DATA")
    assert not run_code(f"import os\nos.read(os.open('/proc/{os.getpid()}/fd/{read}', os.O_RDONLY | os.O_NONBLOCK), 99)").passed
    assert os.read(read, 99) == b"PARENT-DATA"
    os.close(read), os.close(write)


def test_a_crash_is_reported_with_its_exit_status():
    assert run_code("import ctypes\nctypes.string_at(0)").said == "ended without a verdict (exit status -11)"


def test_a_sandbox_that_ends_before_the_program_is_no_wrong_answer(tmp_path, monkeypatch):
    (tmp_path / "sandbox.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr("TIDE.evals.sandbox.SCRIPT", tmp_path / "sandbox.py")
    with pytest.raises(RuntimeError, match=r"the sandbox ended before the program \(exit status 3\)"):
        run_code("pass  # not asked before")


def test_where_code_cannot_be_confined_it_is_not_run(tmp_path, monkeypatch):
    mine = tmp_path / "sandbox.py"
    text = SCRIPT.read_text()
    mine.write_text(text.replace("machine = platform.machine()", "machine = 'sparc'"))
    monkeypatch.setattr("TIDE.evals.sandbox.SCRIPT", mine)
    target = tmp_path / "written"
    with pytest.raises(RuntimeError, match="it needs Linux on x86_64 or aarch64, found linux on sparc"):
        run_code(f"open({str(target)!r}, 'w')")
    assert not target.exists()
    run_code.cache_clear()


def test_the_sandbox_is_checked_before_it_is_needed(monkeypatch):
    check_sandbox()
    monkeypatch.setattr("TIDE.evals.sandbox.run_code", lambda code: Verdict(False, "broken"))
    with pytest.raises(RuntimeError, match="does not run even an empty program"):
        check_sandbox()


def test_a_sandbox_ends_with_the_process_that_asked(tmp_path):
    """Killed, it cannot clean up; the kernel does."""
    script = "from TIDE.evals.sandbox import *\nprint('ready', flush=True)\nrun_code('while True: pass', 600)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "ready\n"
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    child = ""
    for _ in range(600):
        child = children.read_text().strip()
        if child and "2" in _seccomp(child):  # the filter is installed, so is the signal
            break
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    for _ in range(600):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    raise AssertionError("it goes on")


def _seccomp(process: str) -> str:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split()[1] for line in lines if line.startswith("Seccomp:")), "")
