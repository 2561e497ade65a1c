"""The README's code runs as it stands, and docs/structure.md has a line for every file of the package."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest
import torch

import TIDE
from characters import TEMPLATE, characters
from families import build
from TIDE.calibration.calibrate import QUICK
from TIDE.models.load import Loaded

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(import .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)  # the rest: test_docs.py


@pytest.mark.real
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_code_blocks_run(block, embedded, capsys):
    exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
    assert "Total tokens: 32" in capsys.readouterr().out


def test_another_model_is_calibrated_and_used_in_three_lines(monkeypatch, tmp_path):
    """They run as they stand, on a tiny random model and with few texts."""
    (block,) = re.findall(r"```python\n(model, tokenizer = [^`]*TIDE\.calibrate\([^`]*)```", (ROOT / "README.md").read_text())
    assert len(block.splitlines()) == 3
    few = functools.partial(TIDE.TIDEConfig, calibration_samples=20, checkpoint_interval=2)
    monkeypatch.setattr(TIDE, "load_model", lambda name: Loaded(build("llama"), characters(TEMPLATE)))
    monkeypatch.setattr("TIDE.calibration.calibrate.TIDEConfig", few)
    monkeypatch.setattr("TIDE.calibration.calibrate.FULL", QUICK)
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    names = {"TIDE": TIDE}
    exec(compile(block, "README.md", "exec"), names)
    ids, options = torch.tensor([[1, 20, 30, 40]]), dict(max_new_tokens=16, do_sample=False)
    with names["engine"] as engine:
        assert engine.policy.exits and (tmp_path / "router.safetensors").exists()
        assert torch.equal(engine.generate(ids, **options), names["model"].generate(ids, **options))


def test_the_structure_page_lists_the_files_that_there_are():
    """One line each, by its folder."""
    (tree,) = re.findall(r"```\n(src/TIDE/\n.*?)```", (ROOT / "docs" / "structure.md").read_text(), re.DOTALL)
    folders: list[str] = []
    listed = []
    for line in tree.splitlines()[1:]:
        depth, name = (len(line) - len(line.lstrip())) // 2 - 1, line.split()[0]
        folders[depth:] = [name]
        if name.endswith(".py"):
            listed.append("".join(folders))
    package = ROOT / "src" / "TIDE"
    found = [str(file.relative_to(package)) for file in package.rglob("*.py")]
    inside = [name for name in found if "/" not in name or not name.endswith("__init__.py")]
    assert sorted(listed) == sorted(inside)


def test_the_readme_names_every_folder_of_the_package():
    readme = (ROOT / "README.md").read_text()
    for folder in (ROOT / "src" / "TIDE").glob("*/__init__.py"):
        assert f" {folder.parent.name}/" in readme or f"/{folder.parent.name}/" in readme


def test_ci_runs_what_the_readme_says():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make")]
    assert commands == ["make check", "make test"]
    assert "\nmake test " in (ROOT / "README.md").read_text()
