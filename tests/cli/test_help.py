"""What `--help` shows, at the usual width and at a wider one."""

from __future__ import annotations

import re

import pytest
import typer

from commands import COMMANDS, tide
from TIDE.cli.app import app

PAGES = ("", *COMMANDS)


@pytest.fixture(params=[80, 120])
def page(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))

    def shown(command: str) -> list[str]:
        done = tide(*command.split(), "--help")
        assert done.exit_code == 0, done.output
        assert max(map(len, done.stdout.splitlines())) <= request.param
        return done.stdout.splitlines()

    return shown


@pytest.mark.parametrize("command", PAGES)
def test_options_that_are_on_or_off_take_no_value(page, command):
    group = typer.main.get_command(app)
    options = (group.commands[command] if command else group).params
    flags = [name for option in options if getattr(option, "is_flag", False) for name in option.opts]
    lines = page(command)
    for flag in flags:
        (line,) = [line for line in lines if re.match(rf"  {flag}(\s|$)", line)]
        assert re.match(rf"  {flag}(   *\S|$)", line), line
    text = "\n".join(lines)
    assert "<bool>" not in text and "BOOL" not in text
    assert not re.search(r"--no-(?!exits|heads)", text)
    assert not re.search(r"\[default: (None|False|True|default|exits|heads)", text)


@pytest.mark.parametrize("command", PAGES)
def test_examples_are_a_block_of_one_command_a_line(page, command):
    lines = page(command)
    assert f"Usage: tide {command}".rstrip() in lines[0] and (not command or "--json" in "\n".join(lines))
    began = lines.index("  Examples:") + 1
    block = lines[began : lines.index("", began)]
    assert len(block) >= 2
    for line in block:
        assert re.match(rf"    (\S.* \| )?tide {command if command != 'report' else ''}", line), line


def test_the_list_says_of_every_command_what_it_does(page):
    lines = page("")
    listed = lines[lines.index("Commands:") + 1 :]
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert all(line.endswith(".") and not line.endswith("...") for line in listed)


def test_the_same_thing_has_the_same_name_in_every_command():
    names = {
        name for command in typer.main.get_command(app).commands.values() for option in command.params for name in option.opts
    }
    assert {"--model", "--router", "--max-new-tokens", "--figure"} <= names
    assert not {"--new-tokens", "--plot"} & names


def test_the_help_of_seed_says_what_is_promised(page):
    said = " ".join(" ".join(page("generate")).split())
    assert "The same seed gives the same text, with exits or without." in said


def test_the_help_of_mode_says_what_is_taken_unless_given(page):
    said = " ".join(" ".join(page("generate")).split())
    assert "Unless given: exact, or fast with --kv-cache-strategy propagate or zero_pad, or --prefill-exits." in said
