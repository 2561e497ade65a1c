"""Requests that are wrong: OpenAI's error shape, the right status, one line of log, and nothing of the server's insides."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from servers import Running, tiny
from TIDE.server import ServerSettings
from TIDE.server.requests import ChatRequest, CompletionRequest, DetokenizeRequest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}


def schema(**own: object) -> dict:
    return HI | {"response_format": {"type": "json_schema", "json_schema": {"schema": own}}}


def calls(choice: object, *parameters: object) -> dict:
    tools = [{"type": "function", "function": {"name": "f", "parameters": own}} for own in parameters]
    return HI | {"tools": tools, "tool_choice": choice}


A_FUNCTION = {"type": "function", "function": {"name": "g"}}


# what is asked for, where it is wrong -> a part of what is said
TABLE = {
    "unknown field": (CHAT, HI | {"best_of": 2}, "best_of", "no field 'best_of'"),
    "unknown field inside": (CHAT, HI | {"stream_options": {"usage": True}}, "stream_options", "stream_options.usage"),
    "number as text": (CHAT, HI | {"temperature": "1"}, "temperature", "valid number"),
    "truth as number": (CHAT, HI | {"stream": 1}, "stream", "valid boolean"),
    "no messages": (CHAT, {}, "messages", "expected a value for 'messages'"),
    "empty messages": (CHAT, {"messages": []}, "messages", "at least 1"),
    "an image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'text'"),
    "a role the template refuses": (CHAT, {"messages": [{"role": "tool", "content": ""}]}, "messages", "no such role"),
    "an unknown role": (CHAT, {"messages": [{"role": "wizard", "content": ""}]}, "messages", "'developer', found 'wizard'"),
    "another modality": (CHAT, HI | {"modalities": ["text", "audio"]}, "modalities", "modalities.1: Input should be 'text'"),
    "a voice": (CHAT, HI | {"audio": {"voice": "x"}}, "audio", "no field 'audio'"),
    "a text to end in": (TEXT, {"prompt": "x", "suffix": "y"}, "suffix", "no field 'suffix'"),
    "the best of several": (TEXT, {"prompt": "x", "n": 2, "best_of": 3}, "best_of", "best_of must be n, 2, found 3"),
    "negative temperature": (CHAT, HI | {"temperature": -1}, "temperature", "greater than or equal to 0"),
    "a penalty of next to nothing": (CHAT, HI | {"repetition_penalty": 5e-324}, "repetition_penalty", "equal to 0.01"),
    "top_p of nothing": (CHAT, HI | {"top_p": 0}, "top_p", "greater than 0"),
    "n of nothing": (CHAT, HI | {"n": 0}, "n", "greater than or equal to 1"),
    "n of hundreds": (CHAT, HI | {"n": 1000}, "n", "less than or equal to 64"),
    "too many logprobs": (CHAT, HI | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    "top_logprobs alone": (CHAT, HI | {"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    "stream_options alone": (CHAT, HI | {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    "a seed of 70 bits": (CHAT, HI | {"seed": 2**70}, "seed", "less than"),
    "bias of a word": (CHAT, HI | {"logit_bias": {"foo": 0}}, "logit_bias", "token ids from 0 to 260, found 'foo'"),
    "bias of a token too far": (CHAT, HI | {"logit_bias": {"261": 0}}, "logit_bias", "token ids from 0 to 260"),
    "a stop token too far": (CHAT, HI | {"stop_token_ids": [-1]}, "stop_token_ids", "from 0 to 260, found -1"),
    "stops by the hundred": (CHAT, HI | {"stop": [str(n) for n in range(200)]}, "stop", "at most 32"),
    "an empty stop": (CHAT, HI | {"stop": [""]}, "stop", "at least 1 character"),
    "min above max": (CHAT, HI | {"max_tokens": 2, "min_tokens": 3}, "min_tokens", "at most max_tokens, 2"),
    "tools of a model without": (
        CHAT,
        HI | {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "Send tool_choice 'required'",
    ),
    "tool_choice alone": (CHAT, HI | {"tool_choice": "auto"}, "tool_choice", "goes with tools"),
    "a tool without a name": (
        CHAT,
        HI | {"tool_choice": {"type": "function"}},
        "tool_choice",
        "'tool_choice.function'",
    ),
    "a tool that is not there": (CHAT, calls(A_FUNCTION, {}), "tool_choice", "names 'g'; the tools are 'f'"),
    "required without tools": (CHAT, HI | {"tool_choice": "required"}, "tool_choice", "goes with tools"),
    "a call and a format": (CHAT, schema() | calls("required", {}), "tool_choice", "not both"),
    "tools of nonsense": (CHAT, calls("required", {"type": "gibberish"}), "tools", "this JSON schema cannot"),
    "a template option of ours": (CHAT, HI | {"chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs", "'tokenize'"),
    "no schema": (CHAT, HI | {"response_format": {"type": "json_schema"}}, "response_format", "schema, found none"),
    "an impossible schema": (CHAT, schema(type="string", minLength=9, maxLength=1), "response_format", "this JSON schema"),
    "a schema of nonsense": (CHAT, schema(type="gibberish"), "response_format", "this JSON schema"),
    "a lone surrogate": (TEXT, {"prompt": "\ud800"}, "prompt", "lone surrogate"),
    "an empty prompt": (TEXT, {"prompt": ""}, "prompt", "the prompt is empty"),
    "no prompts": (TEXT, {"prompt": []}, "prompt", "at least 1"),
    "a token too far": (TEXT, {"prompt": [5, 261]}, "prompt", "from 0 to 260, found 261"),
    "mixed prompts": (TEXT, {"prompt": ["a", 1]}, "prompt", "valid"),
    "a prompt past the context": (
        TEXT,
        {"prompt": [5] * 1025},
        "prompt",
        "1024 tokens, and the prompt has 1025",
    ),
    "a prompt that leaves no room": (TEXT, {"prompt": [5] * 1024}, "prompt", "An answer needs one more"),
    "more than there is room for": (TEXT, {"prompt": [5] * 1000, "max_tokens": 25}, "max_tokens", "room for 24, and 25"),
    "too many tokens": (CHAT, HI | {"max_tokens": 5000}, "max_tokens", "5000"),
    "too many completion tokens": (CHAT, HI | {"max_completion_tokens": 5000}, "max_completion_tokens", "5000"),
    "a message that leaves no room": (CHAT, {"messages": [HI["messages"][0] | {"content": "x" * 1021}]}, "messages", "shorten"),
    "more tokens than there is a text for": ("/detokenize", {"tokens": [7] * 5000}, "tokens", "5000"),
    "a text that cannot fit": (TEXT, {"prompt": "x" * 100_000}, "prompt", "100000 characters cannot fit"),
    "no tokens and no echo": (TEXT, {"prompt": "x", "max_tokens": 0}, "max_tokens", "echo=true"),
    "nothing to tokenize": ("/tokenize", {}, "prompt", "either prompt or messages"),
    "no such token": ("/detokenize", {"tokens": [2**40]}, "tokens", "found 1099511627776"),
}


def checked(answer, status: int, param: str | None = None) -> str:
    """The message of an error, whose shape is OpenAI's."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["code"] == status and error["param"] == param
    assert "Traceback" not in answer.text and ".py" not in answer.text and "/tmp" not in answer.text
    return error["message"]


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_field_is_refused_by_its_name(server, name):
    path, body, param, said = TABLE[name]
    server.log.lines.clear()
    answer = server.http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert said in checked(answer, 400, param)
    (line,) = map(json.loads, server.lines(1))
    assert line["status"] == 400 and said in line["error"] and line["id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b"null", b'"text"', b'{"prompt": "\xff"}', b"{" * 100_000, b'{"prompt": NaN}', b"\x00"]
)
def test_bodies_that_are_no_objects_are_refused(server, body):
    answer = server.http.post(TEXT, content=body, headers={"Content-Type": "application/json"})
    checked(answer, 400, "prompt" if b"NaN" in body else None)


MANY = 2000


@pytest.mark.parametrize(
    "body",
    [
        dict(prompt=[[]] * MANY),
        dict(prompt=[1.5] * MANY),
        dict(prompt=[[1]] * MANY + [["x"]] * MANY),
        dict(messages=[{}] * MANY),
        dict(messages=[dict(role="user", content=[{}] * MANY)]),
        dict(messages=[dict(role="user", tool_calls=[1] * MANY)]),
        dict(messages=[dict(role="user")], tools=[{}] * MANY),
        dict(tokens=["x"] * MANY),
    ],
    ids=lambda body: "-".join(body),
)
def test_validation_stops_at_the_first_fault_of_each_kind(body):
    """Pydantic would list them all, which takes seconds for a body that is not too large."""
    kind = CompletionRequest if "prompt" in body else ChatRequest if "messages" in body else DetokenizeRequest
    with pytest.raises(ValidationError) as found:
        kind.model_validate(dict(body, model="tide"))
    assert found.value.error_count() < 10


def test_a_body_of_another_type_is_refused(server):
    said = checked(server.http.post(TEXT, content=b"prompt=x", headers={"Content-Type": "text/plain"}), 400)
    assert "Content-Type: application/json" in said


def test_an_unknown_model_route_or_method_is_named(server):
    assert "there is no model 'gpt' here" in checked(server.post(TEXT, prompt="x", model="gpt"), 404, "model")
    said = checked(server.http.get("/v2/models"), 404)
    assert said.startswith("there is no /v2/models here. There are ") and "/v1/chat/completions, /v1/completions, " in said
    said = checked(server.post("/v1/responses", input="x"), 404)
    assert (
        "no /v1/responses here: answers are not stored. Send the whole conversation to /v1/chat/completions. There are" in said
    )
    assert "no /v1/responses/7 here: answers are not stored." in checked(server.http.get("/v1/responses/7"), 404)
    assert "returns no embeddings" in checked(server.post("/v1/embeddings", input="x"), 404)
    checked(server.http.get(TEXT), 405)


@pytest.mark.parametrize("path", ["/", "/health"])
def test_health_checkers_may_ask_for_headers_alone(server, path):
    answer = server.http.head(path)
    assert answer.status_code == 200 and not answer.content


@pytest.fixture(scope="module")
def strict():
    settings = ServerSettings(max_body=2048, api_keys=("first", "second"), cors_origins=("https://a.example",))
    running = Running(tiny(), settings=settings)
    yield running
    running.close()


def test_huge_bodies_are_refused_before_they_are_read(strict):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer first"}
    said = checked(strict.http.post(TEXT, json={"prompt": "x" * 4096}, headers=headers), 413)
    assert "2048 bytes at most" in said

    def pieces():
        yield from [b"x" * 1024] * 100

    checked(strict.http.post(TEXT, content=pieces(), headers=headers), 413)
    assert strict.http.get("/health").status_code == 200


def test_one_of_several_keys_lets_in_and_others_do_not(strict):
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json"):
        assert checked(strict.http.get(path), 401).startswith("expected a valid API key")
        for header in ("Bearer third", "first", "Basic first", "Bearer first,second", "Bearer f\xefrst"):
            checked(strict.http.get(path, headers={"Authorization": header.encode("latin-1")}), 401)
        for key in ("first", "second"):
            assert strict.http.get(path, headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert strict.http.get("/health").status_code == strict.http.get("/").status_code == 200


def test_other_origins_may_call_only_if_they_were_named(server, strict):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in server.http.options(TEXT, headers=asked).headers
    assert "access-control-allow-origin" not in server.http.get("/health", headers=asked).headers
    assert strict.http.options(TEXT, headers=asked).headers["access-control-allow-origin"] == "https://a.example"
    other = asked | {"Origin": "https://b.example"}
    assert "access-control-allow-origin" not in strict.http.options(TEXT, headers=other).headers


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_rows", 0),
        ("max_rows", 65),
        ("max_queue", -1),
        ("request_seconds", 0),
        ("max_model_len", 1),
        ("api_keys", (" ",)),
        ("max_body", 1),
    ],
)
def test_settings_that_cannot_work_are_refused(field, value):
    with pytest.raises(ValueError, match="must"):
        ServerSettings(**{field: value})


def test_a_context_longer_than_the_models_is_refused(another):
    with pytest.raises(ValueError, match="max_model_len must be at most the 1024 tokens"):
        another(ServerSettings(max_model_len=2048), tiny(), router=None)
