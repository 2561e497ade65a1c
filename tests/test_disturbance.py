"""Other programs that use the processors while something is timed are noticed and named."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from TIDE import disturbance
from TIDE.disturbance import Load, moment, notice, since

needs_linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound to a CPU on Linux only")


@needs_linux
def test_a_program_on_the_same_cpu_is_noticed():
    cpus = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(cpus)})
        with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as loop:
            before, until = moment(), time.monotonic() + 2
            while time.monotonic() < until:
                pass
            load = since(before)
            loop.kill()
    finally:
        os.sched_setaffinity(0, cpus)
    assert load.is_disturbed and load.cpus == 1
    assert load.others == pytest.approx(1 - load.used, abs=0.15)
    quiet_host = load._replace(stolen=0.0)  # where this test runs in a virtual machine, its host may take more than the loop
    assert quiet_host.words == f"other programs used {load.others:.1f} of 1 CPU"


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """Returns a function that sets the counters of a system with two CPUs, of which this process may use both."""
    monkeypatch.setattr(disturbance, "STAT", tmp_path / "stat")
    monkeypatch.setattr(disturbance, "TASKS", tmp_path / "task")
    monkeypatch.setattr(disturbance, "_cpus", lambda: {0, 1})
    monkeypatch.setattr(disturbance.os, "sysconf", lambda name: 100)
    (tmp_path / "task" / "1").mkdir(parents=True)
    clock = {"wall": 0.0, "used": 0.0}
    monkeypatch.setattr(disturbance.time, "monotonic", lambda: clock["wall"])
    monkeypatch.setattr(disturbance.time, "process_time", lambda: clock["used"])

    def at(wall, used, busy=(0, 0), waited=1.0, stolen=0.0):
        clock.update(wall=wall, used=used)
        steal = round(100 * stolen)
        lines = [f"cpu{number} {round(100 * seconds)} 0 0 9 9 0 0 {steal} 0 0" for number, seconds in enumerate((*busy, wall))]
        (tmp_path / "stat").write_text("cpu  9 9 9 9\n" + "\n".join(lines))
        (tmp_path / "task" / "1" / "schedstat").write_text(f"5 {round(waited * 1e9)} 7")

    return at


def load_of(counters, used, busy, waited, seconds=2.0, stolen=0.0):
    counters(0.0, 0.0)
    before = moment()
    counters(seconds, used, busy, 1.0 + waited, stolen)
    return since(before)


def test_use_by_this_process_is_none_by_others(counters):
    load = load_of(counters, used=3.9, busy=(2.0, 1.95), waited=0.5)
    assert not load.is_disturbed and load.words == "" and load.taken == 0


def test_others_disturb_only_where_threads_waited(counters):
    assert load_of(counters, used=2.0, busy=(2.0, 1.8), waited=0.4).words == "other programs used 0.9 of 2 CPUs"
    assert load_of(counters, used=1.0, busy=(1.0, 1.0), waited=0.01).words == "", "a CPU each"


def test_the_host_of_a_virtual_machine_disturbs_where_no_thread_waited(counters):
    load = load_of(counters, used=2.0, busy=(1.0, 1.0), waited=0.0, stolen=0.8)
    assert load.is_disturbed and load.words == "other machines on its host used 0.8 of 2 CPUs"


def test_waiting_that_is_not_counted_is_taken_from_full_cpus(counters, monkeypatch):
    monkeypatch.setattr(disturbance, "_waited", lambda: None)
    assert load_of(counters, used=2.0, busy=(2.0, 1.8), waited=0.0).is_disturbed
    assert not load_of(counters, used=1.0, busy=(1.0, 0.5), waited=0.0).is_disturbed


def test_rounding_of_counters_is_no_disturbance(counters):
    assert not load_of(counters, used=0.01, busy=(0.01, 0.02), waited=0.01, seconds=0.02).is_disturbed


@pytest.mark.parametrize(("average", "words"), [(3.14, "the load average was 3.1 on 2 CPUs"), (1.9, ""), (None, "")])
def test_elsewhere_the_load_average_is_all_there_is(counters, tmp_path, monkeypatch, average, words):
    def load_average():
        if average is None:
            raise OSError
        return average, 0.0, 0.0

    counters(1.0, 1.0)
    monkeypatch.setattr(disturbance, "STAT", tmp_path / "missing")
    monkeypatch.setattr(disturbance.os, "getloadavg", load_average)
    load = since(moment())
    assert load.others is None and load.words == words


def test_a_notice_names_what_was_disturbed_and_by_how_much():
    quiet, little, much = (Load(2, 1.0, 1.0, others, waited) for others, waited in ((0.0, 0.0), (0.5, 0.3), (0.9, 0.8)))
    assert notice({"generate": [quiet, quiet]}) == []
    assert notice({"generate": [quiet, quiet], "exact": [little, quiet, much]}) == [
        "exact: 2 of 3 timed runs were disturbed: at worst, other programs used 0.9 of 2 CPUs.",
        "Measure again when the machine is quiet.",
    ]
    assert notice({f"setting {number}": [little, much] for number in range(5)}) == [
        "timed runs of 5 of these 5 were disturbed: at worst, other programs used 0.9 of 2 CPUs.",
        "Measure again when the machine is quiet.",
    ]
