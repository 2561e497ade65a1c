"""`tide bench`: what is measured, what cannot be, and an engine that lies."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter

import pytest
import torch

from families import LAYERS, build
from policies import Everyone, Stopped, Where
from TIDE import TIDE, TIDEConfig
from TIDE.bench import contenders, energy
from TIDE.bench.arrivals import Arrivals, percentile
from TIDE.bench.benchmark import Benchmark
from TIDE.bench.contenders import NAMES, groups
from TIDE.bench.layer_count import timed_wrong
from TIDE.disturbance import Load
from TIDE.stats import ExitStats

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12], [20, 21, 22, 23]]
FAST = TIDEConfig(mode="fast", max_pending=100, max_exit_share=1.0)


@pytest.fixture(autouse=True)
def own_layers(monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "modules")  # nothing to compile


@pytest.fixture
def endless(llama):
    llama.generation_config.eos_token_id = None
    return llama


def measured(engine, names, prompts=PROMPTS[:1], **settings):
    return Benchmark(engine, prompts, names, **dict(max_new_tokens=12, rounds=1) | settings).run()


def row(results, name):
    (found,) = [own for own in results.as_dict()["contenders"] if own["contender"] == name]
    return found


def test_every_contender_is_measured_or_named_with_a_reason(endless):
    with TIDE(endless, Everyone(1)) as engine:
        found = measured(engine, [name for name in NAMES if name != "compiled"], max_new_tokens=6, rounds=3).as_dict()
    assert {own["contender"] for own in found["contenders"]} | {*found["absent"]} == {*NAMES} - {"compiled"}
    rows = {own["contender"]: own for own in found["contenders"]}
    assert {"generate", "early-exit", "lookup", "off", "exact", "fast"} <= {*rows}
    for name, own in rows.items():
        assert own["tokens_per_second"] > 0 and own["new_tokens"] == 6, name
        if name != "continuous":  # which does not stream
            assert own["first_token_seconds"] > 0 and own["token_seconds_p95"] >= own["token_seconds_p50"] > 0
        assert name == "fast" or own["same_texts"] == 1, name
    early = rows["early-exit"]  # on a busy machine there may be time for one setting only
    assert early["setting"].startswith("layer ") and early["setting"] in early["tried"]
    assert rows["generate"]["layers_per_token"] == LAYERS and rows["off"]["layers_as_reported"] is True
    assert found["without_joules"].startswith("joules are counted on NVIDIA cards")


def test_mode_fast_shows_no_drafts_accepted_since_it_checks_none(endless):
    with TIDE(endless, Everyone(1), FAST) as engine:
        found = measured(engine, ["exact", "fast"])
    assert found.measured["fast"].stats.drafted > 0
    assert row(found, "fast")["acceptance"] is None and row(found, "exact")["acceptance"] is not None


def test_rows_are_continued_together_and_drafting_of_transformers_is_named(endless):
    with TIDE(endless) as engine:
        found = measured(engine, ["generate", "lookup", "off", "exact"], PROMPTS, rows=2)
    assert found.groups == 2 and row(found, "off")["new_tokens"] == 2 * 2 * 12
    assert row(found, "off")["same_texts"] == row(found, "off")["texts"] == 4
    assert found.absent["lookup"] == "transformers drafts for one row at a time, found 2 rows"
    assert found.absent["exact"].startswith("it needs exits, found none")
    assert "lookup: not measured: transformers drafts" in found.table()


def test_a_contender_that_breaks_later_keeps_what_it_measured(endless, monkeypatch):
    made, calls = contenders.make, []

    def breaking(name, engine, rows):
        contender = made(name, engine, rows)
        if name != "off":
            return contender
        run = contender.variants[""]

        def breaks(asked, streamer):
            calls.append(asked)
            if len(calls) > 4:
                raise RuntimeError("out of luck")
            return run(asked, streamer)

        return contenders.Contender(name, contender.title, {"": breaks})

    monkeypatch.setattr("TIDE.bench.benchmark.make", breaking)
    with TIDE(endless) as engine:
        found = measured(engine, ["generate", "off"], PROMPTS[:2])
    assert found.absent == {"off": "RuntimeError: out of luck"}
    assert row(found, "off")["groups"] == 1 and row(found, "generate")["groups"] == 2


class SlowSettings:
    """A contender whose settings take turns of a second by the clock, whatever runs."""

    def __init__(self, monkeypatch, settings, seconds):
        self.now, self.ran = 0.0, []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        self.contender = contenders.Contender("lookup", "lookup", {name: self.run(name) for name in settings}, streams=False)
        self.contender = dataclasses.replace(self.contender, is_counted=False)
        self.seconds = seconds
        monkeypatch.setattr("TIDE.bench.benchmark.make", lambda name, engine, rows: self.contender)

    def run(self, name):
        def run(asked, streamer):
            self.ran.append(name)
            self.now += self.seconds[name]
            return torch.zeros(1, asked.width + asked.max_new_tokens, dtype=torch.long)

        return run


@pytest.mark.parametrize(("rounds", "tried", "words"), [(1, 1, "no time for b, c"), (3, 3, "the fastest of a, b, c")])
def test_choosing_a_setting_takes_no_longer_than_measuring_it(endless, monkeypatch, rounds, tried, words):
    slow, said = SlowSettings(monkeypatch, "abc", {"a": 1.0, "b": 0.9, "c": 0.8}), []
    with TIDE(endless) as engine:
        found = Benchmark(engine, PROMPTS[:1], ["lookup"], max_new_tokens=4, rounds=rounds, say=said.append).run()
    own = found.measured["lookup"]
    choosing = slow.ran[1 : len(slow.ran) - rounds]
    assert len(own.tried) == tried and own.setting == min(own.tried, key=own.tried.get)
    assert sum(slow.seconds[name] for name in choosing) <= rounds * slow.seconds["a"]
    assert any(words in line for line in said), said


def test_progress_is_printed_before_each_step(endless):
    said = []
    with TIDE(endless) as engine:
        Benchmark(engine, PROMPTS[:1], ["generate", "lookup", "off"], max_new_tokens=4, rounds=1, say=said.append).run()
    lines = [line for line in said if not line.startswith("lookup: ")]
    assert lines == ["warming up: generate", "warming up: lookup", "warming up: off", "counting layers"]


def test_other_programs_that_ran_meanwhile_are_named_under_the_table(endless, monkeypatch):
    busy = Load(2, 1.0, 1.1, 0.9, 0.8)
    monkeypatch.setattr("TIDE.bench.benchmark.since", lambda before: busy)
    with TIDE(endless) as engine:
        found = measured(engine, ["generate", "off"], rounds=2)
    line = "off: 2 of 2 timed runs were disturbed: at worst, other programs used 0.9 of 2 CPUs."
    assert line in found.table().splitlines() and line in found.as_dict()["disturbed"]


def test_results_are_kept_group_by_group(endless):
    kept = []
    with TIDE(endless) as engine:
        Benchmark(engine, PROMPTS, ["off"], max_new_tokens=3, rounds=1, after_group=lambda r: kept.append(r.as_dict())).run()
    assert [own["contenders"][0]["groups"] for own in kept] == [1, 2, 3] and json.dumps(kept)


class LayerClock:
    """A clock on which a pass through a layer takes two milliseconds and all else next to nothing, so that speed is the number
    of passes on any machine."""

    def __init__(self, model):
        self.now = 0.0
        for layer in model.model.layers:
            layer.register_forward_pre_hook(lambda *_: self.pass_by(0.002))

    def pass_by(self, seconds):
        self.now += seconds

    def read(self):
        self.pass_by(1e-6)
        return self.now


def test_an_engine_that_reports_exits_and_runs_all_layers_gains_nothing_and_fails_the_count(endless, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", LayerClock(endless).read)
    with TIDE(endless, Everyone(1), FAST) as engine:
        honest = measured(engine, ["off", "fast"], max_new_tokens=16)
    assert row(honest, "fast")["speedup"] > 1.3 and honest.wrong_layers == {}
    assert row(honest, "fast")["layers_per_token"] == pytest.approx(1.0) and row(honest, "fast")["tokens_per_pass"] == 16

    count = ExitStats.count_token
    nobody = Where(lambda *_: False, 1)
    monkeypatch.setattr(ExitStats, "count_token", lambda self, depth, step=1: count(self, 1, step))
    with TIDE(endless, nobody, FAST) as engine:
        lying = measured(engine, ["off", "fast"], max_new_tokens=16)
    told = row(lying, "fast")
    assert told["exit_rate"] == 1.0 and told["mean_depth"] == 1.0  # what it says
    assert told["speedup"] < 1.2 and told["tokens_per_pass"] == 1.0 and told["layers_per_token"] == LAYERS  # what it does
    assert told["layers_as_reported"] is False and "the last layer ran 16 times, for 0 tokens" in lying.wrong_layers["fast"]
    assert "FAILED" in lying.table() and "fast: layers did NOT run as reported" in lying.table()


@pytest.mark.parametrize("name", ["off", "exact", "fast"])
@pytest.mark.parametrize("with_drafts", [False, True])
def test_an_engine_that_reports_exits_only_where_nobody_counts_fails_the_count(endless, monkeypatch, name, with_drafts):
    count, nobody = ExitStats.count_token, Where(lambda *_: False, 1)

    def lies(self, depth, step=1):
        hooked = any(layer._forward_hooks for layer in endless.model.layers)
        count(self, depth if hooked else 1, step)
        self.drafted_by_step[step] += with_drafts and not hooked

    with TIDE(endless, nobody, FAST) as engine:
        assert measured(engine, [name], max_new_tokens=16).wrong_layers == {}
        monkeypatch.setattr(ExitStats, "count_token", lies)
        found = measured(engine, [name], max_new_tokens=16)
    assert row(found, name)["layers_as_reported"] is False and "FAILED" in found.table()
    assert "timed: 16 of 16 tokens were reported as exits" in found.wrong_layers[name]


def test_reports_of_timed_runs_have_to_agree_with_the_layer_count():
    def told(exits, layers, depth=0, drafted=8):
        return ExitStats(4, 12, Counter({depth: exits}), 12 - exits, layers, drafted_by_step=Counter({1: drafted}))

    assert timed_wrong(told(0, 64), told(0, 64), "off", 5) is None
    assert "48 (layer, token) pairs were reported, 64 are needed" in timed_wrong(told(0, 48), told(0, 64), "off", 5)
    assert timed_wrong(told(8, 80), told(2, 66), "exact", 5) is None, "drafts follow the clock"
    assert "64 are needed" in timed_wrong(told(8, 60), told(8, 66), "exact", 5)
    assert timed_wrong(told(8, 40), told(6, 44), "fast", 5) is None, "scores at the threshold"
    assert "counted 2 with 3.5" in timed_wrong(told(8, 40), told(2, 44), "fast", 5)
    assert "mean depth 2.0, counted 8 with 3.3" in timed_wrong(told(8, 40), told(8, 44, depth=2), "fast", 5)
    assert "8 of 12 tokens were reported as exits, of 3 drafts" in timed_wrong(told(8, 80, drafted=3), told(8, 80), "exact", 5)


def test_an_engine_that_reports_fewer_layers_than_ran_fails_the_count(endless, monkeypatch):
    monkeypatch.setattr(ExitStats, "__getattribute__", _halved)
    with TIDE(endless) as engine:
        found = measured(engine, ["off"])
    assert "(layer, token) pairs ran" in found.wrong_layers["off"]


def _halved(self, name):
    value = object.__getattribute__(self, name)
    return value // 2 if name == "layers_run" else value


def test_tokens_that_arrive_together_share_the_time_before_them(monkeypatch):
    now = iter([0.0, 0.1, 0.5, 0.8, 0.80001, 0.9])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    arrivals = Arrivals()
    arrivals.put(torch.tensor([[1, 2, 3]]))  # the prompt
    arrivals.put(torch.tensor([4]))
    arrivals.put(torch.tensor([[5, 6]]))  # two of one row
    arrivals.put(torch.tensor([7, 8]))  # one of two rows, at the same moment
    arrivals.put(torch.tensor([9]))
    assert arrivals.first == 0.5
    assert arrivals.gaps == pytest.approx([0.1, 0.1, 0.1, 0.1], abs=1e-4)
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([3.0, 1.0, 2.0], 0.95) == 3.0 and percentile([], 0.5) is None


def test_texts_end_at_their_end_token(llama):
    llama.generation_config.eos_token_id = [2, 9]
    (asked,) = groups([[5, 6], [7]], 2, 4, llama)
    assert asked.texts(torch.tensor([[5, 6, 3, 9, 0, 0], [0, 7, 3, 3, 3, 3]])) == [[3, 9], [3, 3, 3, 3]]


def test_joules_come_from_nvml(monkeypatch):
    class Library:
        nvmlInit_v2 = staticmethod(lambda: 0)
        nvmlDeviceGetHandleByUUID = staticmethod(lambda name, handle: 0)

        @staticmethod
        def nvmlDeviceGetTotalEnergyConsumption(handle, found):
            found._obj.value = 2500
            return 0

    card = type("Card", (), {"uuid": "1-2"})
    monkeypatch.setattr(energy.ctypes, "CDLL", lambda name: Library)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    meter = energy.EnergyMeter(torch.device("cuda"))
    assert meter.why_not is None and meter.joules() == 2.5
    monkeypatch.setattr(Library, "nvmlInit_v2", staticmethod(lambda: 12))
    refused = energy.EnergyMeter(torch.device("cuda"))
    assert refused.joules() is None and refused.why_not == "NVML refuses the card GPU-1-2 (error 12)"


@pytest.mark.parametrize("family", ["gpt_neox", "opt"])
def test_early_exit_is_absent_where_the_model_runs_all_layers_and_nothing_else_suffers(family):
    model = build(family)
    model.generation_config.eos_token_id = None
    with TIDE(model) as engine:
        found = measured(engine, ["generate", "early-exit", "lookup", "off"])
    assert model.config.num_hidden_layers == LAYERS
    assert {*found.absent} == {"early-exit"} and "runs all of its layers" in found.absent["early-exit"]
    assert [own.name for own in found.timed] == ["generate", "lookup", "off"]


def test_an_early_exit_that_breaks_leaves_the_layer_count_as_it_was(endless, monkeypatch):
    def breaks(self, *args, **kwargs):
        raise IndexError("inside a draft")

    monkeypatch.setattr("transformers.generation.candidate_generator.AssistedCandidateGenerator.get_candidates", breaks)
    with TIDE(endless) as engine:
        found = measured(engine, ["generate", "early-exit", "off"])
    assert endless.config.num_hidden_layers == LAYERS
    assert found.absent == {"early-exit": "IndexError: inside a draft"}
    assert row(found, "generate")["same_texts"] == row(found, "off")["same_texts"] == 1


def test_a_table_says_which_contender_is_first_where_the_first_one_is_lost(endless, monkeypatch):
    made = contenders.make

    def lost(name, engine, rows):
        if name == "generate":
            raise RuntimeError("out of memory")
        return made(name, engine, rows)

    with TIDE(endless) as engine:
        assert "and same text: compared" not in measured(engine, ["generate", "off"]).table()
        monkeypatch.setattr("TIDE.bench.benchmark.make", lost)
        found = measured(engine, ["generate", "off"])
    assert found.as_dict()["first"] == "off"
    assert "x off and same text: compared with TIDE, exits off, since generate was not measured." in found.table()


def test_an_engine_with_exits_in_the_prompt_is_compared_with_all_modes_and_counts_layers_of_new_tokens(endless):
    with TIDE(endless, Stopped(2), TIDEConfig(mode="fast", prefill_exits=True)) as engine:
        found = measured(engine, ["generate", "off", "exact", "fast"], [[*range(5, 30)]])
    assert found.absent == {} and found.wrong_layers == {}
    assert [row(found, name)["same_texts"] for name in ("off", "exact")] == [1, 1]
    assert row(found, "fast")["layers_per_token"] == LAYERS  # no new token exits
    assert found.measured["fast"].stats.settled_tokens == 12  # at the odd places of 25, the last one is even


def test_a_model_of_two_layers_has_one_early_exit_and_one_of_a_single_layer_none():
    for layers in (2, 1):
        model = build("llama", num_hidden_layers=layers)
        model.generation_config.eos_token_id = None
        with TIDE(model) as engine:
            found = measured(engine, ["generate", "early-exit"])
        if layers == 2:
            assert found.absent == {} and row(found, "early-exit")["setting"] == "layer 1"
        else:
            assert found.absent == {"early-exit": "the model has one layer: there is nothing to exit from"}


def test_layers_of_an_early_exit_leave_out_both_passes_over_the_prompt(endless, monkeypatch):
    monkeypatch.setattr("TIDE.bench.contenders.exit_layers", lambda layers: [2])
    with TIDE(endless) as engine:
        short, long = (measured(engine, ["early-exit"], [[7] * n], max_new_tokens=4).measured["early-exit"] for n in (1, 41))
    for own in (short, long):
        drafts, passes = own.layers.drafted, own.layers.new_tokens - own.layers.accepted
        most = 2 * (drafts + passes) + LAYERS * (drafts + passes - 1)  # drafting, and checking drafts and their own token
        assert own.layers.per_token * (own.layers.new_tokens - 1) <= most
