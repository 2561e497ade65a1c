"""Tuning: every setting's text is what an engine with that setting writes, timed by turns."""

from __future__ import annotations

import itertools

import pytest
import torch

import TIDE
from families import build
from policies import Where
from TIDE import TIDEConfig
from TIDE.calibration import tune as module
from TIDE.calibration.losses import mismatch, rouge_l
from TIDE.disturbance import Load
from TIDE.prompt_exits.maps import PromptExit


class Graded(Where):
    """Leaves with a score of 0.5 at even positions, of 0.9 at every sixth."""

    def __init__(self, *checkpoints: int) -> None:
        super().__init__(lambda depth, row, position: position % 2 == 0, *checkpoints)

    def score(self, candidates):
        return super().score(candidates) * torch.tensor([0.9 if at % 6 == 0 else 0.5 for at in candidates.positions])


@pytest.fixture
def asked():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 128, (4 + n,), generator=generator).tolist() for n in range(3)]


def written(model, prompt, policy=None, **config) -> tuple[list[int], int]:
    with TIDE.TIDE(model, policy, TIDEConfig(**config)) as engine:
        ids = engine.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :].tolist()
        return ids, engine.last_stats.exited_tokens


def test_every_setting_is_there_once_with_the_figures_of_what_it_writes(llama, asked):
    with TIDE.TIDE(llama, Graded(1)) as engine:
        before = engine.config, engine.policy, engine.plan
        found = TIDE.tune(engine, asked, max_new_tokens=10, thresholds=(0.8, 0.3))
        assert (engine.config, engine.policy, engine.plan) == before
    assert [(row.mode, row.kv_cache_strategy, row.exit_threshold) for row in found.rows] == [
        ("off", "-", None),
        ("exact", "exact", None),
        *(("fast", strategy, t) for strategy in ("exact", "propagate", "zero_pad") for t in (0.8, 0.3)),
    ]
    off, exact, *fast = found.rows
    assert (off.agreement, off.rouge_l, off.exit_rate, off.speedup) == (1, 1, 0, 1)
    assert (exact.agreement, exact.rouge_l) == (1, 1)
    assert any(row.agreement < 1 for row in fast)
    full = [written(llama, prompt)[0] for prompt in asked]
    for row in fast:
        config = dict(mode="fast", exit_threshold=row.exit_threshold, kv_cache_strategy=row.kv_cache_strategy)
        texts = [written(llama, prompt, Graded(1), **config) for prompt in asked]
        pairs = [(ids, own) for (ids, _), own in zip(texts, full, strict=True)]
        assert row.agreement == pytest.approx(1 - sum(itertools.starmap(mismatch, pairs)) / 3)
        assert row.rouge_l == pytest.approx(1 - sum(itertools.starmap(rouge_l, pairs)) / 3)
        assert row.exit_rate == pytest.approx(sum(exited for _, exited in texts) / sum(len(ids) for ids, _ in texts))
        assert row.speedup == pytest.approx(row.tokens_per_second / off.tokens_per_second)


def test_settings_take_turns_and_seconds_are_those_of_the_clock(llama, asked, monkeypatch):
    order = []
    clock = itertools.count()
    real = module._written

    def noted(engine, setting, prompt, new_tokens):
        order.append((tuple(prompt), setting.exits, setting.config.mode))
        return real(engine, setting, prompt, new_tokens)

    class Clock:
        perf_counter = staticmethod(lambda: float(next(clock)))  # every setting takes one second for a prompt

    monkeypatch.setattr(module, "_written", noted)
    monkeypatch.setattr(module, "time", Clock)
    with TIDE.TIDE(llama, Graded(1)) as engine:
        found = TIDE.tune(engine, asked, max_new_tokens=10, thresholds=(0.3,), strategies=("exact",))
    off, exact, fast = (False, "exact"), (True, "exact"), (True, "fast")
    turns = [(exits, mode) for _, exits, mode in order[3:]]
    assert turns == [off, exact, fast, exact, fast, off, fast, off, exact]
    assert [prompt for prompt, *_ in order[3:]] == [tuple(prompt) for prompt in asked for _ in range(3)]
    tokens = sum(len(written(llama, prompt)[0]) for prompt in asked)
    assert found.rows[0].tokens_per_second == found.rows[1].tokens_per_second == pytest.approx(tokens / 3)


def test_the_table_has_a_line_for_each(llama, asked):
    with TIDE.TIDE(llama, Graded(1)) as engine:
        found = TIDE.tune(engine, asked[:1], max_new_tokens=4, thresholds=(0.8,), strategies=("propagate",))
    head, _, columns, off, exact, fast = found.table().splitlines()[:6]
    assert "1 prompts, up to 4 new tokens" in head
    assert columns.split()[0] == "mode"
    assert (off.split()[0], exact.split()[0]) == ("off", "exact")
    assert fast.split()[:3] == ["fast", "propagate", "0.8"]
    assert found.as_dict()["rows"][2]["kv_cache_strategy"] == "propagate"


def test_other_programs_that_ran_meanwhile_are_named_under_the_table(llama, asked, monkeypatch):
    loads = iter([Load(2, 1.0, 1.1, others, others) for others in (0.0, 0.0, 0.0, 0.0, 0.9, 0.5)])  # the first half warms up
    monkeypatch.setattr(module, "since", lambda before: next(loads))
    with TIDE.TIDE(llama, Graded(1)) as engine:
        found = TIDE.tune(engine, asked[:1], max_new_tokens=4, thresholds=(0.8,), strategies=("exact",))
    lines = found.table().splitlines()[6:]
    assert lines == list(found.disturbed) == list(found.as_dict()["disturbed"])
    assert lines == [
        "exact: 1 of 1 timed runs were disturbed: at worst, other programs used 0.9 of 2 CPUs.",
        "fast, exact, 0.8: 1 of 1 timed runs were disturbed: at worst, other programs used 0.5 of 2 CPUs.",
        "Measure again when the machine is quiet.",
    ]


def test_a_model_with_running_states_is_tuned_with_what_it_can_do(asked):
    with TIDE.TIDE(build("lfm2"), Graded(1)) as engine:
        found = TIDE.tune(engine, asked[:1], max_new_tokens=4, thresholds=(0.8,))
        assert [row.kv_cache_strategy for row in found.rows] == ["-", "exact", "exact"]
        with pytest.raises(ValueError, match="keep a running state"):
            TIDE.tune(engine, asked[:1], max_new_tokens=4, strategies=("zero_pad",))


class Half(PromptExit):
    """Every second token of a prompt stops at depth 1."""

    depth = 1

    def stops(self, states, positions):
        return torch.tensor([position % 2 == 1 for position in positions])


def test_exits_in_the_prompt_belong_to_mode_fast_alone(llama, asked):
    policy = Graded(1)
    policy.prompt_exit = Half()
    with TIDE.TIDE(llama, policy, TIDEConfig(mode="fast", prefill_exits=True)) as engine:
        found = TIDE.tune(engine, asked[:1], max_new_tokens=4, thresholds=(0.8,), strategies=("exact",))
        assert [row.mode for row in found.rows] == ["off", "exact", "fast"]
        assert found.rows[1].agreement == 1.0
        assert engine.total_stats.settled_tokens > 0


def test_engines_and_settings_that_cannot_be_tuned_are_refused(llama, asked):
    with TIDE.TIDE(llama) as engine, pytest.raises(ValueError, match="no exits to tune. Make it with a router file"):
        TIDE.tune(engine, asked)
    with TIDE.TIDE(llama, Graded(1)) as engine:
        for changes, said in (
            ({"prompts": []}, "no prompts"),
            ({"max_new_tokens": 0}, "max_new_tokens must be"),
            ({"thresholds": (1.5,)}, "exit_threshold must be a number from 0 to 1, found 1.5"),
            ({"strategies": ("magic",)}, "kv_cache_strategy must be one of"),
        ):
            with pytest.raises(ValueError, match=said):
                TIDE.tune(engine, **({"prompts": asked} | changes))
