"""Calibration as a whole, on a tiny model: what comes out works, is the same every time, and is whole or not there."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import closing
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import TIDE
from eagle_heads import config_of, original, tensors_of, write
from families import build
from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration import calibrate as module
from TIDE.calibration import fit
from TIDE.calibration.collect import collecting_seconds
from TIDE.calibration.timing import measure_costs
from TIDE.calibration.work import Work
from TIDE.cli.calibrate import calibrate as command
from TIDE.routing.policies import for_model
from TIDE.routing.source import load_router

SMALL = dict(calibration_samples=20, checkpoint_interval=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def short_answers(monkeypatch):
    """The model writes less than in a quick calibration: half of its time is writing."""
    monkeypatch.setattr(module, "QUICK", replace(module.QUICK, answer=16))


def calibrated(llama, chatty, path, **options):
    config = TIDE.TIDEConfig(**{**SMALL, **options.pop("config", {})})
    return TIDE.calibrate(llama, chatty, path, config, quick=True, epochs=1, **options)


@pytest.mark.parametrize("strategy", ["identity", "lens", "memory"])
def test_one_call_gives_a_file_with_which_the_engine_writes_the_models_text(strategy, llama, chatty, tmp_path):
    before = {name: weight.clone() for name, weight in llama.state_dict().items()}
    classes = [type(module) for module in llama.modules()]
    path = tmp_path / "router.pt"
    file = calibrated(llama, chatty, path, config={"exit_strategy": strategy})
    assert [type(module) for module in llama.modules()] == classes
    assert all(torch.equal(weight, before[name]) for name, weight in llama.state_dict().items())
    assert file.fingerprint is not None
    assert set(file.checkpoints) == set(file.exits), "others would only make it larger"
    assert not list(tmp_path.glob("*.unfinished"))
    ids = torch.tensor([[1, 20, 30, 40, 50]])
    expected = llama.generate(ids, max_new_tokens=16, do_sample=False)
    with TIDE.TIDE(llama, path) as engine:
        assert torch.equal(engine.generate(ids, max_new_tokens=16, do_sample=False), expected)
    for at in file.exits.values():
        assert {"agreement", "auroc", "calibration_error", "coverage"} <= set(at.figures)
    assert {row["draft_length"] for row in file.figures["placement"]} <= {1, 2, 3, 4, 5, 6, 8}


@pytest.mark.usefixtures("short_answers")
def test_exits_in_the_prompt_are_fitted_if_asked_for(llama, chatty, tmp_path):
    path = tmp_path / "router.safetensors"
    file = calibrated(llama, chatty, path, config={"exit_strategy": "identity", "prefill_exits": True})
    assert file.prompt_exit is not None and file.prompt_exit.figures["curve"]
    assert TIDE.RouterFile.load(path).prompt_exit.describe() == file.prompt_exit.describe()
    ids = torch.tensor([[1, *range(20, 50)]])
    with TIDE.TIDE(llama, path, TIDE.TIDEConfig(mode="fast", prefill_exits=True)) as engine:
        engine.generate(ids, max_new_tokens=4, do_sample=False)
        assert (engine.last_stats.settled_tokens > 0) == (file.prompt_exit.threshold is not None)


@pytest.mark.parametrize(("family", "why"), [("bloom", "alone"), ("lfm2", "running state"), ("gemma4-shared", "share")])
def test_a_model_that_cannot_have_exits_in_the_prompt_is_refused_before_any_text(family, why, chatty, tmp_path, monkeypatch):
    monkeypatch.setattr("TIDE.calibration.calibrate.load_texts", lambda *_, **__: pytest.fail("texts were collected"))
    path = tmp_path / "router.safetensors"
    with pytest.raises(ValueError, match=rf"{why}.*Calibrate without prefill_exits"):
        calibrated(build(family), chatty, path, config={"exit_strategy": "identity", "prefill_exits": True})
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.usefixtures("short_answers")
def test_the_same_seed_gives_the_same_file_and_another_seed_another(llama, chatty, tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in "abc"]
    for path, seed in zip(paths, (0, 0, 1), strict=True):
        calibrated(llama, chatty, path, seed=seed, config={"min_layers": 2})
    first, second, other = (path.read_bytes() for path in paths)
    assert first == second
    assert first != other


def test_the_clock_decides_and_the_same_seed_gives_the_same_file_again(llama, chatty, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FULL", replace(module.FULL, answer=16))
    asked, config = [], TIDE.TIDEConfig(calibration_minutes=0.02, calibration_samples=60, min_layers=2, checkpoint_interval=2)
    load_texts, fit_head = module.load_texts, module.fit_head
    monkeypatch.setattr(module, "load_texts", lambda *args: asked.append(args[3]) or load_texts(*args))
    monkeypatch.setattr(module, "fit_head", lambda *args: asked.append(args[4].steps) or fit_head(*args))
    for name in ("a.safetensors", "b.safetensors"):
        TIDE.calibrate(llama, chatty, tmp_path / name, config)
    texts, steps = asked[:2]
    assert 20 <= texts <= 60 and steps >= 1 and asked[:2] == asked[2:], "kept by model, machine and settings"
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_python_takes_the_names_and_the_defaults_of_the_command_line(llama, chatty, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = dict(samples=20, minutes=2, strategy="identity", checkpoint_interval=2)
    file = TIDE.calibrate(llama, chatty, quick=True, epochs=1, **settings)
    assert [path.name for path in tmp_path.glob("router.*")] == ["router.safetensors"]
    assert {field: file.config[field] for field in ("calibration_samples", "calibration_minutes", "exit_strategy")} == {
        "calibration_samples": 20,
        "calibration_minutes": 2,
        "exit_strategy": "identity",
    }
    option = inspect.signature(command, eval_str=True).parameters["output"]
    assert option.default.name == inspect.signature(TIDE.calibrate).parameters["save_path"].default == "router.safetensors"


def test_wrong_names_of_settings_are_refused_before_any_work(llama, chatty, tmp_path):
    for settings, said in (
        (dict(data_set="a.txt"), "there is no setting data_set; did you mean dataset?"),
        (dict(samples=3), "calibration_samples must be a whole number of at least 20, found 3"),
        (dict(dataset="a.txt", config=TIDE.TIDEConfig(calibration_dataset="b.txt")), "dataset or config.calibration_dataset"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            TIDE.calibrate(llama, chatty, tmp_path / "router.safetensors", **settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("minutes", "is_told"), [(3, True), (29, True), (30, False)])
@pytest.mark.parametrize("resume", [False, True])
def test_few_minutes_on_a_cpu_are_said_before_anything_is_measured(
    minutes, is_told, resume, llama, chatty, tmp_path, monkeypatch, caplog
):
    def stopped(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(module._Job, "run", stopped)
    config = TIDE.TIDEConfig(calibration_minutes=minutes, calibration_samples=40)
    with pytest.raises(KeyboardInterrupt):
        TIDE.calibrate(llama, chatty, tmp_path / "router.safetensors", config, resume=resume)
    assert (f"texts to learn from in less than 30 min, found {minutes} min" in caplog.text) == is_told


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["memory", "lens", "eagle3"])
def test_a_quick_calibration_keeps_to_its_minutes_and_is_estimated_before_any_text(
    strategy, llama, chatty, tmp_path, monkeypatch, caplog
):
    """A step of training takes as long as all of the time there is."""
    load_texts, fit_head, seen = module.load_texts, module.fit_head, []
    monkeypatch.setattr(module, "load_texts", lambda *args: seen.append((args[3], caplog.text)) or load_texts(*args))
    monkeypatch.setattr(module, "fit_head", lambda *args: seen.append(args[4].steps) or fit_head(*args))
    monkeypatch.setattr(module, "step_seconds", lambda *args: 60.0)
    with caplog.at_level("INFO"):
        TIDE.calibrate(
            llama, chatty, tmp_path / "a.safetensors", minutes=1, quick=True, strategy=strategy, checkpoint_interval=2
        )
    (texts, said), steps, *_ = seen
    assert texts <= 120 and steps == module.QUICK.schedule.checks
    assert "min on this machine: 20 texts and one head are the least; asked were 1 min" in said


def test_a_calibration_that_fits_says_nothing_of_its_least(llama, chatty, tmp_path, caplog):
    calibrated(llama, chatty, tmp_path / "a.safetensors", config={"exit_strategy": "identity"})
    assert "are the least" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("left", [0.0, 0.001])
def test_no_further_head_is_tried_without_time_for_it(left, llama, chatty, tmp_path, monkeypatch, caplog):
    """The first one is trained in any case."""
    monkeypatch.setattr(module, "FULL", replace(module.FULL, answer=16))
    monkeypatch.setattr("TIDE.calibration.clock.Clock.left", left)
    monkeypatch.setattr(module, "is_worth_going_deeper", lambda tried: True)
    fit_head, titles = module.fit_head, []
    monkeypatch.setattr(module, "fit_head", lambda *args: titles.append(args[6]) or fit_head(*args))
    config = TIDE.TIDEConfig(calibration_minutes=0.01, calibration_samples=20, checkpoint_interval=2)
    with caplog.at_level("INFO"):
        TIDE.calibrate(llama, chatty, tmp_path / "router.safetensors", config)
    assert titles == ["memory head at depth 0"]
    assert "depth 2: not tried, as no time is left for another head" in caplog.text


@pytest.mark.parametrize(("answered", "texts"), [(0, 48), (30, 96), (60, 400)])
def test_the_time_for_answers_to_prompts_of_a_file_is_planned(answered, texts, llama, chatty, tmp_path, monkeypatch):
    """An answer takes a second, and 0.4 of two minutes are for texts."""
    lines = [{"prompt": f"Tell me about {n}, please"} | ({"response": "It is one."} if n < answered else {}) for n in range(60)]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(module, "collecting_seconds", lambda adapter: 0.0)
    monkeypatch.setattr(module, "answering_seconds", lambda *_: float)
    asked = []

    def stopped(*args):
        asked.append(args[3])
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load_texts", stopped)
    source = dict(calibration_dataset=str(tmp_path / "texts.jsonl"), calibration_samples=400, calibration_minutes=2)
    with pytest.raises(KeyboardInterrupt):
        TIDE.calibrate(llama, chatty, tmp_path / "router.safetensors", TIDE.TIDEConfig(**source))
    assert asked == [texts]


@pytest.mark.usefixtures("short_answers")
def test_the_facts_tell_the_schedule_and_the_steps_that_were_run(llama, chatty, tmp_path, monkeypatch):
    fit_head, given = module.fit_head, []
    monkeypatch.setattr(module, "fit_head", lambda *args: given.append(args[4]) or fit_head(*args))
    monkeypatch.setattr(module, "step_seconds", lambda *args: 0.01)
    step, steps = fit._backward, []
    monkeypatch.setattr(fit, "_backward", lambda *args: steps.append(1) or step(*args))
    facts = calibrated(llama, chatty, tmp_path / "a.safetensors", config={"exit_strategy": "lens", "min_layers": 2}).facts
    assert facts["schedule"] == asdict(given[0]) and facts["schedule"]["epochs"] == 3, "three times one, for a lens"
    assert facts["steps"] == {2: len(steps)}


def test_exits_of_other_sizes_are_timed_again(llama, tmp_path, monkeypatch):
    """Two EAGLE-3 heads may differ in all but the model."""
    keys = []
    monkeypatch.setattr(module, "measure_head", lambda adapter, policy, depth, key: keys.append(key) or 1.0)
    with closing(ModelAdapter(llama)) as adapter:
        job = SimpleNamespace(adapter=adapter, key="k", start=SimpleNamespace(strategy="eagle3"))
        for inner in (96, 32):
            tensors, config = tensors_of(inner=inner), config_of("original", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
            file = for_model(load_router(write(tmp_path / str(inner), config, original(tensors))), adapter)
            module._Job._head_seconds(job, file.exits[0], 0, None)
    assert len(set(keys)) == 2


@pytest.mark.parametrize(("lost", "packed"), [(0.001, True), (0.003, False)])
@pytest.mark.usefixtures("short_answers")
def test_heads_are_stored_in_8_bits_unless_that_costs_agreement(llama, chatty, tmp_path, monkeypatch, lost, packed):
    monkeypatch.setattr(
        module._Job, "_agreement_in_8_bits", lambda self, fitted, depth: [one - lost for one in fitted.agreement]
    )
    path = tmp_path / "router.safetensors"
    calibrated(llama, chatty, path, config={"min_layers": 2})
    dtypes = {name: tensor.dtype for name, tensor in load_file(path).items()}
    assert (torch.int8 in dtypes.values()) == packed, dtypes


@pytest.mark.usefixtures("short_answers")
def test_agreement_in_8_bits_is_that_of_the_file(llama, chatty, tmp_path):
    path = tmp_path / "router.safetensors"
    (own,) = calibrated(llama, chatty, path, compress=True, config={"min_layers": 2}).exits.values()
    whole, packed = own.figures["agreement_by_step"], own.figures["agreement_in_8_bits"]
    assert len(packed) == len(whole) == 2 and all(abs(a - b) < 0.1 for a, b in zip(whole, packed, strict=True))


@pytest.mark.usefixtures("short_answers")
def test_interval_and_least_depth_are_obeyed(llama, chatty, tmp_path):
    file = calibrated(
        llama, chatty, tmp_path / "a.pt", config={"checkpoint_interval": 2, "min_layers": 1, "exit_strategy": "identity"}
    )
    assert list(file.exits) == [2]
    with pytest.raises(ValueError, match="no checkpoint is left: every 2 layers from depth 9 on, in a model of 4 layers"):
        calibrated(llama, chatty, tmp_path / "a.pt", config={"min_layers": 9})


@pytest.mark.usefixtures("short_answers")
def test_an_interruption_leaves_no_file_and_resume_goes_on_with_what_was_done(llama, chatty, tmp_path, monkeypatch):
    path = tmp_path / "router.safetensors"
    whole = tmp_path / "whole.safetensors"
    settings = {"exit_strategy": "lens", "checkpoint_interval": 1}
    calibrated(llama, chatty, whole, config=settings)
    fit_router, calls = module.fit_router, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return fit_router(*args)

    monkeypatch.setattr(module, "fit_router", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrated(llama, chatty, path, config=settings)
    assert not path.exists()
    monkeypatch.setattr(module, "fit_router", fit_router)
    monkeypatch.setattr(module, "load_texts", lambda *_: pytest.fail("the texts were there"))
    fit_head, fitted = module.fit_head, []
    monkeypatch.setattr(module, "fit_head", lambda *args: fitted.append(args[3].depth) or fit_head(*args))
    with pytest.raises(ValueError, match=r"begun with other settings \(seed\)"):
        calibrated(llama, chatty, path, seed=3, resume=True, config=settings)
    calibrated(llama, chatty, path, resume=True, config=settings)
    assert not {1, 2} & set(fitted), "two heads were fitted before the interruption"
    assert path.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob("*.unfinished"))
    assert TIDE.TIDE(llama, path).close() is None, "the model was given back"


def test_a_fresh_start_forgets_unfinished_work(tmp_path):
    path = tmp_path / "router.pt"
    Work(path, {"seed": 0}, resume=False).keep_texts([])
    assert Work(path, {"seed": 0}, resume=True).texts() == []
    assert Work(path, {"seed": 0}, resume=False).texts() is None


def test_a_place_that_cannot_be_written_is_refused_before_any_work(llama, chatty, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere to save router.pt in"):
        calibrated(llama, chatty, tmp_path / "nowhere" / "router.pt")
    with pytest.raises(ValueError, match="safetensors"):
        calibrated(llama, chatty, tmp_path / "router.bin")


@pytest.mark.usefixtures("short_answers")
def test_a_model_with_few_learned_positions_is_timed_and_calibrated(plain, tmp_path):
    """Nothing is asked of positions that it does not have: GPT-2's are a table."""
    for positions in (40, 128, 144, 256):
        with closing(ModelAdapter(build("gpt2", n_positions=positions))) as adapter:
            assert collecting_seconds(adapter) > 0
            assert measure_costs(adapter, f"{positions} positions").full_step > 0
    model = build("gpt2", n_positions=40)
    assert calibrated(model, plain, tmp_path / "router.safetensors", config={"exit_strategy": "lens"}).exits
