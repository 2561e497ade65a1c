"""`tide chat --url`: a conversation with a server."""

from __future__ import annotations

import json

import pytest

from commands import tide
from TIDE.server import ServerSettings


def talk(url: str, *lines: str, options: tuple[object, ...] = ()):
    return tide("chat", "--url", url, "--max-new-tokens", 8, *options, stdin="".join(f"{line}\n" for line in lines))


def test_turns_are_answered_with_those_before_them(server):
    done = talk(server.url, "Hello", "And?", "/stats", "/reset", "Hello", options=("--json",))
    assert done.exit_code == 0, done.output
    first, second, again = map(json.loads, done.stdout.splitlines())
    assert first["prompt"] == "Hello" and first["tokens"] == second["tokens"] == 8
    assert again["answer"] == first["answer"] != second["answer"]
    assert "tokens: 8" in done.stderr and "conversation cleared." in done.stderr
    asked = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0)
    assert asked.json()["choices"][0]["message"]["content"] == first["answer"]


def test_depths_are_shown_where_the_server_is_one_of_ours(server, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    plain, coloured = (talk(f"{server.url}/v1", "Hello", options=own).stdout for own in ((), ("--depth",)))
    assert "\x1b[48;2;" in coloured and "\x1b[" not in plain
    (record,) = map(json.loads, talk(server.url, "Hello", options=("--depth", "--json")).stdout.splitlines())
    assert len(record["depths"]) == 8 and record["mean_depth"] == sum(record["depths"]) / 8


def test_a_key_comes_from_the_environment_and_errors_are_a_line(another, monkeypatch, server):
    locked = another(ServerSettings(api_keys=("k",)), router=None)
    done = talk(locked.url, "Hello")
    assert done.exit_code == 1 and "status 401: expected a valid API key" in done.stderr
    monkeypatch.setenv("TIDE_API_KEY", "k")
    assert talk(locked.url, "Hello").exit_code == 0
    done = talk(server.url, "x" * 2000, "Hello", options=("--json",))
    assert done.exit_code == 1 and "maximum context length is 1024" in done.stderr and len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--url", "http://127.0.0.1:9"), 1, "there is no server at http://127.0.0.1:9"),
        (("--url", "nonsense"), 1, "there is no server at nonsense"),
        (("--url", "http://127.0.0.1:9", "--no-exits"), 2, "--url goes without options of an engine"),
    ],
)
def test_a_server_that_is_not_there_is_named(options, code, said):
    done = tide("chat", *options, stdin="Hello\n")
    assert done.exit_code == code and said in done.stderr
