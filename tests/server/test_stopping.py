"""A server that is told to stop: by the command itself, with signals."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time

import httpx
import pytest

from families import build
from servers import SPECIAL, bytewise

KEY = {"Authorization": "Bearer k"}
ENDLESS = dict(prompt="Hello", max_tokens=60000, ignore_eos=True, temperature=0, stream=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose answers take minutes."""
    found = tmp_path_factory.mktemp("tiny")
    build("llama", vocab_size=len(SPECIAL) + 256, max_position_embeddings=65536).save_pretrained(found)
    bytewise().save_pretrained(found)
    return found


@contextlib.contextmanager
def serving(folder, drain_seconds: float):
    """The command, and an endless answer that has begun."""
    command = [sys.executable, "-m", "TIDE.cli.app", "serve", str(folder), "--no-exits", "--port", "0", "--json"]
    listening = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # shells tell their background jobs not to
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TIDE_API_KEY": "other, k"})
    with subprocess.Popen([*command, "--drain-seconds", str(drain_seconds)], preexec_fn=listening, **options) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            with (
                httpx.Client(base_url=url, timeout=240, headers=KEY) as client,
                client.stream("POST", "/v1/completions", json=ENDLESS) as answer,
            ):
                lines = answer.iter_lines()
                next(lines)
                yield process, url, lines
        finally:
            process.kill()


def test_health_is_503_until_the_last_answer_has_ended(folder):
    """On connections that are kept and on new ones; other requests are refused in the same way."""
    with (
        serving(folder, drain_seconds=3) as (process, url, lines),
        httpx.Client(base_url=url, timeout=240, headers=KEY) as kept,
    ):
        assert kept.get("/health").status_code == 200
        process.send_signal(signal.SIGTERM)
        while kept.get("/health").status_code == 200:
            time.sleep(0.02)
        assert kept.get("/health").status_code == httpx.get(f"{url}/health", timeout=240).status_code == 503
        refused = httpx.post(f"{url}/v1/completions", json=dict(prompt="x"), timeout=240, headers=KEY)
        assert refused.status_code == 503 and "this server is stopping" in refused.json()["error"]["message"]
        *_, error, done = (line.removeprefix("data: ") for line in lines if line)
        assert "this server is stopping" in error and done == "[DONE]"
        out, log = process.communicate(timeout=60)
        assert process.returncode in (0, -signal.SIGTERM) and out == "" and "Traceback" not in log
        asked = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert sorted(line["status"] for line in asked if line["path"] == "/v1/completions") == [200, 503]
        assert any(line.startswith("warm-up: ") for line in log.splitlines())
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", timeout=240)


@pytest.mark.full
def test_a_second_signal_ends_the_server_at_once(folder):
    with serving(folder, drain_seconds=200) as (process, url, lines):
        process.send_signal(signal.SIGINT)
        while httpx.get(f"{url}/health", timeout=240).status_code == 200:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        *_, error, done = (line.removeprefix("data: ") for line in lines if line)
        assert "this server is stopping" in error and done == "[DONE]"
        code = process.wait(60)
        assert time.monotonic() - began < 20
        assert code == 130 and "Traceback" not in process.stderr.read()
