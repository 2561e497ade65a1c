"""A small part of what schemathesis finds out by /openapi.json; docs/serving.md has the whole run."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

POSTS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
GETS = ("/v1/models", "/v1/models/{name}", "/health", "/version", "/metrics", "/")
few = settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def schema(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_the_description_names_every_route(server):
    assert set(server.http.get("/openapi.json").json()["paths"]) == {*POSTS, *GETS}


@pytest.mark.parametrize("path", POSTS)
def test_requests_that_the_schema_allows_never_break_the_server(server, schema, path):
    @few
    @given(case=schema[path]["POST"].as_strategy())
    def ask(case):
        body = case.body
        if isinstance(body, dict) and path.startswith("/v1/"):
            body = {name: value for name, value in body.items() if name not in ("max_completion_tokens", "min_tokens")}
            body |= {"max_tokens": 2, "n": 1}
        assert server.http.post(path, json=body).status_code in (200, 400, 404)

    ask()
