"""What goes wrong around a server: clients that go, that are slow, or too many; a model that fails; a signal to stop."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from properties import IS_LONG
from servers import Running, tiny
from TIDE.server import ServerSettings
from TIDE.server.errors import INTERNAL
from TIDE.server.job import Job
from TIDE.server.parsing import MessageParser

LONG = dict(prompt="Hello", max_tokens=900, ignore_eos=True, temperature=0)


def events(answer) -> list:
    lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


CLIENTS, SECONDS = (200, 0.5) if IS_LONG else (40, 0.2)


def hang_up(url: str, stream: bool) -> None:
    """Ask for much, and go away soon."""
    until = time.monotonic() + SECONDS
    with (
        contextlib.suppress(httpx.ReadTimeout),
        httpx.Client(base_url=url, timeout=SECONDS) as client,
        client.stream("POST", "/v1/completions", json=LONG | {"stream": stream}) as answer,
    ):
        for _ in answer.iter_lines():
            if time.monotonic() > until:
                return


@pytest.mark.long
def test_rows_of_clients_that_hang_up_are_given_up(server):
    """40 clients; with TIDE_LONG=1 there are 200 at once, and the next request is answered within five seconds."""
    server.log.lines.clear()
    with ThreadPoolExecutor(CLIENTS if IS_LONG else 16) as threads:
        list(threads.map(lambda number: hang_up(server.url, stream=number % 2 == 0), range(CLIENTS)))
    began = time.monotonic()
    assert server.post("/v1/completions", prompt="Hello", max_tokens=4).status_code == 200
    assert not IS_LONG or time.monotonic() - began < 5
    assert server.is_idle()
    lines = [json.loads(line) for line in server.lines(CLIENTS + 1)]
    assert sum(line["status"] == 499 for line in lines) >= 10  # those that were not streamed
    assert all(line.get("completion_tokens", 0) < LONG["max_tokens"] for line in lines)


def test_a_slow_reader_holds_up_nobody_and_loses_nothing(server):
    asked = LONG | {"max_tokens": 300}
    whole = server.post("/v1/completions", **asked).json()["choices"][0]["text"]
    body = json.dumps(asked | {"stream": True, "tide": {"details": True}}).encode()
    slow = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    slow.sendall(f"{head}Connection: close\r\n\r\n".encode() + body)
    assert server.post("/v1/completions", prompt="Hello", max_tokens=4).status_code == 200
    received = b""
    while part := slow.recv(65536):
        received += part
    slow.close()
    lines = [line[6:] for line in received.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole


def test_a_full_queue_says_when_to_come_again(another):
    small = another(ServerSettings(max_rows=1, max_queue=2))
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: small.post("/v1/completions", **LONG | {"max_tokens": 200}), range(8)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 1 <= len(refused) <= 5 and {answer.status_code for answer in answers} == {200, 429}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert refused[0].json()["error"]["type"] == "RateLimitError"
    assert len({answer.json()["choices"][0]["text"] for answer in answers if answer.status_code == 200}) == 1
    assert small.post("/v1/completions", prompt="x", n=4).status_code == 400, "more than there can ever be"
    assert small.is_idle()


def test_a_request_past_its_time_ends_with_an_error(another, monkeypatch):
    hasty = another(ServerSettings(request_seconds=0.2))
    late = hasty.post("/v1/completions", **LONG)
    assert late.status_code == 408 and late.headers["x-should-retry"] == "false"
    assert late.json()["error"]["message"] == "the answer took longer than 0.2 s. Ask for fewer tokens."
    patient, hasty_settings = ServerSettings(), hasty.worker.decoder.settings
    monkeypatch.setattr(hasty.worker.decoder, "settings", patient)
    with hasty.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert "choices" in next(lines)
        monkeypatch.setattr(hasty.worker.decoder, "settings", hasty_settings)
        *_, error, done = (line.removeprefix("data: ") for line in lines if line)
    assert json.loads(error)["error"]["code"] == 408 and done == "[DONE]"
    monkeypatch.setattr(hasty.worker.decoder, "settings", patient)
    assert hasty.is_idle() and hasty.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


@pytest.mark.parametrize(("asked", "param"), [(dict(prompt=["a"] * 4), "prompt"), (dict(prompt="a", n=4), "n")])
def test_more_answers_than_there_can_ever_be_are_refused_before_anything_is_tokenized(another, monkeypatch, asked, param):
    small = another(ServerSettings(max_rows=1, max_queue=2), router=None)
    monkeypatch.delattr(type(small.app.state.service.prompts), "of_text")
    error = small.post("/v1/completions", **asked).json()["error"]
    assert error["code"] == 400 and error["param"] == param
    assert error["message"] == "one request may ask for 3 answers at most, found 4. Ask for fewer."


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", dict(prompt="Hello", max_tokens=1)),
        ("/v1/chat/completions", dict(messages=[{"role": "user", "content": "Hello"}], max_tokens=1)),
        ("/tokenize", dict(prompt="Hello")),
        ("/detokenize", dict(tokens=[70, 71])),
    ],
)
def test_a_text_that_takes_long_to_tokenize_holds_up_nobody(server, monkeypatch, path, asked):
    prompts, is_tokenizing, may_go_on = server.app.state.service.prompts, threading.Event(), threading.Event()

    def slow(plain, *given, **named):
        is_tokenizing.set()
        assert may_go_on.wait(60)
        return plain(*given, **named)

    for name in ("of_text", "of_messages"):
        monkeypatch.setattr(prompts, name, functools.partial(slow, getattr(prompts, name)))
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(server.post, path, **asked)
        assert is_tokenizing.wait(60)
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200 and not answer.done()
        may_go_on.set()
        assert answer.result().status_code == 200


def failing(after: int, kind: type[Exception] = RuntimeError):
    """A model whose layers fail after so many passes; the engine runs them by its own modules."""
    loaded = tiny(attention_dropout=0.0)
    layer, passes = loaded.model.model.layers[0], []
    forward = layer.mlp.forward

    def run(states):
        passes.append(states)
        if len(passes) > after:
            raise kind("the card fell off /dev/bus")
        return forward(states)

    layer.mlp.forward = run
    return loaded


def test_a_model_that_fails_in_mid_stream_ends_every_request_with_an_error(another, monkeypatch):
    monkeypatch.setenv("TIDE_BACKEND", "modules")
    broken = another(model=failing(after=120), router=None)
    with ThreadPoolExecutor(3) as threads:
        whole = [threads.submit(broken.post, "/v1/completions", **LONG) for _ in range(2)]
        with broken.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            *chunks, error, done = events(answer)
    assert chunks and done == "[DONE]" and error["error"]["code"] == 500
    assert "/dev/bus" not in json.dumps(error)
    assert {one.result().status_code for one in whole} == {500}
    health, after = broken.http.get("/health"), broken.post("/v1/completions", prompt="x")
    assert health.status_code == after.status_code == 503 and after.headers["retry-after"]


@pytest.mark.parametrize("backend", ["modules", "numba"])
def test_an_answer_that_breaks_a_step_fails_alone(another, monkeypatch, backend):
    """The logits of one are NaN. By the model's modules that is an error of its row, in compiled layers of the step."""
    monkeypatch.setenv("TIDE_BACKEND", backend)
    loaded = tiny()
    weights = loaded.model.get_input_embeddings().weight
    poisoned = loaded.tokenizer("~", add_special_tokens=False)["input_ids"][0]
    weights.data[poisoned] = float("nan")
    server = another(model=loaded, router=None)
    asked = LONG | {"max_tokens": 60, "logit_bias": {str(poisoned): -100}}
    with ThreadPoolExecutor(1) as threads:
        good = threads.submit(server.post, "/v1/completions", **asked)
        while not server.worker.decoder.running:
            time.sleep(0.005)
        bad = server.post("/v1/completions", prompt="~", max_tokens=4)
    assert bad.status_code == 500 and "/" not in bad.json()["error"]["message"]
    assert good.result().status_code == 200 and good.result().json()["usage"]["completion_tokens"] == 60
    assert server.http.get("/health").status_code == 200
    assert server.post("/v1/completions", prompt="~", max_tokens=4).status_code == 500, "and alone"
    assert server.http.get("/health").status_code == 200 and server.post("/v1/completions", prompt="x").status_code == 200


@pytest.mark.parametrize("others", [True, False], ids=["among others", "alone"])
@pytest.mark.parametrize("fault", ["add", "read"])
def test_an_answer_that_fails_outside_of_a_step_fails_alone(server_without_exits, monkeypatch, fault, others):
    """There is no memory for one answer's row, or the tokens of one cannot be read."""
    server = server_without_exits
    engine, bad_ids = server.worker.engine, [50, 51, 52]
    add, read = engine.add, Job.read

    def failing_add(prompt, **options):
        if prompt["input_ids"].tolist() == [bad_ids]:
            raise torch.OutOfMemoryError("no memory on /dev/card")
        return add(prompt, **options)

    def failing_read(job):
        if job.spec.ids == bad_ids:
            raise KeyError("/usr/lib/tokenizer")
        return read(job)

    monkeypatch.setattr(*(engine, "add", failing_add) if fault == "add" else (Job, "read", failing_read))
    with ThreadPoolExecutor(1) as threads:
        good = threads.submit(server.post, "/v1/completions", **LONG | {"max_tokens": 100 if others else 1})
        while others and not server.worker.decoder.running:
            time.sleep(0.005)
        bad = server.post("/v1/completions", prompt=bad_ids, max_tokens=4)
    assert bad.status_code == 500 and bad.json()["error"]["message"] == INTERNAL
    assert good.result().status_code == 200 and server.is_idle()
    assert server.http.get("/health").status_code == 200
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200


def test_an_answer_that_cannot_be_parsed_in_mid_stream_ends_with_an_error(server_without_exits, monkeypatch):
    server = server_without_exits
    server.log.lines.clear()
    feed, fed = MessageParser.feed, []

    def failing_feed(parser, text, is_last=False):
        fed.append(text)
        if len(fed) == 3:
            raise TypeError("/usr/lib/parser")
        return feed(parser, text, is_last)

    monkeypatch.setattr(MessageParser, "feed", failing_feed)
    asked = dict(messages=[{"role": "user", "content": "Hello"}], max_tokens=900, ignore_eos=True, stream=True)
    with server.http.stream("POST", "/v1/chat/completions", json=asked) as answer:
        *chunks, error, done = events(answer)
    assert chunks and error["error"]["code"] == 500 and error["error"]["message"] == INTERNAL and done == "[DONE]"
    assert server.is_idle() and json.loads(server.lines(1)[-1])["error"] == INTERNAL


@pytest.mark.parametrize(
    "extreme",
    [dict(temperature=5e-324), dict(temperature=100), dict(top_p=5e-324), dict(min_p=1), dict(repetition_penalty=0.01)],
)
def test_extreme_settings_are_answered(server, extreme):
    assert server.post("/v1/completions", prompt="Hello", max_tokens=8, **extreme).status_code == 200


def test_a_stopping_server_finishes_its_requests_and_takes_no_others(router):
    running = Running(tiny(), router, ServerSettings(drain_seconds=240))
    with ThreadPoolExecutor(6) as threads:
        asked = [threads.submit(running.post, "/v1/completions", **LONG | {"max_tokens": 150}) for _ in range(6)]
        while len(running.worker._open) < 6:
            time.sleep(0.005)
        running.server.should_exit = True
        answers = [one.result() for one in asked]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {150}
    running.close()
    assert not running.worker._thread.is_alive()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{running.url}/health")


def memory() -> float:
    """MiB that this process has, the server in it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.long
def test_many_short_requests_leave_nothing_behind(server, monkeypatch):
    """60 requests; with TIDE_LONG=1 there are 10,000, and after the first thousand memory stays as it is."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps every line
    before = 0.0
    for number in range(10_000 if IS_LONG else 60):
        before = memory() if number == 1000 else before
        assert server.post("/v1/completions", prompt=f"x{number}", max_tokens=1).status_code == 200
    assert not IS_LONG or memory() - before < 8
    assert server.is_idle()
    gc.collect()
    assert sum(type(one) is Job for one in gc.get_objects()) < 10
    assert not server.worker.decoder.outbox and not server.worker.decoder.scoring
