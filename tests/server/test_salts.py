"""Salts: whose texts share K/V with whose."""

from __future__ import annotations

import httpx
import pytest

from TIDE.server import ServerSettings


def salts_of(running, monkeypatch, asked: list[tuple[str, dict]]) -> list[str | None]:
    """The salts that the engine is given for requests with these keys and bodies."""
    found, add = [], running.worker.engine.add

    def noting(*given, **options):
        found.append(options["cache_salt"])
        return add(*given, **options)

    monkeypatch.setattr(running.worker.engine, "add", noting)
    for key, body in asked:
        headers = {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{running.url}/v1/completions", headers=headers, json=dict(prompt="Hi", max_tokens=1, **body))
        assert answer.status_code == 200, answer.text
    return found


@pytest.mark.parametrize("salted", [False, True])
def test_keys_are_salts_where_that_is_asked_for(salted, another, monkeypatch):
    running = another(ServerSettings(api_keys=("a", "b"), salted_keys=salted))
    asked = [("a", {}), ("b", {}), ("a", {}), ("a", {"cache_salt": "x"}), ("b", {"cache_salt": "x"})]
    first, second, again, with_salt, other = salts_of(running, monkeypatch, asked)
    assert first == again and first != with_salt and second != other
    assert (first != second) == (with_salt != other) == salted
    assert "a" not in (first or "").split(), "a key is not told"


def test_a_salt_is_a_short_string(server):
    assert server.post("/v1/completions", prompt="Hi", cache_salt=5).status_code == 400
    assert server.post("/v1/completions", prompt="Hi", cache_salt="x" * 300).status_code == 400
