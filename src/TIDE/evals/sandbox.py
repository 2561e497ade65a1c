"""Generated code, run where it can do no harm: by this file, started as a script that imports nothing of TIDE.

    time        wall clock and CPU; the process is killed
    memory      address space
    processes   none besides it, no threads, no signals; others cannot be looked into where the kernel has Landlock
    files       none is written or changed but the verdict's, to which a program may append up to 4 KiB
    network     no sockets

The kernel holds these: rlimits, and a seccomp filter. Where it cannot, nothing is run. A verdict has two lines: {} before the
program runs, then an error, or the token, which no early exit gives; a program written to forge it could find it.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import platform
import signal
import struct
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

SCRIPT = Path(__file__)
# by machine: its number; openat, fcntl, ioctl; and the system calls that are allowed: read write close stat fstat lstat poll
# lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64 readv writev access select sched_yield
# mremap madvise dup nanosleep getpid exit uname getcwd readlink gettimeofday getrlimit getrusage sysinfo getuid getgid
# geteuid getegid getppid sigaltstack gettid futex sched_getaffinity getdents64 clock_gettime clock_getres clock_nanosleep
# exit_group newfstatat readlinkat faccessat pselect6 ppoll set_robust_list getrandom membarrier statx rseq faccessat2
X86 = """0 1 3 4 5 6 7 8 9 10 11 12 13 14 15 17 19 20 21 23 24 25 28 32 35 39 60 63 79 89 96 97 98 99 102 104 107 108 110 131
186 202 204 217 228 229 230 231 262 267 269 270 271 273 318 324 332 334 439"""
ARM = """63 64 57 80 62 222 226 215 214 134 135 139 67 65 66 124 216 233 23 101 172 93 160 17 169 163 165 179 174 176 175 177
173 132 178 98 123 61 113 114 115 94 79 78 48 72 73 99 278 283 291 293 439"""
MACHINES = {"x86_64": (0xC000003E, 257, 72, 16, X86), "aarch64": (0xC00000B7, 56, 25, 29, ARM)}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
COPIES = (0, 1, 2, 3, 1030)  # requests to fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; others send signals
LOOKS = (0x5401, 0x5450, 0x5451)  # and to ioctl: TCGETS, FIONCLEX, FIOCLEX; others change files
# of linux/bpf_common.h, linux/seccomp.h, linux/landlock.h, linux/prctl.h; a call that is refused fails with EPERM
LOAD, IF_EQUAL, IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = (RETURN, 0, 0, 0x7FFF0000), (RETURN, 0, 0, 0x00050001), (RETURN, 0, 0, 0x80000000)
NUMBER, ARCHITECTURE, SECOND, THIRD = 0, 4, 24, 32
CREATE_RULESET, RESTRICT_SELF, EXECUTE, PDEATHSIG, NO_NEW_PRIVS, SECCOMP, FILTER = 444, 446, 1, 1, 38, 22, 2


class Verdict(NamedTuple):
    """How a program ended: it passed if it ran to its end; otherwise what kept it from that, in words."""

    passed: bool
    said: str = ""


def check_sandbox() -> None:
    """Raise where code cannot be confined."""
    if not run_code("pass").passed:
        raise RuntimeError(f"the sandbox does not run even an empty program here ({run_code('pass').said}).")


@functools.lru_cache(maxsize=4096)  # modes often answer alike
def run_code(code: str, seconds: float = 20.0, size: int = 1 << 29) -> Verdict:
    """Run a program in the sandbox, without its output, in so many seconds and bytes of memory at most."""
    import subprocess
    import tempfile

    asked = {"token": os.urandom(16).hex(), "code": code, "seconds": seconds, "bytes": size}
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        try:
            with said.open("ab") as out:
                command, given = [sys.executable, "-I", "-S", "-B", str(SCRIPT)], json.dumps(asked).encode()
                options: Any = dict(stdout=out, stderr=subprocess.DEVNULL, cwd=folder, env={}, start_new_session=True)
                status = subprocess.run(command, input=given, timeout=seconds, **options).returncode
        except subprocess.TimeoutExpired:
            return Verdict(False, f"still running after {seconds:g} s")
        confinement, _, outcome = said.read_bytes().partition(b"\n")
    if not confinement or (why := _object(confinement).get("unconfined")):
        why = why if confinement else f"the sandbox ended before the program (exit status {status})"
        raise RuntimeError(f"generated code cannot be confined here: {why}. Leave out --execute-code.")
    found = _object(outcome)
    told = str(found.get("error", f"ended without a verdict (exit status {status})"))
    passed = found.get("token") == asked["token"]
    return Verdict(passed, "" if passed else told.encode(errors="backslashreplace").decode())


def _object(said: bytes) -> dict[str, Any]:
    try:
        return dict(json.loads(said))
    except (TypeError, ValueError, RecursionError):
        return {}


def _filter(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter in instructions (code, jump if true, jump if false, number)."""
    architecture, openat, fcntl, ioctl, plain = MACHINES[machine]
    lines = [(LOAD, 0, 0, ARCHITECTURE), (IF_EQUAL, 1, 0, architecture), KILL, (LOAD, 0, 0, NUMBER)]
    lines += [(IF_EQUAL, 0, 4, openat), (LOAD, 0, 0, THIRD), (IF_ANY_BIT, 0, 1, WRITING), REFUSE, ALLOW]
    for number, requests in ((fcntl, COPIES), (ioctl, LOOKS)):
        own = [(LOAD, 0, 0, SECOND), *(line for own in requests for line in ((IF_EQUAL, 0, 1, own), ALLOW)), REFUSE]
        lines += [(IF_EQUAL, 0, len(own), number), *own]
    return [*lines, *(line for own in map(int, plain.split()) for line in ((IF_EQUAL, 0, 1, own), ALLOW)), REFUSE]


def _confine(seconds: float, size: int) -> str | None:
    """Lower all limits of this process and install the filter; return what kept it from that, in words."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in MACHINES:
        return f"it needs Linux on {' or '.join(MACHINES)}, found {sys.platform} on {machine}"
    import resource  # on Linux

    limits = {"CPU": int(seconds) + 1, "AS": size, "FSIZE": 4096, "CORE": 0, "NOFILE": 64, "NPROC": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
    libc = ctypes.CDLL(None, use_errno=True)
    lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in _filter(machine)))
    program = struct.pack("@HP", len(lines) // 8, ctypes.addressof(lines))
    failed = libc.prctl(PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) or libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    failed = failed or libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))  # what root may do, such as reading any memory
    if not failed and libc.syscall(CREATE_RULESET, None, 0, 1) > 0:  # with rules of its own a process looks into no other
        rules = libc.syscall(CREATE_RULESET, ctypes.byref(ctypes.c_uint64(EXECUTE)), 8, 0)
        failed = rules < 0 or libc.syscall(RESTRICT_SELF, rules, 0)
    failed = failed or libc.prctl(SECCOMP, FILTER, program, 0, 0)
    return f"the kernel refused a limit: {os.strerror(ctypes.get_errno())}" if failed else None


def _run(code: str, token: str) -> dict[str, str]:
    """Run a program to its end, as a module of its own, and tell how it ended."""
    sys.modules["answer"] = answer = types.ModuleType("answer")  # dataclasses look for it there
    try:
        exec(compile(code, "answer", "exec", dont_inherit=True), answer.__dict__)  # without this file's __future__
    except BaseException as problem:
        return {"error": f"{type(problem).__name__}: {problem}"[:300]}
    return {"token": token}


def _main() -> None:
    asked: dict[str, Any] = json.load(sys.stdin)
    told, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    trouble = _confine(asked["seconds"], asked["bytes"])
    os.write(told, json.dumps({"unconfined": trouble} if trouble else {}).encode() + b"\n")  # before the program, which can too
    if not trouble:
        os.write(told, json.dumps(_run(asked["code"], asked["token"])).encode())
    os._exit(0)


if __name__ == "__main__":
    _main()
