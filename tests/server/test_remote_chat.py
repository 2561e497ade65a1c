"""`tide chat --url`: a conversation with a server."""

from __future__ import annotations

import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from commands import Terminal, tide
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


def test_after_an_answer_come_its_figures_and_the_limit_that_cut_it(server):
    done = talk(server.url, "Hello", "/stats", options=("--depth",))
    figures, cut = done.stderr.splitlines()
    assert re.fullmatch(r"8 tokens, [\d.]+ tokens/s, mean depth [\d.]+ of 4 layers", figures)
    assert cut == "cut at 8 tokens. /set max_new_tokens 16 makes room for longer answers."
    assert "\ndecided " in done.stdout and re.search(r"^drafted: \d+$", done.stdout, re.MULTILINE)


def test_settings_of_an_answer_are_the_servers(server):
    given = ("--temperature", 1, "--seed", 5, "--top-k", 3, "--stop", "never", "--json")
    done = talk(server.url, "Hello", "/regenerate", "/set temperature 0", "/set stop", "Hello", options=given)
    first, again, greedy = map(json.loads, done.stdout.splitlines())
    asked = dict(messages=[{"role": "user", "content": "Hello"}], max_tokens=8, top_k=3)
    for record, own in ((first, dict(temperature=1, seed=5)), (again, dict(temperature=1, seed=6))):
        choice = server.post("/v1/chat/completions", **asked, **own).json()["choices"][0]
        assert (record["answer"], record["finish_reason"]) == (choice["message"]["content"], choice["finish_reason"])
    assert first["answer"] != again["answer"] and greedy["answer"] not in (first["answer"], again["answer"])


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
        (("--url", "http://127.0.0.1:abc"), 1, "there is no server at http://127.0.0.1:abc"),
        (("--url", "http://127.0.0.1:9", "--no-exits"), 2, "--url goes without options of an engine"),
    ],
)
def test_a_server_that_is_not_there_is_named(options, code, said):
    done = tide("chat", *options, stdin="Hello\n")
    assert done.exit_code == code and said in done.stderr


PIECE = b'data: {"choices": [{"index": 0, "delta": {"content": "Hi"}}]}\n\n'
USAGE = b'data: {"usage": {"completion_tokens": 3}}\n\n'
END = b'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}\n\n'
NO_ERROR = PIECE.replace(b"{", b'{"error": null, ', 1)
DONE = b"data: [DONE]\n\n"
MODELS = b'{"data": [{"id": "m"}]}'


@pytest.fixture
def replying():
    """Starts servers that say what they are told to."""
    started = []

    def start(models: bytes, events: bytes = b"", missing: int = 0) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(models)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(events)

            def reply(self, body: bytes) -> None:
                self.send_response(200)
                self.send_header("Content-Length", str(len(body) + missing))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        started.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=started[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{started[-1].server_port}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("events", [PIECE + DONE, PIECE + END, USAGE + PIECE + END + USAGE, NO_ERROR + DONE])
def test_streams_that_end_as_they_should_are_answers(replying, events):
    done = talk(replying(MODELS, events), "Hello", options=("--json",))
    assert done.exit_code == 0 and json.loads(done.stdout)["answer"] == "Hi", done.output


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (PIECE, "the server broke off before the answer was complete"),
        (b"", "the server broke off before the answer was complete"),
        (b"data: {oops\n\n", "expected a JSON object from the server, found '{oops'"),
        (b'data: {"error": {"message": "no more"}}\n\n', "the server broke off: no more"),
    ],
)
def test_a_stream_that_breaks_off_is_an_error_and_not_kept(replying, events, said):
    done = talk(replying(MODELS, events), "Hello", "/stats", options=("--json",))
    assert done.exit_code == 1 and said in done.stderr and "there is no answer yet" in done.stderr


def test_a_connection_that_breaks_off_is_an_error(replying):
    """Fewer bytes come than were announced."""
    done = tide("chat", "m", "--url", replying(MODELS, PIECE, missing=100), "--json", stdin="Hello\n")
    assert done.exit_code == 1 and "broke off" in done.stderr


@pytest.mark.parametrize("models", [b"[1]", b"<html>", b'{"data": []}', b'{"data": null}', b"{}"])
def test_a_server_that_names_no_model_is_an_error(replying, models):
    done = talk(replying(models), "Hello")
    assert done.exit_code == 1 and "names no model" in done.stderr and "tide chat MODEL --url" in done.stderr
    assert "should not happen" not in done.stderr


def test_a_port_that_speaks_something_else_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH\r\n")

        threading.Thread(target=greet, daemon=True).start()
        done = talk(f"http://127.0.0.1:{server.getsockname()[1]}", "Hello")
    assert done.exit_code == 1 and "there is no server at http://127.0.0.1" in done.stderr


def test_ctrl_c_ends_the_wait_for_a_server_that_keeps_silent():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        terminal = Terminal("chat", "m", "--url", f"http://127.0.0.1:{silent.getsockname()[1]}")
        terminal.wait_for("Ctrl-C stops the current answer.*\r\n> ")
        terminal.press("hello\n")
        connection, _ = silent.accept()
        with connection:
            assert connection.recv(99).startswith(b"POST /v1/chat/completions")
            terminal.press("\x03")
            terminal.wait_for("\r\n> ")
        terminal.press("/exit\n")
        assert terminal.exit_code() == 0
