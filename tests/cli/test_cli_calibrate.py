"""`tide calibrate`: a model folder in, a router file out; errors in words."""

from __future__ import annotations

import json

import TIDE
from commands import tide
from eagle_heads import a_head
from TIDE.calibration import calibrate as module

SMALL = ("--samples", 20, "--quick", "--epochs", 1, "--checkpoint-interval", 2, "--strategy", "identity")


def test_a_model_folder_becomes_a_router_file(warm, folder, tmp_path):
    done = warm.tide("calibrate", folder, "-o", tmp_path / "router.pt", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    file = TIDE.RouterFile.load(tmp_path / "router.pt")
    assert json.loads(done.stdout) == file.as_dict()
    assert file.strategy == "identity" and set(file.exits) <= {0, 2}
    assert file.config["calibration_samples"] == 20


def test_training_goes_on_from_a_head(warm, folder, router, tmp_path):
    asked = ("--samples", 20, "--quick", "--epochs", 0.1, "--json")
    done = warm.tide("calibrate", folder, "--from", a_head(tmp_path / "head"), "-o", tmp_path / "new.pt", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["strategy"] == "eagle3"
    done = tide("calibrate", folder, "--from", router, "--strategy", "lens", *asked)
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
    assert f"cannot train on from {router}: it has memory heads and exit_strategy is 'lens'" in done.stderr


def test_an_interruption_names_the_way_on(folder, tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "load_texts", interrupted)
    done = tide("calibrate", folder, "-o", tmp_path / "router.pt", *SMALL)
    assert done.exit_code == 130
    assert done.stderr.endswith(f"\ninterrupted. Nothing was written to {tmp_path / 'router.pt'}. Go on with --resume.\n")
    assert not (tmp_path / "router.pt").exists()


def test_an_unexpected_error_asks_for_a_report(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_texts", lambda *_: {}["texts"])
    asked = ("calibrate", folder, "-o", tmp_path / "router.pt", *SMALL)
    done = tide(*asked)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith("error: KeyError: 'texts'. This should not happen: run again with --debug")
    assert isinstance(tide(*asked, "--debug").exception, KeyError)


def test_a_data_set_needs_its_package_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = tide("calibrate", "some-org/some-model", "--dataset", "wikitext", "-o", tmp_path / "router.pt")
    assert done.exit_code == 1
    assert "pip install 'datasets>=" in done.stderr
