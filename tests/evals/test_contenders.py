"""The settings of one engine that an evaluation compares."""

from __future__ import annotations

from families import build
from policies import Stopped
from TIDE import TIDE, TIDEConfig
from TIDE.evals.contenders import contenders


def test_exits_in_the_prompt_are_those_of_mode_fast_alone():
    with TIDE(build("llama"), Stopped(2), TIDEConfig(mode="fast", prefill_exits=True)) as engine:
        found = contenders(engine, thresholds=[0.5])
        for one in found:
            with engine.using(one.config, one.exits):
                assert (engine.plan.prompt_pass is not None) == (one.mode == "fast")
    assert [one.name for one in found] == ["off", "exact", "fast 0.5"]


def test_thresholds_that_differ_a_little_have_different_names():
    with TIDE(build("llama"), Stopped(2), TIDEConfig(mode="fast")) as engine:
        found = contenders(engine, ["fast"], [0.5, 0.50000001, 1, 0.99999951])
    assert [one.name for one in found[1:]] == ["fast 0.5", "fast 0.50000001", "fast 1.0", "fast 0.99999951"]
