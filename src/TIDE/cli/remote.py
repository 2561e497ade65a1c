"""A chat with a server: any that speaks OpenAI's API. Depths are shown where it is one of ours."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

from TIDE.cli.answer import figures
from TIDE.cli.colours import legend, painted, show
from TIDE.cli.talk import Talk

FACTS = ("num_layers", "drafted", "accepted", "layers_run", "seed")  # that a server of ours tells


class RemoteTalk(Talk):
    """A chat with a server.

    Args:
        url: of the server, with or without /v1.
        model: the name to ask for; "default": the first that the server has.
        settings: those of `Talk`; with `depth` the server is asked for the depth of every token.
    """

    def __init__(self, url: str, model: str, *settings: Any) -> None:
        super().__init__(*settings)
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = self._first_model() if model == "default" else model
        self.record: dict[str, Any] = {}  # of the last answer

    @property
    def stats(self) -> str:
        """Facts known of the last answer; empty before the first."""
        numbers = {name: value for name, value in self.record.items() if isinstance(value, int | float)}
        return "\n".join(f"{name}: {round(value, 2)}" for name, value in numbers.items())

    def write(self, question: str) -> dict[str, Any]:
        body = dict(self.sampling.for_server(self.again), model=self.model, messages=self.asked(question), stream=True)
        body["stream_options"] = {"include_usage": True}
        if self.depth:
            body["tide"] = {"details": True}
        began, answer, tokens, reason = time.perf_counter(), "", 0, None
        depths: list[int] = []
        facts: dict[str, Any] = {}
        chunks = self._chunks(body)
        while (chunk := self._next(chunks)) is not None:
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
            for choice in chunk.get("choices") or ():
                details = choice.get("tide") or {}
                facts |= {name: details[name] for name in FACTS if details.get(name) is not None}
                depths += [token["depth"] for token in details.get("tokens", ())]
                answer += (piece := (choice.get("delta") or {}).get("content") or "")
                reason = choice.get("finish_reason") or reason
                if not self.as_json:
                    show(_coloured(details) if self.depth and details else "" if self.depth and depths else piece, nl=False)
            if self.ctrl_c.was_pressed:
                break
        seconds, tokens = time.perf_counter() - began, tokens or len(depths)
        self.record = dict(prompt=question, answer=answer, finish_reason=reason, tokens=tokens, seconds=seconds)
        self.record["tokens_per_second"] = tokens / seconds
        if depths:
            self.record |= dict(mean_depth=sum(depths) / len(depths), **facts, depths=depths)
        if not self.as_json:
            show(f"\n\n{legend(depths, facts['num_layers'])}" if depths else "")
        return self.record

    def figures(self, record: dict[str, Any]) -> str | None:
        """Servers tell the number of tokens at the end of an answer."""
        tokens, layers = record["tokens"], record.get("num_layers", 0)
        return figures(tokens, record["tokens_per_second"], record.get("mean_depth"), layers) if tokens else None

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open("/v1/chat/completions", body) as response:
            yield from _chunks(response)

    def _next(self, chunks: Iterator[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the next chunk; None at the end, and at a Ctrl-C, which does not wait for a server that keeps silent."""
        try:
            with self.ctrl_c.raised():
                return next(chunks, None)
        except KeyboardInterrupt:
            return None

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            body = response.read()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, TypeError, LookupError):
            said = f"the server at {self.url} names no model: /v1/models is {_said(body)[:200]!r}"
            raise ValueError(f"{said}. Name one: tide chat MODEL --url {self.url}") from None

    def _open(self, path: str, body: dict[str, Any] | None = None) -> http.client.HTTPResponse:
        """Send a request; raise an error that says what the server said."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("TIDE_API_KEY"):
            headers["Authorization"] = f"Bearer {key.split(',')[0].strip()}"
        data = None if body is None else json.dumps(body).encode()
        try:
            found: http.client.HTTPResponse = urllib.request.urlopen(
                urllib.request.Request(self.url + path, data, headers), timeout=600
            )
        except urllib.error.HTTPError as problem:
            raise ValueError(f"the server at {self.url} answered with status {problem.code}: {_said(problem.read())}") from None
        except (OSError, ValueError, http.client.HTTPException) as problem:
            reason = getattr(problem, "reason", problem)
            raise ConnectionError(f"there is no server at {self.url} ({reason}). Start one: tide serve") from None
        return found


def _chunks(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the chunks of a stream of server-sent events, which ends with [DONE] or with a reason for the end."""
    has_ended = False
    for line in _lines(response):
        data = line.decode("utf-8", "replace").strip()
        if not data.startswith("data:"):
            continue
        data = data.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            chunk = None
        if not isinstance(chunk, dict):
            raise ValueError(f"expected a JSON object from the server, found {data[:200]!r}. Is it one of OpenAI's API?")
        if chunk.get("error"):
            raise ValueError(f"the server broke off: {_said(data.encode())}")
        has_ended |= any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
        yield chunk
    if not has_ended:
        raise ConnectionError("the server broke off before the answer was complete. Ask again.")


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Yield the lines of a response, as far as they come: what is missing at their end is noticed by what they say."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        yield from response


def _coloured(details: dict[str, Any]) -> str:
    return "".join(painted(token["text"], token["depth"], details["num_layers"]) for token in details["tokens"])


def _said(body: bytes) -> str:
    """Return the message of an error, in whichever shape it came."""
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return body.decode("utf-8", "replace")[:200] or "nothing"
