"""Messages as chat templates get them."""

from __future__ import annotations

import json

import pytest

from servers import bytewise, tiny
from TIDE.models.gguf import Loaded
from TIDE.server.errors import APIError
from TIDE.server.prompt import Prompts
from TIDE.server.requests import ChatRequest

# as Qwen 2.5 writes calls
WRITES_JSON = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}<call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</call>{% endfor %}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
# as Llama 3.1 looks for calls
ONE_CALL = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if not m.tool_calls | length == 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}{{ m.tool_calls[0].function.name }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
SHOWS_TOOLS = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}{{ more }}"


def shown(template: str, *messages: dict[str, object], **asked: object) -> str:
    """The text of a chat, as the model reads it."""
    tokenizer = bytewise(template)
    prompts = Prompts(tokenizer, 1000, len(tokenizer))
    return tokenizer.decode(prompts.of_messages(ChatRequest.model_validate(dict(messages=list(messages), **asked))))


def called(arguments: object) -> dict[str, object]:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"city": "Oslo"}', {"city": "Oslo"}), ({"city": "Oslo"}, {"city": "Oslo"}), ("", {}), (" ", {}), (None, {})],
)
def test_arguments_of_earlier_calls_are_shown_once_encoded(arguments, seen):
    message = called(arguments)
    before = json.dumps(message)
    text = shown(WRITES_JSON, message)
    assert json.loads(text.removeprefix("<call>").removesuffix("</call>")) == {"name": "f", "arguments": seen}
    plain = called(seen)
    assert text == bytewise(WRITES_JSON).apply_chat_template([plain], tokenize=False), "as transformers documents messages"
    assert json.dumps(message) == before


@pytest.mark.parametrize("arguments", ["{oh no", "[1]", "3", '"x"', "[" * 100_000, '{"a":' * 900 + "1" + "}" * 900])
def test_arguments_that_are_no_json_object_are_refused(arguments):
    tokenizer = bytewise(WRITES_JSON)
    with pytest.raises(APIError, match=r"tool_calls\[0\].function.arguments.*expected a JSON object") as caught:
        Prompts(tokenizer, None, len(tokenizer)).of_messages(ChatRequest.model_validate(dict(messages=[called(arguments)])))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_fields_without_a_value_are_not_shown_to_the_template():
    """`message.model_dump()` of the openai client has them all."""
    from openai.types.chat import ChatCompletionMessage

    said = ChatCompletionMessage(role="assistant", content="hi").model_dump()
    assert "tool_calls" in said and said["tool_calls"] is None
    assert shown(ONE_CALL, said) == "<assistant>hi"
    assert shown(ONE_CALL, said | {"tool_calls": []}) == "<assistant>hi"
    assert shown(ONE_CALL, called("{}") | {"refusal": None}) == "f"
    assert shown(ONE_CALL, {"role": "user", "content": None}) == "<user>"


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 20_000}}]},
        {"chat_template_kwargs": {"more": "x" * 20_000}},
    ],
    ids=["tools", "chat_template_kwargs"],
)
def test_all_that_a_template_shows_is_counted_before_it_is_tokenized(more, monkeypatch):
    tokenizer = bytewise(SHOWS_TOOLS)
    prompts = Prompts(tokenizer, 1000, len(tokenizer))
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *given, **options: pytest.fail("it was tokenized"))
    asked = ChatRequest.model_validate(dict(messages=[{"role": "user", "content": "Hi"}], **more))
    with pytest.raises(APIError, match="characters cannot fit") as caught:
        prompts.of_messages(asked)
    assert caught.value.param == "messages"


HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio", "input_audio": {}}])
def test_a_part_that_is_no_text_is_refused_by_its_type(server, path, part):
    said = {"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}
    error = server.post(path, messages=[HI, said]).json()["error"]
    assert error["code"] == 400 and error["param"] == "messages"
    assert "text" in error["message"] and repr(part["type"]) in error["message"] and "no field" not in error["message"]


def test_a_chat_whose_parser_cannot_be_made_leaves_nothing_running(another):
    wrong = {"start_anchor": "<bot>", "fields": {"content": {"content": "of no kind"}}}
    server = another(model=Loaded(tiny().model, bytewise(response_template=wrong)), router=None)
    assert server.post("/v1/chat/completions", messages=[HI], max_tokens=900).status_code == 500
    assert not server.worker._open and server.is_idle(1)
