"""Ctrl-C anywhere: the engine goes on, other requests are right, and a row that was interrupted never runs past its end.

traced      KeyboardInterrupt is raised before the k-th line that runs in engine/ or routing/
signals     the handler of a real signal raises it at a random moment
"""

from __future__ import annotations

import functools
import linecache
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import StoppingCriteria

import TIDE as package
from attempts import AGAIN, attempt, in_parts
from families import VOCAB, build
from policies import Everyone
from router_files import a_file
from runners import as_it_is, on_references
from TIDE import TIDE, TIDEConfig
from TIDE.engine.rows.row import Row
from TIDE.routing.policies import policy_for

pytestmark = pytest.mark.full

TRACED = tuple(str(Path(package.__file__).parent / folder) for folder in ("engine", "routing"))
tiny = functools.cache(build)


class AtElevens(StoppingCriteria):
    """A text ends with a token that eleven divides; in Python, where an interrupt can come."""

    def __call__(self, ids, scores, **_):
        return ids[:, -1] % 11 == 0


class Interrupting:
    """Raises KeyboardInterrupt before a line of the engine.

    Args:
        line: its number among those that run; None: only count them.
    """

    def __init__(self, line: int | None = None) -> None:
        self.line = line
        self.lines = 0
        self.where = "nowhere"

    def __enter__(self) -> Interrupting:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame, event, argument):
        return self._ran if frame.f_code.co_filename.startswith(TRACED) else None

    def _ran(self, frame, event, argument):
        # leaving a `with`, its line comes again before __exit__: a tracer can keep a lock from being released, a signal cannot
        if event != "line" or linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("with "):
            return self._ran
        self.lines += 1
        if self.lines == self.line:
            sys.settrace(None)
            self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            raise KeyboardInterrupt
        return self._ran


@contextmanager
def signals_after(seconds: float) -> Iterator[None]:
    """Raise KeyboardInterrupt by a signal after so many seconds of this process's time, unless the block has ended before."""
    is_armed = True

    def interrupt(*_: object) -> None:
        if is_armed:
            raise KeyboardInterrupt

    held = signal.signal(signal.SIGVTALRM, interrupt)  # SIGALRM is pytest-timeout's
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        yield
    finally:
        is_armed = False
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, held)


PROMPTS = torch.randint(3, VOCAB, (4, 9), generator=torch.Generator().manual_seed(5))
ROWS = range(4)
KINDS = {
    "greedy": dict(do_sample=False, max_new_tokens=14, eos_token_id=None),
    "ends": dict(do_sample=False, max_new_tokens=14, eos_token_id=list(range(2, 128, 9))),
    "criterion": dict(do_sample=False, max_new_tokens=14, eos_token_id=None, stopping_criteria=[AtElevens()]),
    "sampled": dict(
        do_sample=True, temperature=1.3, max_new_tokens=14, eos_token_id=list(range(2, 128, 9)), repetition_penalty=1.2
    ),
}


def options(kind: str, *rows: int) -> dict[str, Any]:
    seeds = dict(seed=[7 + row for row in rows]) if KINDS[kind]["do_sample"] else {}
    return dict(
        KINDS[kind], inputs=PROMPTS[list(rows)], attention_mask=torch.ones_like(PROMPTS[list(rows)]), pad_token_id=0, **seeds
    )


@functools.cache
def texts(kind: str) -> list[list[int]]:
    """Each prompt's text, alone and with exits off."""
    with TIDE(build("llama")) as engine:  # a model of its own: other engines may be open
        found = [engine.generate(**options(kind, row))[0] for row in ROWS]
    return [text[PROMPTS.shape[1] :].tolist() for text in found]


def generated(engine: TIDE, kind: str) -> None:
    """All prompts together."""
    engine.generate(**options(kind, *ROWS))
    assert [row.new_tokens for row in engine.last_rows] == texts(kind)


def streamed(engine: TIDE, kind: str) -> None:
    assert list(engine.stream(**options(kind, 0))) == texts(kind)[0]


class Added:
    """Rows that are added and stepped until all have ended; called again it goes on with those that it has."""

    def __init__(self) -> None:
        self.rows: list[Row | None] = []

    def __call__(self, engine: TIDE, kind: str) -> None:
        for at in ROWS[len(self.rows) :]:
            self.rows.append(None)  # an `add` that is broken off is not tried again
            self.rows[at] = engine.add(**options(kind, at))
            engine.step()
        for _ in range(200):
            if not engine.is_idle:
                engine.step()
        for row, text in zip(self.rows, texts(kind), strict=True):
            if row is not None:
                assert row.error is None and row.finished and row.new_tokens == text, f"expected {text}, found {row.new_tokens}"
                assert [draft.token for draft in row.decided] == text


ASKED: dict[str, Callable[[], Callable[[TIDE, str], None]]] = {
    "generated": lambda: generated,
    "streamed": lambda: streamed,
    "added": Added,
}
EXITS = {"none": None, "everyone": (0, 2), "identity": (1, 3), "memory": (0, 2)}
PLACES = {"here": as_it_is, "in rounds": on_references}


class Case(NamedTuple):
    """A request and the engine that it is asked of."""

    exits: str
    place: str
    asked: str
    kind: str

    def usual(self) -> Case:
        """Return the case of its kind that is measured."""
        return self._replace(kind="greedy")

    @contextmanager
    def engine(self) -> Iterator[TIDE]:
        depths = EXITS[self.exits]
        with TIDE(tiny("llama")) as engine:
            policy = None if depths is None else Everyone(*depths)
            if self.exits in ("identity", "memory"):
                policy = policy_for(a_file(tiny("llama"), self.exits, depths, 0.5), engine.adapter)
        with PLACES[self.place](TIDE(tiny("llama"), policy, TIDEConfig(max_pending=4))) as engine:
            yield engine


@functools.cache
def lines(case: Case) -> int:
    """How many lines of the engine run for a case."""
    with case.engine() as engine, Interrupting() as counted:
        ASKED[case.asked]()(engine, case.kind)
    return counted.lines


@functools.cache
def seconds(case: Case) -> float:
    """Seconds of this process that a case takes, with everything compiled."""
    for _ in range(2):
        with case.engine() as engine:
            began = time.process_time()
            ASKED[case.asked]()(engine, case.kind)
    return time.process_time() - began


delivered: list[bool] = []


def attack(chance: random.Random, interrupting: Callable[[Case, float], AbstractContextManager]) -> None:
    """Interrupt a request and ask again.

    Args:
        interrupting: the context that interrupts a case at a share of its way.
    """
    case = Case(*(chance.choice(list(names)) for names in (EXITS, PLACES, ASKED, KINDS)))
    ask, interruption = ASKED[case.asked](), interrupting(case, chance.random())
    with case.engine() as engine:
        try:
            with interruption:
                ask(engine, case.kind)
            delivered.append(False)
        except KeyboardInterrupt:
            delivered.append(True)
        try:
            for row, text in zip(engine.last_rows, texts(case.kind), strict=False):
                assert row.new_tokens == text[: len(row.new_tokens)], f"expected {text}, found {row.new_tokens}"
            if isinstance(ask, Added):
                ask(engine, case.kind)
            for again in ASKED.values():
                again()(engine, chance.choice(list(KINDS)))
            assert engine.is_idle
        except Exception as problem:
            raise AssertionError(f"{case}, interrupted at {getattr(interruption, 'where', '?')}: {problem!r}") from problem


@pytest.mark.long
@in_parts
def test_an_interrupt_at_any_line_leaves_an_engine_that_writes_what_it_wrote(part):
    """12 lines; 500 others with TIDE_LONG=1."""
    delivered.clear()
    attempt(
        lambda chance: attack(chance, lambda case, share: Interrupting(1 + int(share * lines(case.usual())))), few=12, many=500
    )
    assert AGAIN or sum(delivered) > len(delivered) / 2


@pytest.mark.long
@in_parts
def test_a_signal_at_any_moment_leaves_an_engine_that_writes_what_it_wrote(part):
    """8 signals; 500 others with TIDE_LONG=1."""
    delivered.clear()
    attempt(lambda chance: attack(chance, lambda case, share: signals_after(share * seconds(case.usual()))), few=8, many=500)
    assert AGAIN or sum(delivered) > len(delivered) / 4
