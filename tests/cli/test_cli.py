"""The console script, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def tide(*arguments: str) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).with_name("tide")
    return subprocess.run([script, *arguments], capture_output=True, text=True, timeout=280)


def test_version_and_help():
    assert tide("--version").stdout.startswith("tide-inference 0.")
    assert "demo" in tide("--help").stdout


@pytest.mark.real
def test_the_demo_shows_text_speed_and_stats():
    done = tide("demo", "--max-new-tokens", "12", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert "model.generate" in done.stdout
    assert "TIDE, exits off" in done.stdout
    assert "tok/s" in done.stdout
    assert done.stdout.count("same text yes") == 2
    assert "TIDE, exact exits" in done.stdout
    assert "Total tokens: 12" in done.stdout


def test_the_benchmark_runs_on_a_tiny_model():
    command = [sys.executable, ROOT / "benchmarks" / "bench_decode.py", "--model", "tiny", "--new-tokens", "8", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["same_text"] is True
    assert set(report["results"]) == {"model.generate", "TIDE, exits off"}


def test_the_first_tokens_of_prompts_are_timed_on_a_tiny_model():
    command = [sys.executable, ROOT / "benchmarks" / "bench_prefill.py", "--model", "tiny", "--tokens", "40", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["results"]
    assert row["tokens"] == 40 and row["generate_ms"] > 0 and row["tide_ms"] > 0
