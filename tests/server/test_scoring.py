"""Prompts that are scored, by `echo` with `logprobs`: in pieces, through the queue of answers, and with the same limits."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from test_metrics import read, total

from policies import Everyone
from servers import tiny
from TIDE import TIDE
from TIDE.server import ServerSettings
from TIDE.server.errors import INTERNAL
from TIDE.server.scoring import PIECE, PromptScorer

SCORED = dict(max_tokens=0, echo=True, logprobs=2)
LONG = "The quick brown fox. " * 30  # 630 tokens: five pieces


@pytest.fixture
def slow(monkeypatch):
    """Every piece takes this long; returns the prompts whose pieces were scored."""

    def slowed(seconds: float) -> list[int]:
        plain, scored = PromptScorer.score_piece, []

        def score_piece(scorer):
            time.sleep(seconds)
            scored.append(len(scorer.ids))
            plain(scorer)

        monkeypatch.setattr(PromptScorer, "score_piece", score_piece)
        return scored

    return slowed


def scored(server, prompt: object = LONG, **more: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=SCORED | {"prompt": prompt} | more, timeout=240)


@pytest.mark.parametrize("length", [1, 2, PIECE, PIECE + 1, PIECE + 2, 630])
def test_scores_are_the_models_own_whatever_the_length(length):
    model, tokenizer = tiny()
    ids = tokenizer(LONG)["input_ids"][:length]
    with TIDE(model, Everyone(1)) as engine:
        scorer = PromptScorer(engine, ids, top=2)
        while not scorer.is_done:
            scorer.score_piece()
    first, *rest = scorer.found
    assert first == ids[0] and [one.token for one in rest] == ids[1:]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    for place, found in enumerate(rest):
        expected = torch.log_softmax(logits[place], -1)
        assert found.logprob == pytest.approx(float(expected[found.token]), abs=1e-4)
        assert [value for _, value in found.top] == pytest.approx(expected.topk(2).values.tolist(), abs=1e-4)


def test_there_are_never_logits_of_more_than_a_piece(server, monkeypatch):
    most, plain = [], torch.log_softmax

    def log_softmax(logits, *options):
        most.append(len(logits))
        return plain(logits, *options)

    monkeypatch.setattr(torch, "log_softmax", log_softmax)
    assert scored(server).status_code == 200
    assert max(most) == PIECE and sum(most) == len(LONG) - 1


def test_scores_have_a_place_in_the_queue_and_a_time_limit(another, slow):
    server = another(ServerSettings(max_rows=1, max_queue=1, request_seconds=0.5), router=None)
    slow(0.3)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: scored(server), range(6)))
    assert {answer.status_code for answer in answers} == {408, 429}
    late, full = (next(one for one in answers if one.status_code == status) for status in (408, 429))
    assert late.json()["error"]["message"] == "the answer took longer than 0.5 s. Send a shorter prompt."
    assert int(full.headers["retry-after"]) >= 1
    assert server.is_idle() and scored(server, "x").status_code == 200


def test_one_place_is_enough_for_a_prompt_that_is_scored_and_answered(another):
    server = another(ServerSettings(max_rows=1, max_queue=0), router=None)
    choice = scored(server, "Hello", max_tokens=4, temperature=0).json()["choices"][0]
    assert len(choice["logprobs"]["tokens"]) == 5 + 4
    written = server.post("/v1/completions", prompt="Hello", max_tokens=4, temperature=0).json()["choices"][0]
    assert choice["text"] == f"Hello{written['text']}"


def test_scores_that_nobody_waits_for_are_given_up(another, slow):
    server = another(ServerSettings(max_rows=1), router=None)
    pieces = slow(0.2)
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=SCORED | {"prompt": LONG}, timeout=0.1)
    assert server.post("/v1/completions", prompt="x", max_tokens=1).status_code == 200
    assert len(pieces) <= 3 and server.is_idle()


def test_rows_go_on_between_pieces(server_without_exits, slow, monkeypatch):
    server = server_without_exits
    slow(0.05)
    steps, step = [], server.worker.engine.step

    def counted():
        steps.append(len(server.worker.decoder.scoring))
        return step()

    monkeypatch.setattr(server.worker.engine, "step", counted)
    with ThreadPoolExecutor(4) as threads:
        written = threads.submit(server.post, "/v1/completions", prompt="Hello", max_tokens=300, ignore_eos=True)
        while not server.worker.decoder.running:
            time.sleep(0.005)
        answers = list(threads.map(lambda _: scored(server), range(3)))
        assert written.result().status_code == 200
    assert {answer.status_code for answer in answers} == {200}
    assert sum(count > 0 for count in steps) >= 3 * 4, "a step behind every piece"


def test_scores_are_counted(server_without_exits):
    server = server_without_exits
    before = read(server)
    assert scored(server, ["Hello", "You"]).status_code == 200 and server.is_idle()
    after = read(server)
    for name, count in (("prompt_tokens", 8), ("request_success", 2), ("generation_tokens", 0)):
        own = (total(found[f"tide:{name}"], f"tide:{name}_total") for found in (before, after))
        assert -next(own) + next(own) == count, name


def test_a_stop_finishes_scores_and_the_answers_behind_them(another, slow):
    server = another(router=None)
    slow(0.1)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(scored, server, max_tokens=tokens) for tokens in (0, 4)]
        while len(server.worker._open) < 2:
            time.sleep(0.005)
        server.server.should_exit = True
        answers = [one.result().json() for one in asked]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [0, 4]


def test_a_prompt_that_cannot_be_scored_fails_alone(server_without_exits, monkeypatch):
    server = server_without_exits
    failed = threading.Event()

    def score_piece(scorer):
        failed.set()
        raise torch.OutOfMemoryError("no memory on /dev/card")

    with monkeypatch.context() as patched:
        patched.setattr(PromptScorer, "score_piece", score_piece)
        answer = scored(server)
    assert failed.is_set() and answer.status_code == 500 and answer.json()["error"]["message"] == INTERNAL
    assert server.http.get("/health").status_code == 200 and scored(server).status_code == 200


@pytest.mark.parametrize("logprobs", [None, 1])
def test_an_echo_alone_is_streamed_where_that_is_asked_for(server, logprobs):
    """Several prompts, several times: a chunk for each, then the usage."""
    asked = dict(prompt=["Hello", "You"], n=2, max_tokens=0, echo=True, logprobs=logprobs)
    whole = server.post("/v1/completions", **asked).json()
    streamed = dict(asked, stream=True, stream_options={"include_usage": True})
    with server.http.stream("POST", "/v1/completions", json=streamed) as answer:
        *chunks, usage, done = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream") and done == "[DONE]"
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    assert choices == whole["choices"] and [choice["text"] for choice in choices] == ["Hello", "Hello", "You", "You"]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert json.loads(usage)["usage"] == whole["usage"] and json.loads(usage)["choices"] == []


def test_a_streamed_answer_begins_with_its_scored_prompt(server):
    asked = dict(prompt="Hello", max_tokens=6, n=2, echo=True, logprobs=1, temperature=0, ignore_eos=True)
    whole = server.post("/v1/completions", **asked).json()["choices"]
    texts, tokens = ["", ""], [0, 0]
    with server.http.stream("POST", "/v1/completions", json=dict(asked, stream=True)) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line][:-1]
    for choice in (json.loads(line)["choices"][0] for line in lines):
        texts[choice["index"]] += choice["text"]
        tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert texts == [choice["text"] for choice in whole] and texts[0].startswith("Hello")
    assert tokens == [11, 11]
