"""The examples run as they stand, and are short."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

import TIDE
from characters import TEMPLATE, characters
from families import build
from router_files import made

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
NOTEBOOK = FOLDER / "tour.ipynb"
ARGUMENTS = {"lossless_check": ["Write one sentence about rain."], "tune_threshold": ["Name a metal.", "--threshold", "0.9"]}
PRINTS = {"lossless_check": "drafts accepted", "tune_threshold": "tok/s"}


@pytest.mark.real
@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem != "any_model"], ids=lambda path: path.stem)
def test_an_example_runs(example, embedded, capsys, monkeypatch):
    """With the embedded model as it was loaded once."""
    monkeypatch.setattr(TIDE, "load_model", {"default": embedded}.__getitem__)
    monkeypatch.setattr(sys, "argv", [str(example), *ARGUMENTS.get(example.stem, []), "--max-new-tokens", "6"])
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
    monkeypatch.setattr(sys, "argv", ["any_model.py", "--model", str(tmp_path / "model"), "--router", str(router)])
    for _ in range(2):  # the second time the file is there
        runpy.run_path(str(EXAMPLES[0]), run_name="__main__")
        assert "Total tokens: 32" in capsys.readouterr().out
    assert asked == [True]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat", "plain"])
def test_an_example_takes_a_model_and_its_router_file(example, template, tmp_path, capsys, monkeypatch):
    model = build("llama", max_position_embeddings=1024)
    model.save_pretrained(tmp_path / "model")
    characters(template).save_pretrained(tmp_path / "model")
    made("memory", model).save(tmp_path / "router.pt")
    asked = ["--model", str(tmp_path / "model"), "--router", str(tmp_path / "router.pt"), "--max-new-tokens", "4"]
    monkeypatch.setattr(sys, "argv", [str(example), *asked])
    runpy.run_path(str(example), run_name="__main__")
    assert PRINTS.get(example.stem, "Total tokens:") in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.real
def test_the_notebook_runs(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert printed.count("Total tokens: 24") == 2 and "Danube" in printed
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 2  # depths, acceptance by step
    assert (tmp_path / "own.safetensors").exists()


def test_the_notebook_is_kept_without_outputs():
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")


def test_examples_are_short_and_those_of_the_original_page_are_there():
    assert {"quickstart", "any_model", "tune_threshold", "huggingface_pipeline"} <= {path.stem for path in EXAMPLES}
    assert [path.name for path in EXAMPLES if len(path.read_text("utf-8").splitlines()) > 40] == []
