"""Two replicas on Ray Serve, one of them killed under load."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from servers import tiny

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from TIDE.server.replicas import _settings, app
from TIDE.server.settings import ServerSettings

PORT = 8731


def test_arguments_are_read_as_what_they_are():
    given = dict(model="m", api_keys="a,b", max_rows="3", drain_seconds="1.5", vllm_metrics="true", max_model_len="99")
    asked = ServerSettings(api_keys=("a", "b"), max_rows=3, drain_seconds=1.5, vllm_metrics=True, max_model_len=99)
    assert _settings(given) == asked
    assert _settings(dict(api_keys="a, b", names=" m ,n", salted_keys="True", vllm_metrics="FALSE")) == ServerSettings(
        api_keys=("a", "b"), names=("m", "n"), salted_keys=True
    )
    with pytest.raises(ValueError, match="salted_keys must be true or false, found 'yes'"):
        _settings(dict(salted_keys="yes"))
    with pytest.raises(ValueError, match="there is no argument 'modle'"):
        app({"modle": "m"})


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    import ray
    from ray import serve

    folder = tmp_path_factory.mktemp("tiny")
    loaded = tiny()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    serve.start(http_options=dict(host="127.0.0.1", port=PORT))
    serve.run(app(dict(model=str(folder), replicas="2", cpus="0.1", max_queue="50", names="tiny")), name="tide")
    yield f"http://127.0.0.1:{PORT}"
    serve.shutdown()
    ray.shutdown()


def ask(url: str, seed: int = 0, **headers: str) -> httpx.Response:
    body = dict(prompt="Hello", max_tokens=40, seed=seed, ignore_eos=True)
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=240)


def replicas() -> list[int]:
    """The processes of replicas, by the titles that Ray gives them."""
    titles = {path.parent.name: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()}
    return [int(process) for process, title in titles.items() if title.startswith(b"ray::ServeReplica")]


def test_a_conversation_stays_on_its_replica(url):
    """A session's own replica counts its requests, and its metrics are read by the same session."""

    def counted(name: str) -> float:
        text = httpx.get(f"{url}/metrics", headers={"x-session-id": name}, timeout=240).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("tide:request_success_total"))

    for name in ("a", "b", "c", "d"):
        before = counted(name)
        for _ in range(4):
            assert ask(url, **{"x-session-id": name}).status_code == 200
        assert counted(name) == before + 4


def test_a_replica_that_is_killed_under_load_is_replaced_and_answers_stay_the_same(url):
    expected = [ask(url, seed).json()["choices"][0]["text"] for seed in range(8)]
    before = replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(ask, url, number % 8) for number in range(48)]
        time.sleep(0.5)
        os.kill(before[0], signal.SIGKILL)
        answers = [one.result() for one in asked]
    good = [(number, answer) for number, answer in enumerate(answers) if answer.status_code == 200]
    assert len(good) >= 30, [answer.status_code for answer in answers]
    assert all(answer.json()["choices"][0]["text"] == expected[number % 8] for number, answer in good)
    assert {answer.status_code for answer in answers} <= {200, 500, 503}, "what was lost is an error, not silence"
    until = time.monotonic() + 240
    while len(replicas()) < 2:
        assert time.monotonic() < until, "nobody took its place"
        time.sleep(0.5)
    assert ask(url).json()["choices"][0]["text"] == expected[0]
