"""What the stats of a request say is what happened: counted beside the engine, by hooks and by policies that keep a list."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest
import torch

from policies import Everyone, Knowing, texts_of
from TIDE import TIDE, ExitStats, TIDEConfig
from TIDE.stats import Seconds

PROMPT, NEW = 6, 13
PARTS = ("prompt", "shallow", "exits", "deep", "choosing")
OPTIONS = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)


@pytest.fixture
def ids():
    return torch.randint(3, 128, (1, PROMPT), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def text(llama, ids):
    return llama.generate(ids, **OPTIONS)[0].tolist()


class Wrong(Everyone):
    """Drafts the token after the right one of the vocabulary."""

    def __init__(self, text: list[int], *checkpoints: int) -> None:
        super().__init__(*checkpoints)
        self.text = text

    def predict(self, candidates, head):
        logits = torch.zeros_like(head(candidates.states))
        for index, position in enumerate(candidates.positions):
            logits[index, (self.text[position + 1] + 1) % logits.shape[1]] = 5.0
        return logits


class Log(Knowing):
    """Notes every draft as (position, token), among the deep passes that a hook on the last layer notes as their tokens."""

    def __init__(self, model, text: list[int], seed: int) -> None:
        super().__init__([text], (1, 3), seed, leaves=0.8, right=0.6)
        self.events: list[tuple[int, int] | int] = []
        model.model.layers[-1].mlp.register_forward_hook(lambda module, args, out: self.events.append(args[0].shape[1]))

    def predict(self, candidates, head):
        logits = super().predict(candidates, head)
        self.events.append((candidates.positions[0], int(logits.argmax())))
        return logits

    def counts(self, text: list[int]) -> ExitStats:
        """What these events come to, given the text of the full model."""
        found, drafts = ExitStats(4), []
        for event in self.events[1:]:  # the first is the prompt's pass
            if isinstance(event, tuple):
                drafts.append(event)
                found.drafted_by_step[len(drafts)] += 1
                continue
            right = [token == text[position + 1] for position, token in drafts]
            good = right.index(False) if False in right else len(right)
            found.accepted_by_step.update(range(1, good + 1))
            found.catch_ups += event > 1
            found.rollbacks += good < len(right)
            found.rejected += len(right) - good
            drafts = []
        assert not drafts
        return found


def counts(stats: ExitStats) -> tuple:
    return stats.drafted_by_step, stats.accepted_by_step, stats.catch_ups, stats.rollbacks, stats.rejected


def test_drafts_that_are_always_right(llama, ids, text):
    """One token with the prompt, then three rounds of three drafts and a token of the full model."""
    with TIDE(llama, Knowing([text], (1,), 0, leaves=1, right=1), TIDEConfig(max_pending=3)) as engine:
        engine.generate(ids, **OPTIONS)
    assert counts(engine.last_stats) == ({1: 3, 2: 3, 3: 3}, {1: 3, 2: 3, 3: 3}, 3, 0, 0)
    assert engine.last_stats.acceptance_by_step == {1: 1, 2: 1, 3: 1}


def test_drafts_that_are_never_right(llama, ids, text):
    """Rounds of 3, 3, 2 and 1 drafts, as long as there is room in the text; the last of a full text is not run deep."""
    with TIDE(llama, Wrong(text, 1), TIDEConfig(max_pending=3)) as engine:
        engine.generate(ids, **{**OPTIONS, "max_new_tokens": 5})
    assert counts(engine.last_stats) == ({1: 4, 2: 3, 3: 2}, {}, 3, 4, 9)
    assert set(engine.last_stats.acceptance_by_step.values()) == {0}


@pytest.mark.parametrize("seed", range(4))
def test_drafts_that_are_right_at_random(llama, ids, text, seed):
    policy = Log(llama, text, seed)
    with TIDE(llama, policy) as engine:
        assert engine.generate(ids, **OPTIONS)[0].tolist() == text
    assert counts(engine.last_stats) == counts(policy.counts(text))
    assert engine.last_stats.rollbacks > 0


class ByText(Everyone):
    """Leaves and is right or wrong by the text alone: the same for a row wherever it stands in a batch."""

    def __init__(self, texts: list[list[int]], *checkpoints: int) -> None:
        super().__init__(*checkpoints)
        self.texts = texts

    def score(self, candidates):
        return torch.tensor([float(self._hash(*place) % 4 > 0) for place in self._places(candidates)])

    def predict(self, candidates, head):
        logits = torch.zeros_like(head(candidates.states))
        for index, (text, position) in enumerate(self._places(candidates)):
            wrong = self._hash(text, position) % 5 == 0
            logits[index, (text[position + 1] + wrong) % logits.shape[1]] = 5.0
        return logits

    def _places(self, candidates):
        return [(self.texts[row], at) for row, at in zip(candidates.rows, candidates.positions, strict=True)]

    @staticmethod
    def _hash(text: list[int], position: int) -> int:
        return 31 * text[0] + 7 * position + text[position]


def all_counts(stats: ExitStats, *but: str) -> dict:
    names = [field.name for field in fields(stats) if field.name not in ("seconds", *but)]
    return {name: getattr(stats, name) for name in names}


@pytest.mark.parametrize("exits", [True, False], ids=["exits", "exits off"])
@pytest.mark.parametrize("backend", ["modules", "numba"])
def test_counts_are_the_sum_over_rows_and_each_rows_are_those_of_the_row_alone(llama, prompts, backend, exits, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", backend)
    (ids, mask), config = prompts, TIDEConfig(max_pending=4, compaction_threshold=1.0)  # rows do not wait for each other
    texts = texts_of(llama.generate(ids, attention_mask=mask, **OPTIONS), mask)
    with TIDE(llama, ByText(texts, 1, 3) if exits else None, config) as engine:
        engine.generate(ids, attention_mask=mask, **OPTIONS)
        rows = engine.last_rows
        assert engine.runner.name == backend
        assert all_counts(engine.last_stats) == all_counts(sum((row.stats for row in rows), start=ExitStats(4)))
    stats = engine.last_stats
    assert stats.drafted == stats.accepted + stats.rejected and stats.accepted == stats.exited_tokens
    assert min(stats.accepted, stats.rollbacks, stats.catch_ups) > 0 or not exits
    for row, text, padding in zip(rows, texts, (mask == 0).sum(1).tolist(), strict=True):
        with TIDE(llama, ByText([text], 1, 3) if exits else None, config) as engine:
            engine.generate(ids[row.index : row.index + 1, padding:], **OPTIONS)
        (alone,) = engine.last_rows
        assert row.tokens == alone.tokens and row.decided == alone.decided
        assert all_counts(row.stats, "layers_run") == all_counts(alone.stats, "layers_run")
        assert row.stats.layers_run >= alone.stats.layers_run  # batch padding is work too
        assert backend == "modules" or row.stats.layers_run == alone.stats.layers_run + 4 * padding  # of the prompts


def test_rows_share_the_seconds_of_their_request(llama, prompts):
    ids, mask = prompts
    with TIDE(llama) as engine:
        engine.generate(ids, attention_mask=mask, **OPTIONS)
    assert all(row.stats.seconds is engine.last_stats.seconds for row in engine.last_rows)
    assert engine.last_stats.seconds.whole > 0


def test_mode_fast_counts_steps_and_takes_nothing_back(llama, ids):
    with TIDE(llama, Everyone(1), TIDEConfig(mode="fast", max_pending=3)) as engine:
        engine.generate(ids, **OPTIONS)
    assert counts(engine.last_stats) == ({1: 3, 2: 3, 3: 3}, {1: 3, 2: 3, 3: 3}, 3, 0, 0)
    with TIDE(llama, Everyone(1), TIDEConfig(mode="fast", max_pending=3, kv_cache_strategy="zero_pad")) as engine:
        engine.generate(ids, **OPTIONS)
    assert engine.last_stats.catch_ups == 0


def test_without_exits_nothing_is_caught_up(llama, ids):
    with TIDE(llama) as engine:
        engine.generate(ids, **OPTIONS)
    assert counts(engine.last_stats) == ({}, {}, 0, 0, 0)


def parts(seconds: Seconds) -> list[float]:
    return [getattr(seconds, part) for part in PARTS]


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_every_part_takes_time_and_together_they_are_no_more_than_the_whole(llama, ids, mode):
    with TIDE(llama, Everyone(1), TIDEConfig(mode=mode)) as engine:
        began = time.perf_counter()
        engine.generate(ids, **OPTIONS)
        elapsed = time.perf_counter() - began
    seconds = engine.last_stats.seconds
    assert min(parts(seconds)) > 0
    assert sum(parts(seconds)) <= seconds.whole <= elapsed
    assert engine.last_stats.tokens_per_second == NEW / seconds.whole


NAP = 0.03


def nap(*_: object) -> None:
    time.sleep(NAP)


class Sleepy(Knowing):
    def score(self, candidates):
        nap()
        return super().score(candidates)


class SleepyProcessor:
    def __call__(self, ids, scores):
        nap()
        return scores


@pytest.mark.parametrize("part", PARTS)
def test_time_is_given_to_the_part_that_takes_it(llama, ids, text, part):
    """It naps in one place: one prompt, then three rounds of three drafts and a token of the full model."""
    kind = Sleepy if part == "exits" else Knowing
    options = dict(OPTIONS)
    if part in ("prompt", "shallow", "deep"):
        layer = llama.model.layers[-1 if part == "deep" else 0]
        layer.register_forward_hook(
            lambda module, args, out: nap() if (args[0].shape[1] == PROMPT) == (part == "prompt") else None
        )
    if part == "choosing":
        options["logits_processor"] = [SleepyProcessor()]
    leaves = 0 if part == "choosing" else 1
    with TIDE(llama, kind([text], (1,), 0, leaves=leaves, right=1), TIDEConfig(max_pending=3)) as engine:
        engine.generate(ids, **options)
    seconds = engine.last_stats.seconds
    naps = {"prompt": 1, "shallow": 12, "exits": 9, "deep": 3, "choosing": 12}[part]
    assert getattr(seconds, part) >= naps * NAP


def test_the_time_of_a_reader_is_not_the_engines(llama, ids):
    with TIDE(llama, Everyone(1)) as engine:
        began = time.perf_counter()
        for _ in engine.stream(ids, **OPTIONS):
            nap()
        elapsed = time.perf_counter() - began
    seconds = engine.last_stats.seconds
    assert sum(parts(seconds)) <= seconds.whole <= elapsed - NEW * NAP


def test_totals_are_the_sum_of_all_requests(llama, ids, prompts):
    with TIDE(llama, Everyone(1, 3)) as engine:
        assert engine.total_stats == ExitStats(4)
        found = []
        engine.generate(ids, **OPTIONS)
        found.append(engine.last_stats)
        engine.generate(prompts[0], attention_mask=prompts[1], **OPTIONS)
        found.append(engine.last_stats)
        list(engine.stream(ids, **OPTIONS))
        found.append(engine.last_stats)
        engine(ids)
        found.append(engine.last_stats)
        assert engine.total_stats == sum(found, start=ExitStats(4))
        assert engine.total_stats.total_tokens == NEW + 3 * NEW + NEW + PROMPT


def test_totals_have_streams_that_are_going_on_or_were_broken_off(llama, ids):
    with TIDE(llama, Everyone(1), TIDEConfig(max_pending=1)) as engine:
        first = engine.stream(ids, **OPTIONS)
        (one,) = (row.stats for row in engine.last_rows)
        assert engine.total_stats.total_tokens == 0
        next(first)
        second = engine.stream(ids, **OPTIONS)
        (two,) = (row.stats for row in engine.last_rows)
        next(second)
        next(first)
        assert one.total_tokens + two.total_tokens == engine.total_stats.total_tokens >= 3
        first.close()
        assert sum(1 for _ in second) == NEW - 1
        assert engine.total_stats == one + two
        assert 2 <= one.total_tokens < NEW == two.total_tokens


class Fails(Everyone):
    def score(self, candidates):
        if candidates.positions[0] > PROMPT + 4:
            raise KeyboardInterrupt
        return super().score(candidates)


@pytest.mark.parametrize("mode", ["exact", "fast"])
def test_totals_have_requests_that_failed(llama, ids, mode):
    """And engine and model are usable afterwards."""
    expected = llama.generate(ids, **{**OPTIONS, "max_new_tokens": 3})
    with TIDE(llama, Fails(1), TIDEConfig(mode=mode, max_pending=2)) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.generate(ids, **OPTIONS)
        broken = engine.last_stats
        assert broken.total_tokens > 0
        assert 0 < sum(parts(broken.seconds)) <= broken.seconds.whole
        assert engine.total_stats == broken
        for write in (llama.generate, engine.generate):
            found = write(ids, **{**OPTIONS, "max_new_tokens": 3})
            assert torch.equal(found, expected) or (mode, write) == ("fast", engine.generate)
        assert engine.total_stats == broken + engine.last_stats


def test_totals_have_calls_that_failed(llama, ids):
    long = ids.repeat(1, 3)
    with TIDE(llama, Fails(1), TIDEConfig(mode="fast")) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine(long)
        assert engine.total_stats == engine.last_stats
        assert engine.total_stats.total_tokens == PROMPT + 5
