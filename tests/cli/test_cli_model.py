"""The model of a command: MODEL or --model, and the router file that goes with it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import TIDE
from commands import tide


def test_the_model_may_be_an_argument_or_an_option_or_both(folder):
    texts = ("--dataset", folder / "texts.txt", "--samples", 4, "--no-heads")
    found = [tide("analyze", *model, *texts) for model in ([folder], ["--model", folder], [folder, "--model", folder])]
    assert [done.exit_code for done in found] == [0, 0, 0], found[1].output
    assert found[0].stdout == found[1].stdout == found[2].stdout


@pytest.mark.parametrize("command", [["generate", "hi", "--model"], ["chat"], ["chat", "--model"]])
def test_without_a_router_file_answers_come_with_exits_off_and_a_line_says_so(command, folder):
    done = tide(*command, folder, "--max-new-tokens", 4, "--json", stdin="hi\n")
    said = f"there is no router file for {folder}, so exits are off. Make one: tide calibrate {folder}, then give --router.\n"
    assert done.exit_code == 0 and done.stderr == said
    without = tide(*command, folder, "--max-new-tokens", 4, "--json", "--no-exits", stdin="hi\n")
    assert json.loads(done.stdout)["answer"] == json.loads(without.stdout)["answer"] and without.stderr == ""


def test_a_file_of_another_kind_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "junk.gguf").write_text("junk")
    done = tide("generate", "hi", "--model", tmp_path / "junk.gguf")
    assert done.exit_code == 2 and "junk.gguf is not a GGUF file" in done.stderr and "exits are off" not in done.stderr


def test_a_slow_load_is_announced(folder, monkeypatch):
    monkeypatch.setattr("TIDE.cli.model.PATIENCE", 0.0)
    monkeypatch.setattr("TIDE.cli.model.is_watched", lambda: True)
    assert f"loading {folder}" in tide("generate", "hi", "--model", folder, "--no-exits", "--max-new-tokens", 2).stderr


@pytest.mark.parametrize("command", ["certify", "tune"])
def test_commands_that_need_exits_do_not_name_a_way_without(command, folder):
    done = tide(command, folder, "--prompts", folder / "prompts.jsonl")
    assert done.exit_code == 2 and "give --router FILE" in done.stderr and "--no-exits" not in done.stderr


def test_bench_without_exits_compares_two_ways(folder):
    asked = ("bench", "hello", "--model", folder, "--no-exits", "--max-new-tokens", 6, "--rounds", 1)
    done = tide(*asked)
    assert done.exit_code == 0, done.output
    head, *rows = done.stdout.splitlines()[:3]
    assert head.split()[:4] == ["tok/s", "(lowest-highest)", "x", "generate"] and head.endswith("same text")
    assert [row.endswith("1 of 1") for row in rows] == [True, True]
    assert "layers run before a token was decided, of 4" in done.stdout
    assert done.stderr.splitlines()[0] == f"loading {folder}, to measure generate, off"
    assert "warming up: generate\nwarming up: off\n" in done.stderr
    found = json.loads(tide(*asked, "--json").stdout)
    assert found["mode"] == "off" and [own["contender"] for own in found["contenders"]] == ["generate", "off"]


def test_bench_takes_contenders_by_name_and_keeps_what_it_measured(folder, router, tmp_path):
    asked = ("bench", "hello", "--model", folder, "--router", router, "--max-new-tokens", 4, "--rounds", 1)
    done = tide(*asked, "--contender", "fast", "--contender", "off", "-o", tmp_path / "kept.json", "--json")
    assert done.exit_code == 0, done.output
    kept = json.loads((tmp_path / "kept.json").read_text())
    assert kept == json.loads(done.stdout) and {"commit", "date", "hardware", "command"} <= {*kept}
    assert [own["contender"] for own in kept["contenders"]] == ["off", "fast"]
    wrong = tide(*asked, "--contender", "vllm")
    assert wrong.exit_code == 2 and "expected generate, compiled, early-exit" in wrong.stderr and "found vllm" in wrong.stderr
    wrong = tide(*asked[:4], "--no-exits", "--contender", "exact")
    assert wrong.exit_code == 2 and "expected contenders without exits beside --no-exits, found exact" in wrong.stderr


def test_bench_fails_where_layers_did_not_run_as_reported(folder, router, monkeypatch):
    monkeypatch.setattr("TIDE.bench.benchmark.wrong_with", lambda found, told: "they did not")
    asked = ("bench", "hello", "--model", folder, "--router", router, "--max-new-tokens", 4, "--rounds", 1)
    done = tide(*asked, "--contender", "exact")
    assert done.exit_code == 1 and "error: layers did not run as reported: exact." in done.stderr
    assert "FAILED" in done.stdout


def test_a_router_file_of_a_model_of_other_sizes_is_refused_before_the_model_is_loaded(folder, monkeypatch):
    def load(name, **_):
        raise AssertionError(f"{name} was loaded")

    monkeypatch.setattr(TIDE, "load_model", load)
    for command in (["generate", "hi", "--model"], ["bench", "hi", "--model"], ["tune", "--prompts", folder / "prompts.jsonl"]):
        done = tide(*command, folder, "--router", "default")
        assert done.exit_code == 2 and done.stdout == ""
        last = done.stderr.splitlines()[-1]
        assert "was made for SmolLM2-135M-Instruct (30 layers of 576, vocabulary 49152)" in last
        assert f"Give the router file of this model, or make one: tide calibrate {folder}." in last


def test_demo_takes_a_router_file(folder, router, tmp_path):
    asked = ("--model", folder, "--router", router, "--max-new-tokens", 6, "--rounds", 1, "-o", tmp_path / "page.html")
    done = tide("demo", *asked, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["same_text"] == {"exits_off": True, "exits": True}
    assert {name: len(speeds) for name, speeds in found["rounds"].items()} == {"generate": 1, "exits_off": 1, "exits": 1}
    said = done.stderr.splitlines()
    assert said[0] == f"loading {folder}" and "warming up: TIDE, exact exits" in said
    assert any(line.startswith("round 1 of 1: model.generate ") for line in said)


def test_bench_names_the_mode_that_a_strategy_asks_for(folder, router):
    asked = ("bench", "hello", "--model", folder, "--router", router, "--max-new-tokens", 6, "--rounds", 1, "--json")
    assert json.loads(tide(*asked).stdout)["mode"] == "exact"
    assert json.loads(tide(*asked, "--kv-cache-strategy", "zero_pad").stdout)["mode"] == "fast"


def test_a_hub_that_is_away_is_known_before_anything_heavy_is_imported():
    """In seconds, and in one line."""
    script = (
        "import sys, huggingface_hub.constants as c; c.ENDPOINT = 'http://127.0.0.1:9'\n"
        "sys.argv = ['tide', 'generate', 'hi', '--model', 'no/such-model', '--no-exits']\n"
        "from TIDE.cli.app import main\n"
        "try:\n    main()\nfinally:\n    assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: cannot load 'no/such-model'") and done.stderr.count("\n") == 1
    assert "The hub cannot be reached (http://127.0.0.1:9 does not answer" in done.stderr


@pytest.mark.real
def test_the_demo_of_the_default_model_shows_text_speed_and_stats_and_ends_with_a_report(tmp_path):
    page = tmp_path / "page.html"
    done = tide("demo", "--max-new-tokens", 12, "--rounds", 1, "--output", page)
    assert done.exit_code == 0, done.stderr
    for said in ("model.generate", "TIDE, exits off", "TIDE, exact exits", "tok/s", "Total tokens: 12"):
        assert said in done.stdout, said
    assert done.stdout.count("same text yes") == 2
    assert done.stdout.splitlines()[-1].startswith(f"report: {page} ")
    assert page.read_text("utf-8").count('class="token') == 12
