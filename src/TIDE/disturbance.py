"""Disturbance: the processors that other programs used while something was timed.

Linux counts the busy time of each processor and what a host took from it (steal, in /proc/stat), and how long each thread
waited for one (/proc/self/task/*/schedstat). Elsewhere the load average is used; where there is none, nothing is known and
nothing is said.

    before = moment()        load = since(before)        load.words: "other programs used 0.9 of 2 CPUs"
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

STAT, TASKS = Path("/proc/stat"), Path("/proc/self/task")
OTHERS = 0.15  # CPUs that other programs must have used to be named
COUNTED = 0.1  # seconds of their use; less is rounding of the counters
WAITED = 0.05  # seconds that threads must have waited for a CPU, or a host must have taken, per second
FEW = 3  # of what was timed is named one by one
FULL = 0.9  # share of the CPUs in use from which threads are taken to wait, if their waiting is not known
BUSY_FIELDS, STOLEN_FIELD = (0, 1, 2, 5, 6, 7), 7  # of /proc/stat: user, nice, system, irq, softirq, steal


class Moment(NamedTuple):
    """Counters at one time, in seconds; None: not known."""

    wall: float
    used: float  # CPU time of this process
    busy: float | None  # CPU time of all programs, on the CPUs that this process may use, and of other machines on their host
    stolen: float  # that of other machines
    waited: float | None  # time that this process's threads were ready to run and did not


class Load(NamedTuple):
    """CPU use over some seconds, in CPUs; None: not known."""

    cpus: int
    seconds: float
    used: float
    others: float | None
    waited: float | None
    load_average: float | None = None  # only where `others` is not known
    stolen: float = 0.0  # the part of `others` that the host of a virtual machine took

    @property
    def is_disturbed(self) -> bool:
        if self.others is None:
            return self.load_average is not None and self.load_average > self.cpus + 0.5
        if self.others < OTHERS or self.others * self.seconds < COUNTED:
            return False
        if self.waited is None:
            return self.others + self.used > FULL * self.cpus
        return self.waited + self.stolen > WAITED

    @property
    def taken(self) -> float:
        """The share of the CPUs that other programs used; 0 if they did not disturb."""
        busy = self.others if self.others is not None else (self.load_average or 0.0) - self.used
        return min(1.0, busy / self.cpus) if self.is_disturbed else 0.0

    @property
    def words(self) -> str:
        """What disturbed; empty: nothing that is known."""
        if not self.is_disturbed:
            return ""
        if self.others is None:
            return f"the load average was {self.load_average:.1f} on {self.cpus} CPUs"
        who = "other machines on its host" if self.stolen > self.others / 2 else "other programs"
        return f"{who} used {self.others:.1f} of {self.cpus} CPU{'s' * (self.cpus > 1)}"


def moment() -> Moment:
    busy, stolen = _busy()
    return Moment(time.monotonic(), time.process_time(), busy, stolen, _waited())


def since(before: Moment) -> Load:
    """Return the CPU use since a moment."""
    now = moment()
    seconds = max(now.wall - before.wall, 1e-9)
    used = (now.used - before.used) / seconds
    busy = None if now.busy is None or before.busy is None else (now.busy - before.busy) / seconds
    waited = None if now.waited is None or before.waited is None else max(0.0, now.waited - before.waited) / seconds
    return Load(
        cpus=len(_cpus()) or os.cpu_count() or 1,
        seconds=seconds,
        used=used,
        others=None if busy is None else max(0.0, busy - used),
        waited=waited,
        load_average=_load_average() if busy is None else None,
        stolen=max(0.0, now.stolen - before.stolen) / seconds,
    )


def notice(loads: Mapping[str, Sequence[Load]]) -> list[str]:
    """Return a line for each of what was timed that other programs disturbed, or one for them all if they are many.

    Args:
        loads: name -> the load of each of its timed runs.
    """
    lines, worst = [], None
    for name, runs in loads.items():
        disturbed = [load for load in runs if load.is_disturbed]
        if disturbed:
            own = max(disturbed, key=lambda load: load.taken)
            worst = own if worst is None or own.taken > worst.taken else worst
            lines.append(f"{name}: {len(disturbed)} of {len(runs)} timed runs were disturbed: at worst, {own.words}.")
    if len(lines) > FEW and worst is not None:
        lines = [f"timed runs of {len(lines)} of these {len(loads)} were disturbed: at worst, {worst.words}."]
    return [*lines, "Measure again when the machine is quiet."] if lines else []


def _cpus() -> set[int]:
    """Return the CPUs that this process may use; empty: the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _busy() -> tuple[float | None, float]:
    """Return the busy seconds of the CPUs, and those of them that the host took."""
    try:
        lines = STAT.read_text("utf-8").splitlines()
        own = {f"cpu{number}" for number in _cpus()}
        fields = [line.split()[1:] for line in lines if line.split()[0] in own]
        per_second = os.sysconf("SC_CLK_TCK")
        ticks = sum(int(values[place]) for values in fields for place in BUSY_FIELDS)
        stolen = sum(int(values[STOLEN_FIELD]) for values in fields)
        return (ticks / per_second if fields else None), stolen / per_second
    except (OSError, ValueError, IndexError):
        return None, 0.0


def _waited() -> float | None:
    try:
        found = [int((task / "schedstat").read_text("utf-8").split()[1]) for task in TASKS.iterdir()]
    except (OSError, ValueError, IndexError):  # no such counters, or a thread that ended meanwhile
        return None
    return sum(found) / 1e9 if any(found) else None


def _load_average() -> float | None:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
