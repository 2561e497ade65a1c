"""The examples run as they stand, and are short."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from characters import TEMPLATE, characters
from families import build

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PRINTS = {"lossless_check": "drafts stood", "tune_threshold": "tok/s"}


@pytest.mark.real
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem != "any_model"], ids=lambda path: path.stem)
def test_an_example_runs(example, embedded, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    assert PRINTS.get(example.stem, "Total tokens:") in capsys.readouterr().out


def test_any_model_is_calibrated_and_used(tmp_path, capsys, monkeypatch):
    build("llama").save_pretrained(tmp_path / "model")
    characters(TEMPLATE).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["any_model.py", str(tmp_path / "model"), str(tmp_path / "router.safetensors")])
    for _ in range(2):  # the second time the file is there
        runpy.run_path(str(EXAMPLES[0]), run_name="__main__")
        assert "Total tokens: 32" in capsys.readouterr().out


def test_examples_are_short():
    assert [path.name for path in EXAMPLES if len(path.read_text("utf-8").splitlines()) > 40] == []
