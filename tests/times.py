"""Seconds by test file: `times.json` keeps them, workers are balanced by them, and folders have budgets.

`pytest --keep-times` writes the file, of the tests that it runs.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

KEPT = Path(__file__).with_name("times.json")
# seconds of `make test` on two quiet cores, six minutes in all; of other folders together, those of "rest"
BUDGETS = {"engine": 150, "kernels": 70, "server": 35, "cli": 35, "calibration": 30, "rest": 40}
TOLERANCE = 1.2  # times its budget, before a folder is named

measured: Counter[str] = Counter()


def pytest_addoption(parser):
    parser.addoption("--keep-times", action="store_true", help="write the seconds of test files to tests/times.json")


def pytest_collection_modifyitems(config, items):
    """Give workers equal seconds, long files first. With `--dist worksteal` each begins with an equal stretch of the list."""
    workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
    if workers == 1:
        return
    seconds, files = json.loads(KEPT.read_text()), {}
    for item in items:
        files.setdefault(_name(item.nodeid), []).append(item)
    room = [len(items) * (worker + 1) // workers - len(items) * worker // workers for worker in range(workers)]
    loads, stretches = [0.0] * workers, [[] for _ in room]
    for name in sorted(files, key=lambda name: -seconds.get(name, 0)):
        left = files[name]
        while left:  # a file is parted only where no worker has room for all of it
            fitting = [worker for worker in range(workers) if room[worker] >= len(left)]
            worker = min(fitting, key=loads.__getitem__) if fitting else room.index(max(room))
            part, left = left[: room[worker]], left[room[worker] :]
            stretches[worker] += part
            room[worker] -= len(part)
            loads[worker] += seconds.get(name, 0) * len(part) / len(files[name])
    items[:] = [item for stretch in stretches for item in stretch]


def pytest_runtest_logreport(report):
    measured[_name(report.nodeid)] += report.duration


def pytest_terminal_summary(terminalreporter, config):
    folders: Counter[str] = Counter()
    for name, seconds in measured.items():
        folder = name.split("/")[0]
        folders[folder if folder in BUDGETS else "rest"] += seconds
    if folders.keys() == BUDGETS.keys():  # all tests ran, not those of some folders
        scale = folders.total() / sum(BUDGETS.values())
        over = [name for name in BUDGETS if folders[name] > TOLERANCE * scale * BUDGETS[name]]
        shares = (f"{name} {folders[name]:.0f} of {scale * BUDGETS[name]:.0f}" for name in BUDGETS)
        terminalreporter.write_line(f"seconds of tests, of each folder's share: {', '.join(shares)}")
        if over:
            terminalreporter.write_line(f"over its share of the time: {', '.join(over)}", yellow=True)
    if config.getoption("keep_times"):
        there = {**json.loads(KEPT.read_text()), **{name: round(seconds, 1) for name, seconds in measured.items()}}
        times = {name: there[name] for name in sorted(there) if (KEPT.parent / name).exists()}
        KEPT.write_text(json.dumps(times, indent=1) + "\n")


def _name(nodeid: str) -> str:
    """Return the test file of a test, from tests/."""
    return nodeid.split("::")[0].removeprefix("tests/")
