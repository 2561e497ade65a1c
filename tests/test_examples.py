"""The examples run as they stand, and are short."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import TIDE
from characters import TEMPLATE, characters
from families import build
from router_files import made

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PRINTS = {"lossless_check": "drafts stood", "tune_threshold": "tok/s"}


@pytest.mark.real
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem != "any_model"], ids=lambda path: path.stem)
def test_an_example_runs(example, embedded, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert PRINTS.get(example.stem, "Total tokens:") in capsys.readouterr().out


def test_any_model_is_calibrated_and_used(tmp_path, capsys, monkeypatch):
    """Calibration itself has its own tests; here a file stands in for what it gives."""
    build("llama").save_pretrained(tmp_path / "model")
    characters(TEMPLATE).save_pretrained(tmp_path / "model")
    router, asked = tmp_path / "router.safetensors", []

    def calibrate(model, tokenizer, save_path, quick):
        asked.append(quick)
        made("memory", model).save(save_path)

    monkeypatch.setattr(TIDE, "calibrate", calibrate)
    monkeypatch.setattr(sys, "argv", ["any_model.py", str(tmp_path / "model"), str(router)])
    for _ in range(2):  # the second time the file is there
        runpy.run_path(str(EXAMPLES[0]), run_name="__main__")
        assert "Total tokens: 32" in capsys.readouterr().out
    assert asked == [True]


def test_examples_are_short():
    assert [path.name for path in EXAMPLES if len(path.read_text("utf-8").splitlines()) > 40] == []
