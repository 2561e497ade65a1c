"""Loop against loop: given the same draft lengths, all loops write, count and decide the same.

    host, on modules      the plain loop and the reference
    host, on numba        exit heads in 8 bits: scores differ a little
    device, plain         whole rounds, each read before the next is launched
    device, overlapped    each read while the next one runs, or some while the next ones run; the last one is never read, but
                          its layers have run

Padding is not counted, so layers can be compared as well.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import contextmanager
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from decoding import Script, in_a_loop, on_modules, on_numba, on_references
from families import build
from policies import Everyone
from properties import examples
from router_files import a_file
from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.cache.prefill_buffers import STEP
from TIDE.engine.cache.slots import AT_ONCE
from TIDE.engine.loop import Loop
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.schedule.draft_planner import DraftPlanner
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.slots.drafter import SlotDrafter
from TIDE.engine.slots.launcher import RoundLauncher
from TIDE.kernels.reference import layers as reference
from TIDE.routing.policies import policy_for
from TIDE.stats import ExitStats

pytestmark = pytest.mark.invariant(3)

NEW, PROMPT = 12, 24
VOCAB = 12  # so few tokens that random heads are right now and then
COUNTS = [field.name for field in fields(ExitStats) if field.name != "seconds"]
SCRIPT = [2, 0, 4, 1, 7, 0, 0, 3]
HEADS = pytest.mark.parametrize(("strategy", "depth"), [("memory", 0), ("memory", 2), ("identity", 2), ("lens", 2)])
lengths_of_rounds = st.lists(st.sampled_from([0, 0, 1, 2, 3, 4, 7]), min_size=1, max_size=9)


@functools.cache
def runners() -> dict:
    """On one model, which stays open to them."""
    adapter = ModelAdapter(build("llama", vocab_size=VOCAB))
    return {make.__name__: make(adapter) for make in (on_modules, on_numba, on_references)}


@functools.cache
def prompt(rows: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(0))


@functools.cache
def text() -> list[int]:
    """What the model writes, and a little more than is asked for."""
    runner = runners()["on_modules"]
    (row,) = in_a_loop(runner, None, prompt(), NEW + 20, Script([0]))
    return row.tokens


@functools.cache
def policy_of(strategy: str, depth: int, seed: int, runner: str, vocabulary: range | None = None):
    """Random heads that are right now and then, as a runner has them."""
    ids = None if vocabulary is None else torch.tensor(vocabulary)
    found = runners()[runner]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIDE_BACKEND", "numba" if runner == "on_numba" else "modules")
        return policy_for(a_file(found.adapter.model, strategy, (depth,), 0.0, ids, seed), found.adapter, found.head)


class Fixed(Everyone):
    """Drafts the model's text, with wrong tokens at some positions."""

    weighs = True  # as exits of router files do; draft lengths are given

    def __init__(self, depth: int, wrong: frozenset[int]) -> None:
        super().__init__(depth)
        self.wrong = wrong

    def predict(self, candidates, head):
        logits = torch.zeros_like(head(candidates.states))
        for index, position in enumerate(candidates.positions):
            logits[index, token_at(position + 1, self.wrong)] = 5.0
        return logits


def token_at(position: int, wrong: frozenset[int]) -> int:
    return (text()[position] + (position in wrong)) % VOCAB


def counts(row: Row, *but: str) -> dict:
    return {name: getattr(row.stats, name) for name in COUNTS if name not in but}


def depths(row: Row) -> list[int]:
    return [decided.depth for decided in row.decided]


def check_same(found: Row, expected: Row, *but: str, scores: float | None = None) -> None:
    """Tokens, decided depths and all counts but some are equal; scores, if both have them, almost."""
    assert found.tokens == expected.tokens
    assert depths(found) == depths(expected)
    assert counts(found, *but) == counts(expected, *but)
    assert [one.score is None for one in found.decided] == [one.score is None for one in expected.decided]
    if scores is not None:
        pairs = zip(found.decided, expected.decided, strict=True)
        assert all(one.score is None or abs(one.score - other.score) < scores for one, other in pairs)


def on_host(lengths, policy, runner: str = "on_modules", **config) -> Row:
    (row,) = in_a_loop(runners()[runner], policy, prompt(), NEW, Script(lengths), max_pending=7, **config)
    return row


def on_device(lengths, policy, within: bool = True, **config) -> Row:
    script = Script(lengths, within)
    (row,) = in_a_loop(
        runners()["on_references"], policy, prompt(), NEW, script, device=True, max_pending=7, draft_tree=0, **config
    )
    return row


@contextmanager
def drafting(wrong: frozenset[int]):
    """Rounds on a device draft the model's text too, with wrong tokens at some positions."""

    def draft(self, step, most):
        if self.depth:
            self.shallow(slice(step, step + 1), most)
        at = int(self.slots.grid.starts[step, 0]) + 1
        self.slots.chain.tokens[step + 1] = token_at(at, wrong) if at < len(text()) else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotDrafter, "draft", draft)
        yield


@examples(10)
@given(lengths=lengths_of_rounds, wrong=st.frozensets(st.integers(PROMPT, PROMPT + NEW)), depth=st.sampled_from([0, 2]))
@example(lengths=SCRIPT, wrong=frozenset(), depth=0)
@example(lengths=SCRIPT, wrong=frozenset({26, 29, 30, 34}), depth=2)
@example(lengths=[7], wrong=frozenset(), depth=2)
def test_all_loops_do_the_same_with_drafts_that_are_right_or_wrong(lengths, wrong, depth):
    plain = on_host(lengths, Fixed(depth, wrong))
    assert plain.tokens == text()[: PROMPT + NEW]
    check_same(on_host(lengths, Fixed(depth, wrong), "on_numba"), plain)
    with drafting(wrong):
        policy = policy_of("memory", depth, 0, "on_references")
        check_same(on_device(lengths, policy), plain, "layers_run")  # rounds have 0, 2, 4 or 7 drafts, and a row fewer
        ahead = on_device(lengths, policy, within=False, overlap=True)
        check_same(ahead, on_device(lengths, policy, within=False), "layers_run")
        assert ahead.tokens == plain.tokens


@HEADS
@examples(4)
@given(lengths=lengths_of_rounds, seed=st.integers(0, 7))
@example(lengths=SCRIPT, seed=1)
def test_all_loops_do_the_same_with_random_heads(strategy, depth, lengths, seed):
    plain = on_host(lengths, policy_of(strategy, depth, seed, "on_modules"))
    assert plain.tokens == text()[: PROMPT + NEW]
    assert plain.stats.accepted or (lengths, seed) != (SCRIPT, 1)
    scores = {one.depth: one.score for one in plain.decided}
    assert all((score is not None) == (at == depth) and 0 < (score or 0.5) < 1 for at, score in scores.items())
    policy = policy_of(strategy, depth, seed, "on_references")
    check_same(on_device(lengths, policy), plain, "layers_run", scores=1e-4)
    ahead = on_device(lengths, policy, within=False, overlap=True)
    check_same(ahead, on_device(lengths, policy, within=False), "layers_run", scores=1e-6)
    assert ahead.tokens == plain.tokens
    in_8_bits = on_host(lengths, policy_of(strategy, depth, seed, "on_numba"), "on_numba")
    assert in_8_bits.tokens == plain.tokens  # its heads may guess otherwise, and then its rounds are others
    if depths(in_8_bits) == depths(plain):
        check_same(in_8_bits, plain, scores=0.05)


@pytest.mark.parametrize(("threshold", "share"), [(0.0, 1.0), (0.0, 0.4), (0.5, 1.0)])
@pytest.mark.parametrize(
    ("strategy", "depth", "vocabulary"),
    [("memory", 0, None), ("memory", 2, None), ("identity", 2, None), ("lens", 2, None), ("memory", 0, range(0, VOCAB, 2))],
)
def test_mode_fast_does_the_same_on_the_host_and_on_the_device(strategy, depth, vocabulary, threshold, share):
    """Texts end after a round of three exits and a token of the full model, so that nothing is left to catch up with."""
    config = dict(mode="fast", exit_threshold=threshold, max_exit_share=share, max_pending=3)
    rows = []
    for name, device in (("on_modules", False), ("on_references", True)):
        policy = policy_of(strategy, depth, 1, name, vocabulary)
        (row,) = in_a_loop(runners()[name], policy, prompt(), 1 + 4 * 5, Scheduler(), device=device, **config)
        rows.append(row)
    host, device = rows
    always = (threshold, share) == (0.0, 1.0)  # otherwise the device runs drafts that scores then drop
    check_same(device, host, *(() if always else ("layers_run", "catch_ups")), scores=1e-4)
    assert host.stats.exit_rate == 15 / 21 if always else host.stats.exit_rate <= share


@pytest.mark.parametrize(("strategy", "depth"), [("identity", 2), ("lens", 2)])
@examples(5)
@given(drafts=st.integers(0, 4), seed=st.integers(0, 7), rows=st.integers(2, 4))
@example(drafts=3, seed=0, rows=3)
def test_rows_together_do_what_each_does_alone_and_on_the_host(strategy, depth, drafts, seed, rows):
    """Rows draft together but keep what they keep by themselves, so that some end rounds before others."""
    device, host = (policy_of(strategy, depth, seed, name) for name in ("on_references", "on_modules"))
    drafts = min(drafts, 16 // rows - 1)  # a pass has sixteen tokens

    def found(name, policy, ids, **how):
        script = Script([drafts], within=False)
        return in_a_loop(runners()[name], policy, ids, NEW, script, max_pending=7, compaction_threshold=1.0, **how)

    together = found("on_references", device, prompt(rows), device=True)
    ahead = found("on_references", device, prompt(rows), device=True, overlap=True)
    by_the_host = found("on_modules", host, prompt(rows))
    for index, row in enumerate(together):
        (alone,) = found("on_references", device, prompt(rows)[index : index + 1], device=True)
        check_same(row, alone, scores=1e-4)
        check_same(ahead[index], row, "layers_run", scores=1e-4)
        # at the end of a text the host sees that there is no room for another draft
        check_same(by_the_host[index], row, "layers_run", "catch_ups", scores=1e-4)


@pytest.mark.invariant(4)
@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize(("strategy", "depth"), [(None, 0), ("memory", 0), ("memory", 2), ("lens", 2)])
def test_layers_of_rounds_are_counted_when_they_run(strategy, depth, overlap, monkeypatch):
    """Those of a round too that was launched before the text was seen to have ended."""
    runner, ran, run = runners()["on_references"], [], reference.decoder_layer

    def watched(layer, tokens, *rest):
        if any(layer is own for own in runner.layers):  # a memory head has one too
            ran.append(len(tokens.x))
        return run(layer, tokens, *rest)

    monkeypatch.setattr(reference, "decoder_layer", watched)
    policy = None if strategy is None else policy_of(strategy, depth, 1, "on_references")
    row = on_device(SCRIPT, policy, within=False, overlap=overlap)
    padding = -PROMPT % STEP
    assert row.stats.layers_run == sum(ran) - padding * runner.num_layers


@pytest.mark.parametrize(("overlap", "at_once"), [(False, 1), (True, 1), (True, 3), (True, AT_ONCE)])
@pytest.mark.parametrize("strategy", [None, "memory"])
@pytest.mark.parametrize("new", [1, 5, 14])
def test_a_text_without_drafts_takes_as_many_passes_as_it_has_new_tokens(new, strategy, overlap, at_once, monkeypatch):
    """The first of them is chosen from the pass of the prompt, and no round is launched behind the last one."""
    runner, passes, layers = runners()["on_references"], [], TritonRunner.layers_on_slots
    monkeypatch.setattr(Loop, "_pace", lambda self, is_idle, waited: setattr(self, "at_once", at_once))

    def counted(self, slots, span, *given):
        passes.extend([1] * (span.stop == self.num_layers))
        return layers(self, slots, span, *given)

    monkeypatch.setattr(TritonRunner, "layers_on_slots", counted)
    policy = None if strategy is None else policy_of(strategy, 0, 0, "on_references")
    (row,) = in_a_loop(runner, policy, prompt(), new, Script([0]), device=True, overlap=overlap, max_pending=7)
    assert row.tokens == text()[: PROMPT + new]
    assert len(passes) == new
    assert row.stats.layers_run == (PROMPT + new - 1) * runner.num_layers


class Pretended:
    """An event of a device that has done all of its work, or none, at some time."""

    def __init__(self, is_over: bool, seconds: float = 0.0) -> None:
        self.query = lambda: is_over
        self.seconds = seconds

    def elapsed_time(self, other):
        return 1000 * (other.seconds - self.seconds)


@pytest.mark.parametrize("is_over", [True, False])
def test_rounds_take_as_long_as_the_device_says_and_if_it_would_wait_it_gets_some_at_once(is_over, monkeypatch):
    clock, seen, read_later, saw = itertools.count(), [], RoundLauncher.read_later, DraftPlanner.saw
    at_once, needed = [], Loop._needed

    def launched(self, *given):
        return replace(read_later(self, *given), event=Pretended(is_over, 100.0 * next(clock)))

    def noted(self, row, result, round_, seconds):
        seen.append(seconds)
        saw(self, row, result, round_, seconds)

    monkeypatch.setattr(RoundLauncher, "read_later", launched)
    monkeypatch.setattr(DraftPlanner, "saw", noted)
    monkeypatch.setattr(Loop, "_needed", lambda self, *given: at_once.append(needed(self, *given)) or at_once[-1])
    (row,) = in_a_loop(runners()["on_references"], None, prompt(), NEW, Script([0]), device=True, overlap=True)
    assert row.tokens == text()[: PROMPT + NEW]
    assert set(seen) == {None, 100.0} and max(at_once) == (AT_ONCE if is_over else 1)


@functools.cache
def long_text() -> list[int]:
    (row,) = in_a_loop(runners()["on_modules"], None, prompt(), 110, Script([0]))
    return row.tokens


@pytest.mark.parametrize("drafts", [0, 4, 5, 7])
def test_rounds_at_once_stay_within_the_columns_that_attention_is_planned_for(drafts, monkeypatch):
    """Every draft is right, so that rounds write as far ahead as they can."""
    seen, layers, wanted = [], TritonRunner.layers_on_slots, long_text()

    def noted(self, slots, span, states, tokens, most, depths):
        seen.append(int(tokens.positions.max()) - most)
        return layers(self, slots, span, states, tokens, most, depths)

    def draft(self, step, most):
        self.slots.chain.tokens[step + 1] = [*wanted, *[0] * 64][int(self.slots.grid.starts[step, 0]) + 1]

    monkeypatch.setattr(TritonRunner, "layers_on_slots", noted)
    monkeypatch.setattr(SlotDrafter, "draft", draft)
    monkeypatch.setattr(Loop, "_pace", lambda self, is_idle, waited: setattr(self, "at_once", AT_ONCE))
    runner, policy = runners()["on_references"], policy_of("memory", 0, 0, "on_references")
    for columns in range(72, 104, 4):
        for place in ("round", "launcher"):
            monkeypatch.setattr(f"TIDE.engine.slots.{place}.MIN_COLUMNS", columns)
        known = dict(device=True, overlap=True, max_pending=drafts or 7, draft_tree=0)
        (row,) = in_a_loop(runner, policy, prompt(), 80, Script([drafts], within=False), **known)
        assert row.tokens == wanted[: PROMPT + 80]
    assert max(seen) < 0


def test_a_host_that_waits_long_launches_fewer_rounds_at_once():
    loop = Loop(None, None, Scheduler(), overlap=True)
    loop.at_once = 3
    loop._pace(False, waited=0.3)  # less than a third of the time: with two at once the device might wait
    assert loop.at_once == 3
    for expected in (2, 1, 1):
        loop._pace(False, waited=0.9)
        assert loop.at_once == expected


def test_rounds_of_mode_fast_teach_nothing_about_those_of_mode_exact():
    scheduler, policy = Scheduler(), policy_of("lens", 2, 1, "on_references")
    known = dict(device=True, max_pending=3)
    in_a_loop(runners()["on_references"], policy, prompt(), NEW, scheduler, mode="fast", exit_threshold=0.0, **known)
    assert not scheduler.experience.costs.rounds(1) and scheduler.experience.acceptance.share(0) == 1
    in_a_loop(runners()["on_references"], policy, prompt(), NEW, scheduler, **known)
    assert scheduler.experience.costs.rounds(1)
