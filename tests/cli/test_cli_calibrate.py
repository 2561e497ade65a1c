"""`tide calibrate`: a model folder in, a router file out; errors in words."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import TIDE
from families import build
from TIDE.calibration import calibrate as module
from TIDE.cli.app import app

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def folder(tmp_path, chatty, monkeypatch):
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path / "cache"))
    build("llama").save_pretrained(tmp_path / "model")
    chatty.save_pretrained(tmp_path / "model")
    return tmp_path


def tide(folder, *options):
    small = ["--samples", "40", "--quick", "--epochs", "1", "--checkpoint-interval", "2"]
    return CliRunner().invoke(app, ["calibrate", str(folder / "model"), "-o", str(folder / "router.pt"), *small, *options])


def test_a_model_folder_becomes_a_router_file(folder):
    done = tide(folder, "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout.splitlines()[-1])
    file = TIDE.RouterFile.load(folder / "router.pt")
    assert said == file.as_dict()
    assert set(file.exits) <= {0, 2}
    assert file.config["calibration_samples"] == 40


def test_the_exits_of_a_file_are_measured_on_other_prompts(folder):
    assert tide(folder).exit_code == 0
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"What is {n}?", "And then?"]}) + "\n" for n in range(4)))
    script = ROOT / "benchmarks" / "eval_exits.py"
    command = [script, "--router", folder / "router.pt", "--prompts", prompts, "--model", folder / "model", "--answer", "12"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["positions"] > 0
    for exit in report["exits"].values():
        assert exit["steps"][0] == pytest.approx(exit["agreement"], abs=1e-3)


def test_wrong_options_are_said_in_words(folder):
    done = tide(folder, "--strategy", "guess")
    assert done.exit_code == 1
    assert "exit_strategy must be one of" in done.stderr
    done = tide(folder, "--dataset", str(folder / "missing.txt"))
    assert done.exit_code == 1
    assert "missing.txt" in done.stderr
    assert not (folder / "router.pt").exists()


def test_an_interruption_names_the_way_on(folder, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "fit_router", interrupted)
    done = tide(folder)
    assert done.exit_code == 130
    assert "Go on with --resume" in done.stderr
    assert not (folder / "router.pt").exists()
