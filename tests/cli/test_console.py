"""Every command through the console script: its help, what it prints as JSON, and a line where something is wrong."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import typer

from commands import COMMANDS, SCRIPT, fits, script
from TIDE.cli.app import app

NUMBER = (int, float)
ANSWER = dict(
    prompt=str,
    answer=str,
    finish_reason=str,
    tokens=int,
    tokens_per_second=float,
    seconds=float,
    mean_depth=NUMBER,
    exit_rate=NUMBER,
    drafted=int,
    accepted=int,
    seed=(int, type(None)),
    depths=[int],
    backend=str,
)
ROUTER_FILE = dict(
    format=int,
    version=str,
    strategy=str,
    checkpoints=list,
    max_pending=int,
    vocabulary=int,
    fingerprint=dict,
    exits=dict,
    config=dict,
    facts=dict,
    figures=dict,
    certificate=(dict, type(None)),
)


def test_the_version_is_printed():
    assert script("--version").stdout.startswith("tide-inference 0.")


def test_a_command_that_is_not_there_is_wrong_usage():
    done = script("calibrat")
    assert done.returncode == 2
    assert done.stderr == "error: No such command 'calibrat'. Did you mean 'calibrate'? See tide --help.\n"


def test_examples_of_the_help_can_be_typed_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("TIDE.hub.check_datasets", lambda source: None)  # the package need not be here
    for name in ("my.safetensors", "texts.txt", "texts.jsonl", "questions.txt", "run.json"):
        (tmp_path / name).touch()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hello."}')
    commands = typer.main.get_command(app).commands
    for page in (app.registered_callback.callback, *(command.callback for command in commands.values())):
        for example in re.findall(r"^ *(?:.*\| )?tide (.*)$", inspect.getdoc(page), re.MULTILINE):
            name, *arguments = shlex.split(example)
            commands[name].make_context(name, arguments)


def test_without_a_command_all_are_listed():
    done = script()
    assert done.returncode == 2 and done.stderr == ""
    listed = [line.strip("│ ").split(" ")[0] for line in done.stdout.splitlines()]
    assert [word for word in listed if word in COMMANDS] == list(COMMANDS)


def test_an_error_is_a_line_and_with_debug_a_traceback(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    done = script("report", tmp_path / "other.json")
    assert done.returncode == 1 and done.stdout == ""
    assert "is not a run of this version" in done.stderr and len(done.stderr.splitlines()) == 1
    done = script("report", tmp_path / "other.json", "--debug")
    assert done.returncode == 1 and "Traceback (most recent call last)" in done.stderr


def test_an_interrupted_command_says_so_in_a_line(tmp_path):
    os.mkfifo(tmp_path / "asked.txt")
    command = [SCRIPT, "generate", "--file", tmp_path / "asked.txt"]
    listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells tell their background jobs not to
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=listening)
    writer = _opened_once_read(tmp_path / "asked.txt")
    said = _interrupted(process)
    os.close(writer)
    assert process.returncode == 130
    assert said.strip() == "interrupted."


def _interrupted(process):
    """What a process says that is interrupted. Between Python's last look at its signals and a system call that waits one is
    lost until the next."""
    for _ in range(24):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=10)[1]
    raise TimeoutError


def _opened_once_read(path):
    """A pipe's end to write to, once somebody is reading."""
    for _ in range(2400):
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.1)
    raise TimeoutError


SHAPES = {  # a part of each object of --json
    "generate": ANSWER,
    "chat": ANSWER,
    "bench": dict(model=str, mode=str, backend=str, rows=int, rounds=int, contenders=[dict], absent=dict),
    "analyze": dict(oracle_depth=dict(identity=float), rows=[dict]),
    "tune": dict(rows=[dict]),
    "demo": dict(tokens_per_second=dict(generate=float, exits_off=float), same_text=dict(exits_off=bool)),
}


@pytest.mark.parametrize("command", SHAPES)
def test_json_is_all_that_stands_on_standard_output(command, warm, folder, shared_router, tmp_path):
    short, with_exits = ("--max-new-tokens", 6), ("--router", shared_router)
    asked = {
        "generate": ("one", "two", "--model", folder, *with_exits, *short),
        "chat": (folder, *with_exits, *short),
        "bench": ("hello", "--model", folder, *with_exits, *short, "--rounds", 1),
        "analyze": (folder, "--dataset", folder / "texts.txt", "--samples", 4, "--no-heads"),
        "tune": (folder, *with_exits, "--prompts", folder / "prompts.jsonl", "--limit", 1, *short, "--threshold", 0.5),
        "demo": ("--model", folder, *short, "--rounds", 1, "-o", tmp_path / "page.html"),
    }
    done = warm.tide(command, *asked[command], "--json", stdin="one\n/reset\ntwo\n/quit\n")
    assert done.returncode == 0, done.stderr
    shape = SHAPES[command]
    if shape is ANSWER:
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert fits(found, [ANSWER]) and [one["prompt"] for one in found] == ["one", "two"]
    else:
        found = json.loads(done.stdout)
        assert fits({key: found[key] for key in shape}, shape)


def test_certify_keeps_its_certificate_where_inspect_finds_it(warm, folder, router):
    asked = ("--router", router, "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 4)
    asked += ("--risk", 0.2, "--confidence", 0.8)
    done = warm.tide("certify", folder, *asked, "--loss", "mismatch", "--json")
    assert done.returncode == 0, done.stderr
    certificate = json.loads(done.stdout)
    shown = warm.tide("inspect", router, "--json")
    assert shown.returncode == 0 and shown.stderr == ""
    found = json.loads(shown.stdout)
    assert fits(found, ROUTER_FILE) and found["certificate"] == certificate
    assert (certificate["loss"], certificate["prompts"], certificate["new_tokens"]) == ("mismatch", 20, 4)
    settings = {"kv_cache_strategy": "exact", "min_layers": 0, "max_pending": 5, "max_exit_share": 0.9, "dtype": "float32"}
    settings["prefill_exits"] = False
    assert certificate["settings"] == settings and fits(certificate["tested"], [dict])
    assert f"written: {router}" in done.stderr
    assert "\ncertificate\n" in warm.tide("inspect", router).stdout


def test_completion_is_installed_and_offers_commands_options_and_values(tmp_path):
    environment = {**os.environ, "HOME": str(tmp_path), "PATH": f"{SCRIPT.parent}:{os.environ['PATH']}"}

    def bash(command: str) -> str:
        return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True).stdout

    assert "complete" in bash("tide --show-completion; true")
    assert list(tmp_path.iterdir()) == []
    assert "completion installed" in bash("tide --install-completion; true")
    offered = bash(
        "source ~/.bashrc;"
        "offer() { COMP_WORDS=(tide $1); COMP_CWORD=$2; _tide_completion tide; echo ${COMPREPLY[@]}; };"
        "offer '' 1; offer 'generate --max' 2; offer 'generate --mode fa' 3"
    )
    commands, options, values = offered.splitlines()
    assert commands.split() == list(COMMANDS)
    assert options.split() == ["--max-new-tokens", "--max-pending", "--max-exit-share"]
    assert values == "fast"


def test_help_brings_nothing_heavy():
    found = "import runpy, sys; sys.argv = ['tide', '--help']; sys.stdout = sys.stderr\n"
    found += f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    found += "except SystemExit: print(*sys.modules, file=sys.__stdout__)"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "numba", "matplotlib"} & set(done.stdout.split())


def test_importing_takes_little_beside_torch_and_transformers(warm):
    assert {*warm.imports["packages"]} <= {"TIDE", "transformers", "huggingface_hub"}
    assert warm.imports["share"] < 0.1  # 0.1 s after 6 s on two slow cores, with every public name
