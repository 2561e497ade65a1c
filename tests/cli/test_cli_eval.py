"""`tide eval`, run on a tiny model and a few questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import fits
from eval_data import data_folder
from TIDE.cli.eval import _identity

OUTCOME = {
    "contender": str,
    "mode": str,
    "questions": int,
    "same": int,
    "quality": [dict],
    "tokens": int,
    "seconds": float,
    "tokens_per_second": float,
    "speedup": float,
    "speedup_interval": [float],
    "exit_rate": (int, float),
    "loss": (dict, type(None)),
    "certificate": type(None),
}


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return data_folder(tmp_path_factory.mktemp("questions"))


@pytest.fixture
def asked(folder, shared_router, questions, tmp_path):
    pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed: make test-eval installs it")
    given = ("--router", shared_router, "--data", questions, "--limit", 2, "--max-new-tokens", 6, "-o", tmp_path / "run.json")
    return (folder, *given)


def test_eval_prints_and_keeps_what_it_measures(warm, asked, tmp_path):
    tasks = ("--tasks", "gsm8k,humaneval,mmlu,wikitext", "--execute-code")
    done = warm.tide("eval", *asked, *tasks, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "run.json").read_text())
    assert [one["task"] for one in found["tasks"]] == ["gsm8k", "humaneval", "mmlu", "wikitext"]
    for task in found["tasks"]:
        assert [one["mode"] for one in task["outcomes"]] == ["off", "exact", "fast"]
        assert fits(task["outcomes"], [OUTCOME])
        assert task["outcomes"][1]["same"] == task["outcomes"][1]["questions"] == 2
    assert (
        found["command"].startswith("tide eval") and found["date"] and found["hardware"]["cores"] and found["packages"]["torch"]
    )
    kept = (tmp_path / "run.answers.jsonl").read_text().splitlines()
    assert len(kept) == 1 + 4 * 2 * 3


def test_eval_goes_on_and_refuses_other_settings(warm, asked, tmp_path):
    assert warm.tide("eval", *asked, "--tasks", "gsm8k").returncode == 0
    kept = (tmp_path / "run.answers.jsonl").read_bytes()
    done = warm.tide("eval", *asked, "--tasks", "gsm8k")
    assert done.returncode == 0 and "going on: 6 answers are in" in done.stderr
    assert "gsm8k: 2 questions, exact_match" in done.stdout and "2 of 2" in done.stdout
    done = warm.tide("eval", *asked, "--tasks", "gsm8k", "--threshold", 0.5, "--threshold", 0.9)
    assert (
        done.returncode == 1
        and "results of other settings: found compared ['off', 'exact', 'fast 0.5', 'fast 0.9']" in done.stderr
    )
    done = warm.tide("eval", *asked, "--tasks", "gsm8k", "--max-new-tokens", 7)
    assert done.returncode == 1 and "found max_new_tokens 7 instead of 6" in done.stderr
    assert (tmp_path / "run.answers.jsonl").read_bytes() == kept


def test_eval_keeps_the_tasks_that_a_file_has(warm, asked, tmp_path):
    path = tmp_path / "run.json"
    assert warm.tide("eval", *asked, "--tasks", "gsm8k,mmlu").returncode == 0
    gsm8k, _ = json.loads(path.read_text())["tasks"]
    assert warm.tide("eval", *asked, "--tasks", "mmlu,wikitext").returncode == 0
    found = json.loads(path.read_text())
    assert [one["task"] for one in found["tasks"]] == ["gsm8k", "mmlu", "wikitext"]
    assert found["tasks"][0] == gsm8k and found["tasks"][2]["command"] == found["command"] != gsm8k["command"]
    (tmp_path / "run.answers.jsonl").unlink()
    kept = path.read_bytes()
    done = warm.tide("eval", *asked, "--tasks", "mmlu", "--mode", "exact")
    assert done.returncode == 1 and "results of other settings: found compared" in done.stderr
    path.write_text("[]")
    done = warm.tide("eval", *asked, "--tasks", "mmlu")
    assert done.returncode == 1 and "found something else. Choose another --output" in done.stderr
    path.write_bytes(kept)


def test_eval_does_not_go_on_with_a_threshold_that_differs_a_little(warm, asked, tmp_path):
    given = ("eval", *asked, "--tasks", "gsm8k", "--mode", "fast")
    assert warm.tide(*given, "--threshold", 0.99999951).returncode == 0
    done = warm.tide(*given, "--threshold", 1)
    assert done.returncode == 1 and "found compared ['off', 'fast 1.0'] instead of ['off', 'fast 0.99999951']" in done.stderr


def test_answers_with_other_exits_are_told_apart(tmp_path):
    """A router file by its content, a folder or a hub id by its name: `tide eval --router` takes all three."""
    file = tmp_path / "router.safetensors"
    file.write_bytes(b"one")
    one = _identity(file)
    file.write_bytes(b"other")
    assert _identity(file) != one
    assert _identity(tmp_path) == str(tmp_path) and _identity(Path("my-org/my-head")) == "my-org/my-head"
