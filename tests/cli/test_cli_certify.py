"""`tide certify` and `tide tune` on a tiny model with a random router file."""

from __future__ import annotations

import importlib.util

import pytest

import TIDE
from commands import tide
from eagle_heads import a_head
from TIDE.routing.router_file import RouterFile


def options(folder, router) -> list[object]:
    return [folder, "--router", router, "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 6]


LENIENT = ["--risk", 0.2, "--confidence", 0.8]


def test_another_file_may_be_written_and_the_first_stays(folder, router, tmp_path):
    before = router.read_bytes()
    strategy = ["--kv-cache-strategy", "zero_pad"]
    done = tide("certify", *options(folder, router), *LENIENT, *strategy, "--limit", 12, "-o", tmp_path / "new.safetensors")
    assert done.exit_code == 0, done.output
    assert "mean rouge_l loss" in done.stdout and "found on 12 prompts" in done.stdout
    assert "twice the smaller  at most 0.2\n" in done.stdout
    assert done.stdout.endswith("A threshold passes if twice the smaller p-value is at most 1 - confidence: 0.2.\n")
    assert router.read_bytes() == before
    assert RouterFile.load(tmp_path / "new.safetensors").certificate.settings.kv_cache_strategy == "zero_pad"


def test_the_shipped_file_is_not_written_over(folder, router, monkeypatch):
    monkeypatch.setattr(TIDE, "default_router", lambda: router)
    before = router.read_bytes()
    done = tide("certify", folder, "--router", "default", *options(folder, router)[3:], *LENIENT)
    assert done.exit_code == 0, done.output
    assert "not written: the shipped file stays as it is. Keep it with -o FILE." in done.stderr
    assert router.read_bytes() == before


@pytest.mark.full
def test_exits_of_a_folder_are_certified_into_a_file(folder, router, tmp_path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "router.safetensors").write_bytes(router.read_bytes())
    for name, strategy in ((a_head(tmp_path / "head", [1, 2, 3]), "eagle3"), (tmp_path / "hub", "memory")):
        done = tide("certify", *options(folder, name), *LENIENT)
        assert done.exit_code == 2 and done.stdout == "", "found before any work"
        assert f"expected -o FILE to write to: {name} is no router file" in done.stderr
        path = tmp_path / f"{strategy}.safetensors"
        done = tide("certify", *options(folder, name), *LENIENT, "-o", path)
        assert done.exit_code == 0, done.output
        assert "mean rouge_l loss" in done.stdout and f"written: {path}" in done.stderr
        found = RouterFile.load(path)
        assert found.strategy == strategy and found.certificate.prompts == 20
        with TIDE.TIDE(TIDE.load_model(folder).model, path, TIDE.TIDEConfig(mode="fast")) as engine:
            assert engine.policy.certificate == found.certificate


def test_a_certificate_that_cannot_be_written_is_printed(folder, router, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("TIDE.routing.router_file.add_certificate", full)
    done = tide("certify", *options(folder, router), *LENIENT)
    assert done.exit_code == 1 and "mean rouge_l loss" in done.stdout and "no space left" in done.stderr


def test_tune_prints_a_table_and_draws(folder, router, tmp_path):
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    figure = ["--figure", tmp_path / "out.png"] if has_matplotlib else []
    done = tide("tune", *options(folder, router), "--limit", 2, "--threshold", 0.9, "--threshold", 0.3, *figure)
    assert done.exit_code == 0, done.output
    lines = [line.split()[:3] for line in done.stdout.splitlines()[3:]]
    fast = [["fast", strategy, t] for strategy in ("exact", "propagate", "zero_pad") for t in ("0.9", "0.3")]
    assert lines[: 2 + len(fast)] == [["off", "-", "-"], ["exact", "exact", "-"], *fast]
    assert (tmp_path / "out.png").exists() == has_matplotlib


def test_prompts_are_counted_as_they_are_read(tmp_path, chatty):
    from TIDE.calibration.prompts import load_prompts
    from TIDE.cli.files import count_prompts

    lines = ['{"prompt": "a\u2028b"}', "", '{"question": "c", "answer": "d"}', '{"turns": ["e", "f"]}']
    lines += ['{"messages": [{"role": "user", "content": "g"}]}', '{"prompt": null, "question": "h"}']
    (tmp_path / "p.jsonl").write_bytes("\r\n".join(lines).encode())
    assert count_prompts(tmp_path / "p.jsonl") == len(load_prompts(tmp_path / "p.jsonl", chatty)) == 5
    (tmp_path / "p.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="holds no prompts"):
        count_prompts(tmp_path / "p.jsonl")


def test_the_shipped_file_is_taken_for_the_default_model():
    from TIDE.cli.router import router_path

    assert router_path("default", None) == router_path("default", "default") == router_path("x", "default")
    assert router_path("default", None) == TIDE.default_router()
