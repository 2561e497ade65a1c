"""Rows whose steps are broken off by Ctrl-C, at any line: they end where they would have, and are counted and reported."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from families import build
from policies import Everyone
from TIDE import TIDE
from TIDE.engine.batch import Batch, OpenRows
from TIDE.engine.rows.row import Counts, Row

NEW = 5


@pytest.fixture(scope="module")
def engine():
    with TIDE(build("llama"), Everyone(2)) as engine:
        yield engine


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, 7), generator=torch.Generator().manual_seed(0))


class After(StoppingCriteria):
    """Ends a text at a length. Interrupted once, when it is asked about a text of `size` tokens."""

    def __init__(self, length: int, size: int | None = None) -> None:
        self.length = length
        self.size = size

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] == self.size:
            self.size = None
            raise KeyboardInterrupt
        return torch.tensor([input_ids.shape[1] >= self.length])


class Interrupts:
    """An interrupt before a line of some functions runs.

    Args:
        number: of the line among all that run; lines of `with` are passed over, where no real signal arrives.
    """

    def __init__(self, number: int, *functions: Callable) -> None:
        self.left = number
        self.codes = {inspect.unwrap(function).__code__ for function in functions}

    @property
    def is_over(self) -> bool:
        return self.left <= 0

    @contextmanager
    def under_way(self):
        before = sys.gettrace()
        sys.settrace(self._watch)
        try:
            yield
        finally:
            sys.settrace(before)

    def _watch(self, frame, event, argument):
        if frame.f_code not in self.codes:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self._watch


def at_every_line(*functions: Callable) -> Iterator[Interrupts]:
    """Interrupts before the first line of functions that runs, the second, …, until none is left."""
    number, interrupts = 0, None
    while interrupts is None or interrupts.is_over:
        number += 1
        interrupts = Interrupts(number, *functions)
        yield interrupts


def finish(engine, row: Row, interrupts: Interrupts) -> list[Row]:
    """Decode a row until it is reported to have ended; return the rows that were."""
    ended: list[Row] = []
    for _ in range(100):
        if row in ended:
            break
        try:
            with interrupts.under_way():
                changed = engine.step()
        except KeyboardInterrupt:
            continue
        ended += [one for one in changed if one.finished]
    return ended


@pytest.mark.parametrize("ends", ["by the stop rule", "by length"])
def test_no_token_is_written_past_the_end_wherever_a_step_is_broken_off(engine, ids, ends):
    options = dict(max_new_tokens=NEW) if ends == "by length" else dict(max_new_tokens=4 * NEW)
    options |= dict(do_sample=False, eos_token_id=None, pad_token_id=0)
    expected = engine.generate(ids, **{**options, "max_new_tokens": NEW})[0, 7:].tolist()
    for number, interrupts in enumerate(at_every_line(Row.extend, Row._append, Row._check_end), 1):
        criteria = StoppingCriteriaList([] if ends == "by length" else [After(7 + NEW)])
        row = engine.add(ids, stopping_criteria=criteria, **options)
        finish(engine, row, interrupts)
        assert row.new_tokens == expected, f"interrupted at line {number}"
        assert [draft.token for draft in row.decided] == expected
    assert number > 5 * NEW


@pytest.mark.parametrize("size", range(8, 8 + NEW))
def test_a_criterion_that_is_interrupted_is_asked_again_about_the_same_token(engine, ids, size):
    criteria = StoppingCriteriaList([After(7 + NEW, size)])
    row = engine.add(ids, stopping_criteria=criteria, max_new_tokens=4 * NEW, do_sample=False, eos_token_id=None)
    finish(engine, row, Interrupts(0))
    assert len(row.new_tokens) == NEW and row.error is None


def test_a_row_that_ends_is_counted_once_and_reported_wherever_a_step_is_broken_off(engine, ids):
    lines = at_every_line(TIDE.step, Batch.step, OpenRows.report, Counts.saw_step, Counts.end)
    for number, interrupts in enumerate(lines, 1):
        before = engine.total_stats.total_tokens
        row = engine.add(ids, max_new_tokens=2, do_sample=False, eos_token_id=None)
        assert finish(engine, row, interrupts) == [row], f"interrupted at line {number}"
        assert engine.total_stats.total_tokens == before + 2, f"interrupted at line {number}"
        assert engine.step() == [] and engine.total_stats.total_tokens == before + 2, "not a second time"
    assert number > 20


def test_requests_are_counted_once_wherever_they_are_broken_off(engine, ids):
    for number, interrupts in enumerate(at_every_line(Counts.counted, Counts.end, TIDE._answer), 1):
        before = engine.total_stats.total_tokens
        engine.last_rows = []
        with suppress(KeyboardInterrupt), interrupts.under_way():
            engine.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None, pad_token_id=0)
        written = sum(len(row.new_tokens) for row in engine.last_rows)
        assert engine.total_stats.total_tokens == before + written, f"interrupted at line {number}"
    assert number > 5
