"""`tide inspect`: all that a router file holds, or a line that says why not."""

from __future__ import annotations

import json
from collections import OrderedDict

import pytest
import torch

from commands import tide
from TIDE.routing.exits import Exit
from TIDE.routing.fingerprint import Fingerprint
from TIDE.routing.heads import HeadSizes, IdentityHead
from TIDE.routing.router import SIGNALS, Router
from TIDE.routing.router_file import RouterFile


@pytest.fixture
def file(tmp_path):
    def at(threshold: float, **figures: object) -> Exit:
        return Exit(IdentityHead(HeadSizes(64)), Router(64, 8, SIGNALS), threshold, figures)

    held = RouterFile(
        strategy="identity",
        exits={4: at(0.5, auroc=0.91234, agreement=0.8), 12: at(0.75, auroc=0.9, agreement=None)},
        checkpoints=(12,),
        max_pending=6,
        vocabulary=torch.arange(100),
        fingerprint=Fingerprint("LlamaForCausalLM", "Small-1B", 64, 16, 128, "0123", "4567"),
        config={"mode": "exact", "exit_threshold": None},
        facts={"tokens": 4000, "seconds": {"collect": 1.5, "fit": 20}},
        figures={
            "tokens_per_second": 30.5,
            "placement": [{"checkpoints": "12", "tok/s": 30.5}, {"checkpoints": "4, 12", "tok/s": 9}],
        },
    )
    held.save(tmp_path / "router.safetensors")
    return tmp_path / "router.safetensors"


def test_it_prints_all_of_the_file_if_asked_to(file):
    done = tide("inspect", file, "--all")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    for expected in (
        "model         Small-1B (LlamaForCausalLM, 16 layers of 64, vocabulary 128, weights 0123, tokenizer 4567)",
        "strategy      identity",
        "checkpoints   12 (of 4, 12)",
        "draft length  6",
        "vocabulary    100 of 128 tokens",
        "  depth  in use  threshold  agreement   auroc",
        "      4  no            0.5        0.8  0.9123",
        "     12  yes          0.75          -     0.9",
        "  mode            exact",
        "  exit_threshold  -",
        "  seconds.collect  1.5",
        "  tokens_per_second  30.5",
        "placement",
        "  12            30.5",
        "  4, 12            9",
    ):
        assert expected in lines, done.stdout
    assert any(line.startswith("made by       tide-inference 0.") for line in lines)


def test_json_is_the_whole_document(file):
    done = tide("inspect", file, "--json")
    assert json.loads(done.stdout) == RouterFile.load(file).as_dict()


def test_a_file_of_the_original_system_is_shown_too(tmp_path):
    weights = OrderedDict([("down.weight", torch.ones(8, 64)), ("up.weight", torch.ones(1, 8))])
    torch.save({"hidden_dim": 64, "bottleneck_dim": 8, "router_layers": {3: weights}}, tmp_path / "router.pt")
    done = tide("inspect", tmp_path / "router.pt", "--all")
    assert done.exit_code == 0
    assert "model         not named in the file" in done.stdout
    assert "  origin  tide-inference 0.2.1" in done.stdout
    assert tide("inspect", tmp_path / "router.pt", "--json").exit_code == 0


def test_the_default_file_is_shown_in_few_lines_and_its_speed_with_the_machine():
    done = tide("inspect", "default")
    assert done.exit_code == 0, done.output
    assert "expected speedup  2.909 on NVIDIA H200|bfloat16|torch-2.11.0+cu130" in done.stdout.splitlines()
    assert len(done.stdout.splitlines()) < 20 and done.stdout.endswith("all figures: --all\n")


WRONG_FILES = {
    '{"version": 1, "tokens": []}': "it is a run, which tide report shows",
    '{"contenders": []}': "it is results of tide bench",
    '[{"role": "user", "content": "Hello."}]': "it is a chat that tide chat saved",
    "[]": "it is JSON of another kind",
    "{": "it is no JSON",
}


@pytest.mark.parametrize("content", WRONG_FILES)
@pytest.mark.parametrize("command", [("inspect",), ("generate", "Hello.", "--router")])
def test_a_json_file_in_place_of_a_router_file_is_named_for_what_it_is(tmp_path, command, content):
    (tmp_path / "run.json").write_text(content)
    done = tide(*command, tmp_path / "run.json")
    assert done.exit_code == 2 and done.stdout == ""
    assert f"run.json is no router file: {WRONG_FILES[content]}" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", ["damaged.safetensors", "router.bin"])
def test_a_damaged_file_is_one_line_on_stderr(file, name):
    (file.parent / "damaged.safetensors").write_bytes(file.read_bytes()[:-10])
    (file.parent / "router.bin").touch()
    done = tide("inspect", file.parent / name)
    assert done.exit_code == 1 and done.stdout == ""
    assert name in done.stderr and len(done.stderr.splitlines()) == 1
