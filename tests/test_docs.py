"""The pages: links lead somewhere, code runs, commands exist, and what they say of settings, messages and figures is so.

Code runs on a tiny model under the embedded one's name, with exits of its own; calibration and certification are asked with
the arguments of the page and do little. A block that cannot run is fenced as text.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import os
import re
import runpy
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple
from unittest import mock

import pytest
import typer

import TIDE
from characters import TEMPLATE, characters
from families import build
from router_files import made
from TIDE.cli.app import app
from TIDE.models.gguf import Loaded

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LAYERS = {"how_it_works.md": 30}  # as many as the embedded model has, where a page names a depth; elsewhere a few are quicker
of_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    line: int  # of the page, where it begins
    text: str


def blocks(text: str) -> list[Block]:
    return [Block(found[1], text.count("\n", 0, found.start(2)), dedent(found[2])) for found in FENCE.finditer(text)]


def prose(text: str) -> str:
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


# ---- links ----------------------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """Where links into a page may lead: its headings, as GitHub names them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        again = sum(bool(re.fullmatch(re.escape(name) + r"(-\d+)?", own)) for own in found)
        found.add(f"{name}-{again}" if again else name)
    return found


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    targets = re.findall(r"\]\(([^)\s]+)", prose(text)) + re.findall(r'(?:src|href)="([^"]+)"', prose(text))
    found = []
    for target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if target.startswith("https://"):
            continue
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file.read_text("utf-8"))):
            found.append(target)
    return found


@of_page
def test_links_and_anchors_lead_somewhere(page):
    assert broken(page, page.read_text("utf-8")) == []


def test_a_link_that_leads_nowhere_is_noticed():
    page = ROOT / "docs" / "structure.md"
    text = "# One\n\n## Two words\n\n[a](#one) [b](log.md) [c](nowhere.md) [d](log.md#nowhere) ![e](none.png) `[f](code)`"
    assert broken(page, text) == ["#one", "nowhere.md", "log.md#nowhere", "none.png"]
    assert anchors(text + "\n## `Two`, words!") == {"one", "two-words", "two-words-1"}


# ---- code -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(page, monkeypatch, tmp_path) -> None:
    """Whatever a page loads is tiny, what it calibrates is there already, and what it certifies is not much."""
    layers, router, certify = LAYERS.get(page.name, 4), tmp_path / "shipped.safetensors", TIDE.certify

    def tiny():
        return build("llama", num_hidden_layers=layers, max_position_embeddings=1024)

    made("memory", tiny()).save(router)
    takes = {name: inspect.signature(getattr(TIDE, name)) for name in ("calibrate", "certify")}

    def calibrated(*args, **kwargs):
        given = takes["calibrate"].bind(*args, **kwargs)
        given.apply_defaults()
        file = TIDE.RouterFile.load(router)
        file.save(given.arguments["save_path"])
        return file

    def certified(*args, **kwargs):
        given = takes["certify"].bind(*args, **kwargs).arguments
        few = given["prompts"][:4]
        return certify(given["engine"], few, 0.5, 0.8, tokenizer=given.get("tokenizer"), max_new_tokens=4)

    monkeypatch.setenv("TIDE_BACKEND", "modules")  # nothing to compile
    tokenizer = characters(TEMPLATE)
    tokenizer.padding_side = "left"  # as `load_model` leaves it
    monkeypatch.setattr(TIDE, "load_model", lambda name="default", **options: Loaded(tiny(), tokenizer))
    monkeypatch.setattr(TIDE, "default_router", lambda: router)
    monkeypatch.setattr(TIDE, "calibrate", calibrated)
    monkeypatch.setattr(TIDE, "certify", certified)
    monkeypatch.chdir(tmp_path)


def run(text: str, name: str) -> None:
    """The Python of a page, from its first block to its last."""
    names = {"__name__": "__main__"}
    for block in blocks(text):
        if block.language in ("python", "py"):
            exec(compile("\n" * block.line + block.text, name, "exec"), names)


@of_page
def test_code_runs(page, stand_ins):
    run(page.read_text("utf-8"), str(page))


def test_code_that_fails_is_noticed():
    with pytest.raises(ZeroDivisionError):
        run("```python\nlate = 1\n```\n\n```python\nlate / 0\n```", "a page")


# ---- commands -------------------------------------------------------------------------------------------------------------

TOOL = typer.main.get_command(app)


def commands(text: str) -> Iterator[list[str]]:
    """The commands of a page, in words: lines of blocks that are not Python, and indented ones."""
    shown = "\n".join(block.text for block in blocks(text) if block.language in ("", "bash", "sh", "console"))
    indented = "\n".join(re.findall(r"^    +\S.*$", FENCE.sub("", text), re.MULTILINE))
    for line in (shown + "\n" + indented).replace("\\\n", " ").splitlines():
        if re.match(r"\s*(\$ )?([A-Z_]+=\S+ )*(\S*/)?(tide|python|make|cat) ", line):
            yield from _apart(line)


def _apart(line: str) -> Iterator[list[str]]:
    reader = shlex.shlex(line, posix=True, punctuation_chars=";|&<>")
    reader.whitespace_split = True
    words: list[str] = []
    for word in [*reader, ";"]:
        if word.strip(";|&<>"):
            words.append(word)
            continue
        while words and re.match(r"\$$|[A-Z_]+=", words[0]):
            del words[0]
        if words:
            yield [Path(words[0]).name, *words[1:]]
        words = []


def parse(words: list[str]) -> None:
    """Fail where there is no such command, option or file. Nothing is run."""
    program, *rest = words
    if program == "tide":
        _parse_tide([word for word in rest if word != "--debug"])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), rest
    elif program == "python":
        for word in rest:
            assert not re.match(r"(benchmarks|examples|tests|docs|src)/", word) or (ROOT / word).exists(), word
        if rest and rest[0].startswith("benchmarks/"):
            _parse_script(rest)


def _parse_tide(words: list[str]) -> None:
    name, *rest = words
    if name.startswith("-"):
        assert name in {option for known in TOOL.params for option in known.opts} | {"--help"}, name
        return
    assert name in TOOL.commands, f"there is no tide {name}"
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for word in rest:
            if re.fullmatch(r"[A-Za-z][\w.-]*", word) and not Path(word).exists():  # what it names is there
                if Path(word).suffix:
                    Path(word).write_text("GGUF" if word.endswith(".gguf") else '{"prompt": "Hello."}')
                else:
                    Path(word).mkdir()
        try:
            TOOL.commands[name].make_context(name, rest)
        except typer.Exit:  # --help
            pass
        except Exception as problem:
            raise AssertionError(f"tide {' '.join(words)}: {problem}") from problem


class _Parsed(Exception):
    pass


def _parse_script(words: list[str]) -> None:
    """A benchmark, by its own parser."""

    def parse_args(self, *_, _as_ever=argparse.ArgumentParser.parse_args):
        _as_ever(self)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ):  # a script may set variables of its own
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        patch.setattr(sys, "argv", words)
        patch.syspath_prepend(ROOT / "benchmarks")
        try:
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        except _Parsed:
            return
        except SystemExit as problem:
            raise AssertionError(f"{' '.join(words)} is not taken") from problem


def check_commands(text: str) -> None:
    for words in commands(text):
        parse(words)


@of_page
def test_commands_and_their_options_exist(page):
    check_commands(page.read_text("utf-8"))


@of_page
def test_commands_named_in_passing_exist(page):
    for named in re.findall(r"`tide ([^`\n]+)`", FENCE.sub("", page.read_text("utf-8"))):
        name, *rest = shlex.split(named)
        if not name.startswith("-"):
            assert name in TOOL.commands, named
            known = {option for own in TOOL.commands[name].params for option in (*own.opts, *own.secondary_opts)}
            assert {word for word in rest if word.startswith("-")} <= known | {"--debug", "--help"}, named


def test_every_command_is_in_the_readme():
    assert set(TOOL.commands) <= {words[1] for words in commands(PAGES[0].read_text("utf-8")) if words[0] == "tide"} | {"demo"}


@pytest.mark.parametrize(
    "line",
    [
        "tide generat x",
        "tide generate x --dept",
        "tide generate x --max-new-tokens 0",
        "tide report run.json; tide repor run.json",
        "tide certify default",
        "PYTHONPATH=src python benchmarks/bench_none.py",
        ".venv/bin/python benchmarks/bench_decode.py --bogus",
        "python benchmarks/bench_prompts.py --every 3",
        "python examples/none.py",
        "make dem",
    ],
)
def test_a_command_that_is_not_there_is_noticed(line, capsys):
    with pytest.raises(AssertionError):
        check_commands(f"A page.\n\n    {line}\n")


# ---- reading --------------------------------------------------------------------------------------------------------------


@of_page
def test_long_pages_have_a_table_or_a_picture(page):
    text = page.read_text("utf-8")
    if len(prose(text).split()) > 1000:
        assert re.search(r"^\|[\s:|-]+\|$|!\[|<img ", text, re.MULTILINE), f"{len(prose(text).split())} words"


def test_every_page_is_in_the_index():
    listed = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [page.name for page in PAGES[1:] if page.name != "index.md" and f"({page.name})" not in listed] == []


# ---- what is said of the code ---------------------------------------------------------------------------------------------


def test_the_configuration_table_is_the_configurations():
    page = ROOT / "docs" / "configuration.md"
    with_table = runpy.run_path(str(page.with_suffix(".py")))["with_table"]
    text = page.read_text("utf-8")
    assert with_table(text) == text, "out of date: run python docs/configuration.py"
    assert with_table(text.replace("| `mode` |", "| `mood` |")) == text
    for name in TIDE.TIDEConfig.__dataclass_fields__:
        assert f"| `{name}` |" in text


def test_environment_variables_are_read_by_the_code():
    named = {name for page in PAGES for name in re.findall(r"\bTIDE_[A-Z_]+", page.read_text("utf-8"))}
    read = "".join(file.read_text("utf-8") for file in (ROOT / "src" / "TIDE").rglob("*.py"))
    assert {"TIDE_CACHE", "TIDE_BACKEND", "TIDE_NO_GRAPHS"} <= named
    assert {name for name in named if f'"{name}"' not in read} == set()


def test_messages_in_troubleshooting_are_those_of_the_code():
    text = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    quoted = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    said = [own for file in (ROOT / "src" / "TIDE").rglob("*.py") for own in _said(file)]
    assert len(quoted) > 20
    assert [message for message in quoted if not any(message in own for own in said)] == []


def _said(file: Path) -> Iterator[str]:
    """The strings of a file, with … for what is filled in."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%\.?\d*[sdf]", "…", node.value)


def test_figures_against_tide_are_those_that_were_measured():
    """A page that repeats figures must not outlive them."""
    said, *measured = (
        prose((ROOT / "docs" / f"{name}.md").read_text("utf-8")) for name in ("when_tide_does_not_help", "benchmarks", "log")
    )
    known = set(re.findall(r"\d+\.\d+", " ".join(measured)))
    assert [figure for figure in re.findall(r"\d+\.\d+", said) if figure not in known] == []
