"""One frozen configuration, validated once, saved and loaded as YAML or JSON."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import re

import pytest

from TIDE import TIDEConfig
from TIDE.config import checked_config, with_short_names


def test_defaults_are_exact_and_leave_the_rest_to_calibration():
    config = TIDEConfig()
    assert (config.mode, config.effective_mode, config.kv_cache_strategy) == (None, "exact", "exact")
    assert config.compaction_threshold == 0.25
    assert config.max_exit_share == 0.9
    assert config.exit_threshold is config.min_layers is config.max_pending is None
    assert (config.checkpoint_interval, config.calibration_samples, config.calibration_dataset) == (4, None, "self")
    assert config.calibration_minutes == 3.0
    assert (config.label, config.convergence_threshold) == ("agreement", 0.98)
    assert (config.router_bottleneck_dim, config.exit_strategy) == (128, "memory")


def test_reference_has_the_values_of_the_original():
    config = TIDEConfig.reference()
    assert (config.mode, config.exit_threshold, config.min_layers) == ("fast", 0.85, 8)
    assert (config.kv_cache_strategy, config.compaction_threshold) == ("zero_pad", 0.25)
    assert config.max_exit_share == 1.0
    assert (config.checkpoint_interval, config.calibration_samples, config.calibration_dataset) == (4, 2000, "wikitext")
    assert (config.label, config.convergence_threshold) == ("cosine", 0.98)
    assert (config.router_bottleneck_dim, config.exit_strategy) == (128, "identity")


def test_it_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TIDEConfig().mode = "fast"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mode", "quick", r"mode must be one of \['exact', 'fast'\], found 'quick'"),
        ("kv_cache_strategy", "drop", "kv_cache_strategy must be one of"),
        ("exit_threshold", 1.5, "exit_threshold must be a number from 0 to 1, found 1.5"),
        ("exit_threshold", "high", "exit_threshold must be a number"),
        ("exit_threshold", float("nan"), "exit_threshold must be a number"),
        ("compaction_threshold", None, "compaction_threshold must be a number"),
        ("compaction_threshold", -0.1, "compaction_threshold must be a number"),
        ("min_layers", -1, "min_layers must be a whole number of at least 0"),
        ("min_layers", 2.0, "min_layers must be a whole number"),
        ("checkpoint_interval", 0, "checkpoint_interval must be a whole number of at least 1, found 0"),
        ("checkpoint_interval", None, "checkpoint_interval must be a whole number"),
        ("calibration_minutes", 0, "calibration_minutes must be a number of minutes above 0, found 0"),
        ("calibration_minutes", float("inf"), "calibration_minutes must be a number of minutes above 0, found inf"),
        ("calibration_samples", 19, "calibration_samples must be a whole number of at least 20, found 19"),
        ("calibration_dataset", " ", 'calibration_dataset must be "self", a data set of the hub or the path'),
        ("calibration_dataset", None, "calibration_dataset must be .* found None"),
        ("label", "loss", r"label must be one of \['agreement', 'cosine'\], found 'loss'"),
        ("convergence_threshold", 1.01, "convergence_threshold must be a number from 0 to 1"),
        ("convergence_threshold", None, "convergence_threshold must be a number"),
        ("router_bottleneck_dim", 0, "router_bottleneck_dim must be a whole number of at least 1"),
        ("exit_strategy", "head", r"exit_strategy must be one of \['identity', 'lens', 'memory', 'eagle3'\], found 'head'"),
        ("max_pending", 0, "max_pending must be a whole number of at least 1"),
        ("max_pending", True, "max_pending must be a whole number"),
        ("draft_tree", -1, "draft_tree must be a whole number of at least 0, found -1"),
        ("draft_tree", 64, "draft_tree must be at most 63, found 64. 0 drafts no trees."),
        ("max_exit_share", 1.1, "max_exit_share must be a number from 0 to 1, found 1.1"),
        ("max_exit_share", None, "max_exit_share must be a number"),
        ("prefill_exits", 0.3, "prefill_exits must be True or False, found 0.3"),
    ],
)
def test_values_out_of_range_are_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        TIDEConfig(**{"mode": "fast", field: value})


@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
def test_a_lossy_strategy_does_not_go_with_exact(strategy):
    with pytest.raises(ValueError, match=r"cannot go with mode='exact'\. Use kv_cache_strategy='exact', or mode='fast'"):
        TIDEConfig(mode="exact", kv_cache_strategy=strategy)


def test_exits_in_the_prompt_do_not_go_with_exact():
    with pytest.raises(ValueError, match=r"cannot go with mode='exact'.*Use prefill_exits=False, or mode='fast'"):
        TIDEConfig(mode="exact", prefill_exits=True)
    assert TIDEConfig(prefill_exits=True).effective_mode == "fast"


def test_without_a_mode_the_kv_strategy_chooses_it():
    assert TIDEConfig().effective_mode == "exact"
    assert TIDEConfig(kv_cache_strategy="exact", exit_threshold=0.5).effective_mode == "exact"
    assert TIDEConfig(kv_cache_strategy="propagate").effective_mode == "fast"
    assert TIDEConfig(kv_cache_strategy="zero_pad").effective_mode == "fast"
    assert TIDEConfig(mode="fast").effective_mode == "fast"
    assert TIDEConfig(mode="exact").effective_mode == "exact"


@pytest.mark.parametrize("name", ["config.yaml", "config.yml", "config.json"])
def test_a_saved_configuration_is_loaded_again(tmp_path, name):
    config = TIDEConfig(
        mode="fast",
        exit_threshold=0.9,
        min_layers=4,
        checkpoint_interval=2,
        calibration_minutes=1.5,
        calibration_samples=300,
        calibration_dataset="notes.jsonl",
        label="cosine",
        convergence_threshold=0.9,
        router_bottleneck_dim=64,
        exit_strategy="lens",
        kv_cache_strategy="propagate",
        cache_gib=1.5,
        compaction_threshold=0.5,
        max_pending=6,
        max_exit_share=0.5,
        prefill_exits=True,
        draft_tree=15,
    )
    assert not [field.name for field in dataclasses.fields(config) if getattr(config, field.name) == field.default]
    config.save(tmp_path / name)
    assert TIDEConfig.load(tmp_path / name) == config


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "config.json",
            '{"mode": "fast", "depth": 3}',
            r"config.json: there is no setting depth. The settings are mode, exit_th",
        ),
        ("config.json", "{", "cannot be read as a TIDE configuration"),
        ("config.yaml", "mode: [", "cannot be read as a TIDE configuration"),
        ("config.yaml", "- fast", "should hold the fields of TIDEConfig, found list"),
        ("config.toml", "mode = 'fast'", "ends in .yaml, .yml or .json, found 'config.toml'"),
    ],
)
def test_files_that_cannot_be_read_say_why(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        TIDEConfig.load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "exit_treshold",
            "there is no setting exit_treshold; did you mean exit_threshold? The settings are mode, exit_threshold,",
        ),
        ("minutes", "there is no setting minutes; did you mean calibration_minutes? The settings are"),
        ("foo", "there is no setting foo. The settings are mode, exit_threshold, min_layers,"),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_with_those_that_do(name, said, tmp_path):
    with pytest.raises(TypeError, match=re.escape(said)):
        TIDEConfig(**{name: 1})
    (tmp_path / "config.json").write_text(f'{{"{name}": 1}}')
    with pytest.raises(ValueError, match=re.escape(said)):
        TIDEConfig.load(tmp_path / "config.json")


def test_copies_and_the_shown_signature_are_those_of_a_dataclass():
    config = TIDEConfig(mode="fast", max_pending=3)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == dataclasses.replace(config) == config
    assert list(inspect.signature(TIDEConfig).parameters) == [field.name for field in dataclasses.fields(TIDEConfig)]


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"mode": "exact", "max_pending": 2}, "found dict. Use TIDEConfig(mode='exact', max_pending=2)."),
        ("tide.yaml", "found str. Use TIDEConfig.load('tide.yaml')."),
        (3, "found int. Use TIDEConfig(...)."),
        (TIDEConfig, "found type. Use TIDEConfig(...)."),
    ],
)
def test_another_type_as_config_is_refused_with_the_right_call(given, instead):
    with pytest.raises(TypeError, match=re.escape(f"config must be a TIDEConfig, {instead}")):
        checked_config(given)


def test_short_names_set_the_fields_they_stand_for():
    config = TIDEConfig(max_pending=3)
    given = dict(minutes=1, samples=40, dataset="a.txt", strategy="lens", bottleneck=64, min_layers=2)
    assert with_short_names(config, given) == TIDEConfig(
        max_pending=3,
        calibration_minutes=1,
        calibration_samples=40,
        calibration_dataset="a.txt",
        exit_strategy="lens",
        router_bottleneck_dim=64,
        min_layers=2,
    )
    assert with_short_names(config, {"minutes": 3.0, "samples": None}) == config


def test_a_setting_that_is_given_twice_is_refused_by_both_names():
    with pytest.raises(
        TypeError, match=re.escape("expected minutes or config.calibration_minutes, which mean the same, found")
    ):
        with_short_names(TIDEConfig(calibration_minutes=5), {"minutes": 1})


@pytest.mark.parametrize(
    ("name", "meant"), [("minute", "minutes"), ("calibration_minutes", "minutes"), ("data_set", "dataset")]
)
def test_a_short_name_that_does_not_exist_is_refused_with_those_that_do(name, meant):
    with pytest.raises(TypeError, match=f"there is no setting {name}; did you mean {meant}"):
        with_short_names(TIDEConfig(), {name: 1})
