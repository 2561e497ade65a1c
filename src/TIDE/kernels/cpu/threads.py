"""How many threads a CPU's compiled code and torch use, by what their work takes.

Threads meet at the end of every product. Beside another busy program one of them waits for a slice of time, and all others wait
for it: on two cores two threads are then a tenth as fast as they were, and a third as fast as one. So layers are timed, and one
thread more or less is tried now and then:

    a layer takes longer than with one thread less     one less from here on
    a trial of one more is quicker                     one more, for as long as that stays true

A trial is two layers long. Where it fails, the next one waits twice as long, up to `LONGEST` seconds. Results do not depend on
the number of threads: each sum is made by one of them.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from numba import config, set_num_threads, threading_layer

SHORTEST, LONGEST = 0.05, 3.0  # seconds from one trial to the next
PIECES = 2  # timed pieces of work that a trial takes
STABLE = 90  # pieces after which a number of threads has proved itself, three steps of a model of 30 layers
NEWEST = 0.25  # weight of the newest timing
GAIN = 0.3  # of what one thread more can win at best: less does not change the number of threads

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _start() -> None:
    """Start numba's threads: code from its cache relies on it. torch may have its threads from the same library, where the
    newest number counts."""
    torch: Any = sys.modules.get("torch")  # not imported where code is only compiled
    count = 0 if torch is None else torch.get_num_threads()
    set_num_threads(config.NUMBA_NUM_THREADS)
    if count:
        torch.set_num_threads(count)


_start()


class ThreadCount:
    """The number of threads for pieces of work that repeat, such as layers.

    Args:
        clock: seconds, for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.most = self.count = 1
        self._seconds: dict[Any, dict[int, float]] = {}  # by kind of work, then by threads
        self._trial: int | None = None
        self._left = 0  # pieces of the trial
        self._taken = 0.0  # seconds of its pieces, compared with those of as many without it
        self._is_up = False  # the latest trial was one of more threads
        self._wait = SHORTEST
        self._next = 0.0  # time of the next trial
        self._since = STABLE  # pieces since the number changed

    def allow(self, most: int) -> None:
        """Use at most so many threads from now on."""
        if most != self.most:
            self.most = self.count = most
            self._trial, self._wait, self._next = None, SHORTEST, 0.0

    @contextmanager
    def timed(self, kind: Any) -> Iterator[None]:
        """Time a piece of work, which runs on the threads of the moment.

        Args:
            kind: pieces of one kind take about as long.
        """
        if self.most == 1:
            use(1)
            yield
            return
        count = self._choose(kind)
        use(count)
        began = self.clock()
        yield
        self._record(kind, count, self.clock() - began)

    def _choose(self, kind: Any) -> int:
        known = self._seconds.setdefault(kind, {})
        if self._trial is None and self.count in known and self.clock() >= self._next:
            self._begin_trial(known)
        return self.count if self._trial is None or self.count not in known else self._trial

    def _begin_trial(self, known: dict[int, float]) -> None:
        """Try a neighbour: one that was never timed, or the other one than the last time."""
        neighbours = [n for n in (self.count - 1, self.count + 1) if 1 <= n <= self.most]
        unknown = [n for n in neighbours if n not in known]
        turn = [n for n in neighbours if (n > self.count) is not self._is_up]
        self._trial = (unknown or turn or neighbours)[0]
        self._is_up = self._trial > self.count
        self._left, self._taken = PIECES, 0.0

    def _record(self, kind: Any, count: int, seconds: float) -> None:
        known = self._seconds[kind]
        before = known.get(count, seconds)
        known[count] = before + NEWEST * (seconds - before)
        if count == self._trial:
            self._left -= 1
            self._taken += seconds / known[self.count]
            if not self._left:
                self._end_trial(self._taken < PIECES * (1 - GAIN / max(count, self.count)))
        elif count == self.count:
            self._since += 1
            if self._since == STABLE:
                self._wait = SHORTEST
            fewer = known.get(count - 1)
            if fewer is not None and fewer < known[count] * (1 - GAIN / count):
                self._change(count - 1)

    def _end_trial(self, is_better: bool) -> None:
        trial, self._trial = self._trial, None
        if is_better and trial is not None:
            for known in self._seconds.values():  # what was slower before is no longer true
                known.pop(trial, None)
            self._change(trial)
        else:
            self._delay()

    def _change(self, count: int) -> None:
        self.count, self._trial = count, None
        if self._since < STABLE:
            self._delay()
        else:
            self._wait = SHORTEST
            self._next = self.clock() + self._wait
        self._since = 0

    def _delay(self) -> None:
        self._wait = min(2 * self._wait, LONGEST)
        self._next = self.clock() + self._wait


def use(count: int) -> None:
    """Run compiled code on `count` threads from now on, or on as many as there are."""
    set_num_threads(max(1, min(count, config.NUMBA_NUM_THREADS)))


class _TorchThreads:
    """torch's number of threads, which is the user's outside `limited`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._users = 1

    @property
    def most(self) -> int:
        """The number the user has set."""
        import torch

        return self._users if self._inside else torch.get_num_threads()

    @contextmanager
    def limited(self, count: int) -> Iterator[None]:
        """Let torch use at most `count` threads inside; the last one to leave gives the user's number back."""
        with self._lock:
            self._users = self.most
            self._inside += 1
            _set_torch(min(count, self._users))
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    _set_torch(self._users)


def _set_torch(count: int) -> None:
    import torch

    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


torch_threads = _TorchThreads()
_turn = threading.RLock() if threading_layer() == "workqueue" else None


def in_turn(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let one thread at a time run a function with parallel code, where numba's threads would end the process otherwise."""
    if _turn is None:
        return function

    @wraps(function)
    def alone(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        with _turn:
            return function(*args, **kwargs)

    return alone
