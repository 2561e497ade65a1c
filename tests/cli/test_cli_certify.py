"""`tide certify` and `tide tune` on a tiny model with a random router file."""

from __future__ import annotations

import importlib.util
import json

import pytest

import TIDE
from characters import TEMPLATE, characters
from commands import tide
from families import build
from router_files import made
from TIDE.routing.router_file import RouterFile


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and prompts."""
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    characters(TEMPLATE).save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"Say {n}."}) for n in range(20)))
    return folder


@pytest.fixture
def router(tmp_path, folder):
    file = made("lens", TIDE.load_model(folder).model)
    file.save(tmp_path / "router.safetensors")
    return tmp_path / "router.safetensors"


def options(folder, router) -> list[object]:
    return [folder, "--router", router, "--prompts", folder / "prompts.jsonl", "--new-tokens", 6]


LENIENT = ["--risk", 0.2, "--confidence", 0.8]


def test_the_certificate_is_printed_and_kept_in_the_router_file(folder, router):
    done = tide("certify", *options(folder, router), *LENIENT, "--loss", "mismatch", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["loss"], found["prompts"], found["new_tokens"]) == ("mismatch", 20, 6)
    settings = {"kv_cache_strategy": "exact", "min_layers": 0, "max_pending": 5, "max_exit_share": 0.9, "dtype": "float32"}
    assert found["settings"] == settings
    assert RouterFile.load(router).certificate.as_dict() == found
    assert f"written: {router}" in done.stderr
    inspected = tide("inspect", router)
    assert "\ncertificate\n" in inspected.stdout and "mismatch" in inspected.stdout


def test_another_file_may_be_written_and_the_first_stays(folder, router, tmp_path):
    before = router.read_bytes()
    strategy = ["--kv-cache-strategy", "zero_pad"]
    done = tide("certify", *options(folder, router), *LENIENT, *strategy, "--limit", 12, "-o", tmp_path / "new.safetensors")
    assert done.exit_code == 0, done.output
    assert "mean rouge_l loss" in done.stdout and "found on 12 prompts" in done.stdout
    assert router.read_bytes() == before
    assert RouterFile.load(tmp_path / "new.safetensors").certificate.settings.kv_cache_strategy == "zero_pad"


def test_the_shipped_file_is_not_written_over(folder, router, monkeypatch):
    monkeypatch.setattr(TIDE, "default_router", lambda: router)
    before = router.read_bytes()
    done = tide("certify", folder, "--router", "default", *options(folder, router)[3:], *LENIENT)
    assert done.exit_code == 0, done.output
    assert "not written: the shipped file stays as it is. Keep it with -o FILE." in done.stderr
    assert router.read_bytes() == before


def test_tune_prints_a_table_and_draws(folder, router, tmp_path):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    plot = ["--plot", tmp_path / "out.png"] if has_matplotlib else []
    done = tide("tune", *options(folder, router), "--limit", 2, "--threshold", 0.9, "--threshold", 0.3, *plot)
    assert done.exit_code == 0, done.output
    lines = [line.split()[:3] for line in done.stdout.splitlines()[3:]]
    fast = [["fast", strategy, t] for strategy in ("exact", "propagate", "zero_pad") for t in ("0.9", "0.3")]
    assert lines == [["off", "-", "-"], ["exact", "exact", "-"], *fast]
    assert (tmp_path / "out.png").exists() == has_matplotlib


def test_tune_gives_json_of_the_strategies_asked_for(folder, router):
    done = tide("tune", *options(folder, router), "--limit", 1, "--threshold", 0.5, "--strategy", "zero_pad", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert [row["kv_cache_strategy"] for row in found["rows"]] == ["-", "exact", "zero_pad"]
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("command", "changes", "said"),
    [
        ("certify", [], "20 prompts are too few"),
        ("certify", ["--risk", 2], "risk must be a number between 0 and 1"),
        ("certify", ["--loss", "bleu"], "loss must be one of"),
        ("certify", ["--prompts", "missing.jsonl"], "missing.jsonl"),
        ("certify", ["--router", "missing.safetensors"], "there is no router file"),
        ("certify", ["-o", "out.txt"], "ends in .safetensors or .pt"),
        ("certify", ["--kv-cache-strategy", "magic"], "kv_cache_strategy must be one of"),
        ("tune", ["--prompts", "missing.jsonl"], "missing.jsonl"),
        ("tune", ["--plot", "out.xyz"], "out.xyz"),
    ],
)
def test_what_cannot_be_done_is_a_line_on_stderr(folder, router, command, changes, said, monkeypatch, tmp_path):
    if "--plot" in changes:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.chdir(tmp_path)
    before = router.read_bytes()
    done = tide(command, *options(folder, router), *changes)
    assert done.exit_code == 1 and done.stdout == ""
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert router.read_bytes() == before


def test_a_model_other_than_the_default_needs_a_router_file(folder):
    done = tide("certify", folder, "--prompts", folder / "prompts.jsonl")
    assert done.exit_code == 1
    assert "give --router FILE" in done.stderr


def test_the_shipped_file_is_taken_for_the_default_model():
    from TIDE.cli.router import router_path

    assert router_path("default", None) == router_path("default", "default") == router_path("x", "default")
    assert router_path("default", None) == TIDE.default_router()
