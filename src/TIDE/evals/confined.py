"""The process that runs generated code. It is started as a script and imports nothing of TIDE: see `sandbox.py`.

It lowers its limits, gives up looking into other processes (Landlock, where the kernel has it), and installs a seccomp filter:
the kernel itself refuses every system call that is not in the table below. The table has reading files, memory and time; so no
process or thread is started, no socket is made, no signal sent, and no file opened for writing, whatever the code does. Then it
reads a program, runs it, and tells how that ended.

    stdin   {"token": ..., "code": ..., "seconds": ..., "bytes": ...}
    stdout  {} on the first line, before the code runs; {"unconfined": "..."} where the limits could not be set: the code is
            not run then. On the second {"token": ...} where the code ran to its end, {"error": "..."} where it did not

Without the token, an early exit would look like success. It is no secret: a program shares this process, so one that is written
to forge its verdict can read the token and report it.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from typing import Any

NUMBERS = {  # system calls that are allowed: name -> number on x86_64 and on aarch64; None: there is none of that name
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, None),
    "fstat": (5, 80),
    "lstat": (6, None),
    "poll": (7, None),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, None),
    "select": (23, None),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "getcwd": (79, 17),
    "readlink": (89, None),
    "gettimeofday": (96, 169),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "set_robust_list": (273, 99),
    "getrandom": (318, 278),
    "membarrier": (324, 283),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
}
CHOSEN = {  # allowed for some requests, which are the second argument: name -> number on both machines, and those requests
    # of linux/fcntl.h: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; others send signals, or lock and lease files
    "fcntl": ((72, 25), (0, 1, 2, 3, 1030)),
    # of asm-generic/ioctls.h: TCGETS, FIONCLEX, FIOCLEX; others change files
    "ioctl": ((16, 29), (0x5401, 0x5450, 0x5451)),
}
OPENAT = (257, 56)  # allowed for reading
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, and the kernel's number of it
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# of linux/bpf_common.h, linux/seccomp.h and linux/prctl.h
LOAD, JUMP_IF_EQUAL, JUMP_IF_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000  # refused: EPERM
NUMBER, ARCHITECTURE, SECOND_ARGUMENT, THIRD_ARGUMENT = 0, 4, 24, 32  # places in seccomp_data
# of linux/landlock.h: system calls, and the one right that is restricted
CREATE_RULESET, RESTRICT_SELF, VERSION = 444, 446, 1
EXECUTE = 1 << 0
CAPABILITY_VERSION = 0x20080522  # of linux/capability.h
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, MODE_FILTER = 1, 38, 22, 2


def program(machine: str) -> list[tuple[int, int, int, int]]:
    """Return the filter in instructions (code, jump if true, jump if false, number)."""
    column, architecture = MACHINES[machine]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER),
        (JUMP_IF_EQUAL, 0, 4, OPENAT[column]),
        (LOAD, 0, 0, THIRD_ARGUMENT),
        (JUMP_IF_ANY_BIT, 0, 1, WRITING),
        (RETURN, 0, 0, REFUSE),
        (RETURN, 0, 0, ALLOW),
    ]
    for own_numbers, requests in CHOSEN.values():
        allowed = [line for request in requests for line in ((JUMP_IF_EQUAL, 0, 1, request), (RETURN, 0, 0, ALLOW))]
        own = [(LOAD, 0, 0, SECOND_ARGUMENT), *allowed, (RETURN, 0, 0, REFUSE)]
        lines += [(JUMP_IF_EQUAL, 0, len(own), own_numbers[column]), *own]
    for numbers in NUMBERS.values():
        number = numbers[column]
        if number is not None:
            lines += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    return [*lines, (RETURN, 0, 0, REFUSE)]


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_void_p))


def has_landlock() -> bool:
    """Return True if the kernel can keep this process from looking into others."""
    return bool(ctypes.CDLL(None, use_errno=True).syscall(CREATE_RULESET, None, 0, VERSION) > 0)


def _isolate() -> bool:
    """Give up what ptrace allows to a user, such as reading /proc/PID/environ, mem and fd of other processes.

    Landlock refuses that to every process with rules of its own, whatever the rules are; here they forbid to run programs.
    """
    syscall, rights = ctypes.CDLL(None, use_errno=True).syscall, ctypes.c_uint64(EXECUTE)
    rules = syscall(CREATE_RULESET, ctypes.byref(rights), ctypes.sizeof(rights), 0)
    return rules >= 0 and syscall(RESTRICT_SELF, rules, 0) == 0


def _drop_capabilities() -> bool:
    """Give up what root may do, such as reading the memory of any process."""
    header, none = struct.pack("=Ii", CAPABILITY_VERSION, 0), bytes(24)
    return bool(ctypes.CDLL(None, use_errno=True).capset(header, none) == 0)


def confine(seconds: float, size: int) -> str | None:
    """Lower all limits of this process and install the filter; return what kept it from that, in words."""
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine not in MACHINES:
        return f"it needs Linux on {' or '.join(MACHINES)}, found {sys.platform} on {machine}"
    for kind, most in (
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_AS, size),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(kind, (most, most))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    lines = b"".join(struct.pack("=HBBI", *line) for line in program(machine))
    held = ctypes.create_string_buffer(lines, len(lines))
    wanted = _Filter(len(lines) // 8, ctypes.cast(held, ctypes.c_void_p))
    for what, refused in (
        ("PR_SET_PDEATHSIG", lambda: prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)),
        ("PR_SET_NO_NEW_PRIVS", lambda: prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        ("capset", lambda: not _drop_capabilities()),
        ("Landlock", lambda: has_landlock() and not _isolate()),
        ("PR_SET_SECCOMP", lambda: prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(wanted), 0, 0)),
    ):
        if refused():
            return f"the kernel refused {what}: {os.strerror(ctypes.get_errno())}"
    return None


def outcome(code: str, token: str) -> dict[str, str]:
    """Run a program to its end, as a module of its own, and tell how it ended."""
    sys.modules["answer"] = answer = types.ModuleType("answer")  # dataclasses look for it there
    try:
        exec(compile(code, "answer", "exec", dont_inherit=True), answer.__dict__)  # without this file's __future__
    except BaseException as problem:
        return {"error": f"{type(problem).__name__}: {problem}"[:300]}
    return {"token": token}


def main() -> None:
    """Read a program, run it confined, and write how it ended."""
    asked: dict[str, Any] = json.load(sys.stdin)
    told, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)
    trouble = confine(asked["seconds"], asked["bytes"])
    _tell(told, {"unconfined": trouble} if trouble else {})  # before the code runs, which can write there too
    if not trouble:
        _tell(told, outcome(asked["code"], asked["token"]))
    os._exit(0)


def _tell(told: int, words: dict[str, str]) -> None:
    os.write(told, json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    main()
