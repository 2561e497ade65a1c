"""EAGLE-3 heads on the command line: shown, used, and exported."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

import TIDE
from characters import TEMPLATE, characters
from commands import fits, tide
from eagle_heads import a_head
from families import build
from TIDE.adapters.adapter import ModelAdapter
from TIDE.routing.policies import for_model
from TIDE.routing.source import load_router

IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def head(tmp_path):
    return a_head(tmp_path / "head", [1, 2, 3], eagle_config={IDS: [0, 1, 2]})


def test_inspect_shows_a_head_and_with_a_model_how_it_is_read(head, folder):
    done = tide("inspect", head)
    assert done.exit_code == 0, done.output
    assert "strategy      eagle3" in done.stdout and "EAGLE-3 head, original layout" in done.stdout
    assert "not yet: which of the readings is right" in done.stdout
    assert "none: a draft's own probability is its score" in done.stdout
    done = tide("inspect", head, "--model", folder, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["facts"]["tried"].startswith("it sees states of the depths 1, 2, 3")
    assert found["exits"]["0"]["sizes"]["depths"] == [1, 2, 3] and "backend" in found


def test_generate_takes_a_head_as_router(head, folder):
    asked = ("generate", "Say it.", "--model", folder, "--max-new-tokens", 8, "--json")
    with_head, without = (tide(*asked, *more) for more in (("--router", head), ("--no-exits",)))
    assert with_head.exit_code == without.exit_code == 0, with_head.output
    assert json.loads(with_head.stdout)["answer"] == json.loads(without.stdout)["answer"]


@pytest.mark.parametrize("layout", ["vllm", "sglang", "speculators"])
def test_export_writes_a_head(layout, head, folder, tmp_path):
    done = tide("export", head, "--model", folder, "--to", tmp_path / "new", "--layout", layout, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert fits(found, dict(folder=str, layout=str, files=[str]))
    assert found["files"] == ["config.json", "model.safetensors"] and found["layout"] == layout
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config[IDS] == [1, 2, 3]
    if layout == "speculators":
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(folder)


def test_a_file_that_cannot_be_exported_is_one_line(head, folder, router, tmp_path):
    for file, said in ((router, "tide calibrate MODEL --strategy eagle3"), (head, "Give the model too (--model)")):
        done = tide("export", file, "--to", tmp_path / "new")
        assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
        assert "cannot be exported for vllm" in done.stderr and said in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_saved_head_is_exported_for_its_own_model_only(head, folder, tmp_path):
    """Its depths and its vocabulary exist in the other model, too."""
    with closing(ModelAdapter(TIDE.load_model(folder).model)) as adapter:
        for_model(load_router(head), adapter).save(tmp_path / "head.safetensors")
    build("llama", num_hidden_layers=6).save_pretrained(tmp_path / "other")
    characters(TEMPLATE).save_pretrained(tmp_path / "other")
    done = tide("export", tmp_path / "head.safetensors", "--model", tmp_path / "other", "--to", tmp_path / "new")
    assert done.exit_code == 1 and not (tmp_path / "new").exists()
    assert "head.safetensors was made for" in done.stderr and "They differ in num_layers, weights." in done.stderr
    done = tide("export", tmp_path / "head.safetensors", "--model", folder, "--to", tmp_path / "new")
    assert done.exit_code == 0, done.output
