"""What a newcomer does with the README alone runs: its code, its commands. docs/structure.md has a line for every file."""

from __future__ import annotations

import functools
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

import TIDE
from characters import TEMPLATE, characters
from commands import COMMANDS as ALL_COMMANDS
from commands import tide
from eagle_heads import a_head
from families import build
from router_files import made
from TIDE.calibration.calibrate import QUICK
from TIDE.models.gguf import Loaded

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
((QUICK_START, OUTPUT),) = re.findall(r"```python\n(import .*?)```\n\n(?:<!--.*?-->\n\n)?```text\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("  #")[0] for line in README.splitlines() if line.startswith("tide ")]
STAND_INS = {"MODEL": "model", "FILE": "router.safetensors", "P.jsonl": "prompts.jsonl", "...": "Hello."}
STAND_INS["OWNER/EAGLE3-HEAD"] = "eagle"
BRIEFLY = {  # command -> options that make it quick; all others generate two tokens
    "demo": ["--rounds", "1", "--max-new-tokens", "2"],
    "bench": ["--rounds", "1", "--max-new-tokens", "2"],
    "tune": ["--limit", "1", "--threshold", "0.9", "--max-new-tokens", "2"],
    "analyze": ["--dataset", "texts.txt", "--samples", "4", "--no-heads"],
    "chat": [],
    "inspect": [],
    "report": [],
    "export": [],
}
ELSEWHERE = {  # what runs on, trains, or needs the harness -> the test that runs it
    "serve": "server/test_stopping.py",
    "chat --url": "server/test_remote_chat.py",
    "calibrate": "cli/test_cli_calibrate.py",
    "eval": "cli/test_cli_eval.py",
}


@pytest.mark.real
def test_the_quick_start_prints_what_the_readme_shows(embedded, capsys):
    """The same text; how many tokens exit depends on what pays on a machine, and on some machine they do."""
    exec(compile(QUICK_START, "README.md", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    text, _, counts = OUTPUT.partition("Total tokens: ")
    assert printed.startswith(f"{text}Total tokens: {counts.split(',')[0]}")
    assert int(re.search(r"Exited: (\d+)", OUTPUT)[1]) > 0


@pytest.fixture
def newcomer(tmp_path, monkeypatch):
    """A folder with a model, its router file and prompts under the README's names; the default model is tiny too."""
    model, tokenizer = build("llama", max_position_embeddings=1024), characters(TEMPLATE)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    made("memory", model).save(tmp_path / "router.safetensors")
    lines = "\n".join(json.dumps({"prompt": f"Say {number}."}) for number in range(80))
    (tmp_path / "prompts.jsonl").write_text(lines, "utf-8")
    texts = "\n\n".join(f"Text {number}: {'the sea is wide, ' * 12}" for number in range(40))
    (tmp_path / "texts.txt").write_text(texts, "utf-8")
    a_head(tmp_path / "eagle")

    def load(name="default", **_):
        return Loaded(build("llama", max_position_embeddings=1024), characters(TEMPLATE))

    monkeypatch.setattr(TIDE, "load_model", load)
    monkeypatch.setattr(TIDE, "default_router", lambda: tmp_path / "router.safetensors")
    monkeypatch.setenv("TIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("TIDE_BACKEND", "modules")  # nothing to compile
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_readmes_commands_run_one_after_the_other(newcomer):
    """As they stand, but for stand-ins of names and options that make them quick."""
    ran = set()
    for line in (one for several in COMMANDS for one in several.split("; ")):
        _, name, *rest = shlex.split(line)
        command = "chat --url" if "--url" in rest else name
        ran.add(command)
        if command in ELSEWHERE:
            continue
        words = [STAND_INS.get(word, word) for word in rest]
        briefly = BRIEFLY.get(name, ["--max-new-tokens", "2"])
        done = tide(name, *words, *briefly, stdin="Hello.\n" if name == "chat" else None)
        assert done.exit_code == 0, f"{line}: {done.output}"
    assert ran == {*ALL_COMMANDS, "chat --url"}
    left = {"run.json", "run.html", "tide-demo.html", "depth.png", "head"}
    assert left <= {path.name for path in newcomer.iterdir()}


@pytest.mark.parametrize("command", ELSEWHERE)
def test_commands_that_take_long_have_tests_of_their_own(command):
    words = re.escape(command).replace(r"\ ", '",? "')
    assert re.search(rf'"{words}"', (ROOT / "tests" / ELSEWHERE[command]).read_text("utf-8"))


@pytest.mark.full
def test_another_model_is_calibrated_and_used_in_three_lines(monkeypatch, tmp_path):
    """They run as they stand, on a tiny random model and with few texts."""
    (block,) = re.findall(r"```python\n(model, tokenizer = [^`]*TIDE\.calibrate\([^`]*)```", (ROOT / "README.md").read_text())
    assert len(block.splitlines()) == 3
    few = functools.partial(TIDE.TIDEConfig, calibration_samples=20, checkpoint_interval=4)
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
    assert commands == ["make check", "make test", "make test-all"]
    assert "\nmake test " in (ROOT / "README.md").read_text()
