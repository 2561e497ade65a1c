"""The real `openai` client against the server: at once, streamed, asynchronous."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from pydantic import BaseModel

from servers import bytewise, tiny
from TIDE.models.gguf import Loaded

ASKED = dict(model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=12, seed=5)
TEXT = dict(model="tiny", prompt="Hello", max_tokens=12, temperature=0)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


def text_of(stream, index: int = 0) -> str:
    choices = [choice for chunk in stream for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat_is_answered_at_once_and_streamed_with_the_same_text(client):
    whole = client.chat.completions.create(**ASKED)
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert whole.choices[0].message.role == "assistant" and whole.choices[0].finish_reason == "length"
    assert text_of(chunks) == whole.choices[0].message.content != ""
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert whole.usage.completion_tokens == 12 and whole.usage.total_tokens == 12 + whole.usage.prompt_tokens
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length" and set(reasons[:-1]) == {None}


def test_an_asynchronous_client_gets_the_same(client, server):
    async def ask():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as own:
            whole, stream = await asyncio.gather(
                own.chat.completions.create(**ASKED), own.chat.completions.create(**ASKED, stream=True)
            )
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(ask())
    assert whole.choices[0].message.content == client.chat.completions.create(**ASKED).choices[0].message.content
    assert text_of(chunks) == whole.choices[0].message.content


def test_usage_comes_with_every_chunk_if_asked_for(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"tide": {"details": True}}
    chunks = list(client.chat.completions.create(**ASKED, stream=True, stream_options=options, extra_body=body))
    sent = 0
    for chunk in chunks:
        sent += sum(len(choice.tide["tokens"]) for choice in chunk.choices if getattr(choice, "tide", None))
        assert chunk.usage.completion_tokens == sent, "tokens that were not sent yet are not counted"
    assert sent == 12


def test_answers_differ_and_are_the_same_again_by_their_seed(client):
    first, again = (client.chat.completions.create(**ASKED, n=3) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3 and [choice.index for choice in first.choices] == [0, 1, 2]
    assert texts == [choice.message.content for choice in again.choices]
    assert texts[0] == client.chat.completions.create(**ASKED).choices[0].message.content
    chunks = list(client.chat.completions.create(**ASKED, n=3, stream=True))
    assert [text_of(chunks, index) for index in range(3)] == texts


def test_a_stop_string_ends_the_text_before_it(client):
    whole = client.completions.create(**TEXT, logprobs=0)
    text, tokens = whole.choices[0].text, whole.choices[0].logprobs.tokens
    stop = text[2:4]
    cut = client.completions.create(**TEXT, stop=["nowhere", stop])
    assert cut.choices[0].text == text[: text.index(stop)] and cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens < len(tokens)
    streamed = list(client.completions.create(**TEXT, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == cut.choices[0].text


def ids_of(choice) -> list[int]:
    return [token["id"] for token in choice.tide["tokens"]]


def test_a_stop_token_ends_the_text_and_min_tokens_keeps_it_from_that(client):
    ids = ids_of(client.completions.create(**TEXT, extra_body={"tide": {"details": True}}).choices[0])
    body = dict(extra_body={"stop_token_ids": [ids[2]], "tide": {"details": True}})
    ended = client.completions.create(**TEXT, **body)
    assert ended.choices[0].finish_reason == "stop" and ids_of(ended.choices[0]) == ids[: ids.index(ids[2]) + 1]
    body["extra_body"]["min_tokens"] = 12
    assert client.completions.create(**TEXT, **body).usage.completion_tokens == 12


def test_logprobs_are_of_raw_logits(client):
    plain = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2, temperature=0)
    bent = client.chat.completions.create(
        **ASKED, logprobs=True, temperature=0.5, frequency_penalty=1, extra_body={"top_k": 1, "repetition_penalty": 1.1}
    )
    first, other = plain.choices[0].logprobs.content, bent.choices[0].logprobs.content
    assert len(first) == 12 and [len(one.top_logprobs) for one in first] == [2] * 12
    assert all(one.logprob == one.top_logprobs[0].logprob for one in first)
    assert first[0].token == other[0].token and first[0].logprob == other[0].logprob
    assert client.chat.completions.create(**ASKED, temperature=0).choices[0].message == plain.choices[0].message


def test_an_echo_has_the_logprobs_that_the_same_tokens_had_when_they_were_written(client, server):
    written = client.completions.create(**TEXT, logprobs=1, extra_body={"tide": {"details": True}}).choices[0]
    prompt = server.post("/tokenize", prompt="Hello").json()["tokens"]
    echo = client.completions.create(
        model="tiny", prompt=prompt + ids_of(written), max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    assert echo.logprobs.token_logprobs[0] is None
    assert echo.logprobs.token_logprobs[-12:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-4)
    both = client.completions.create(**TEXT, echo=True, logprobs=1).choices[0]
    assert both.text == f"Hello{written.text}" and len(both.logprobs.tokens) == len(prompt) + 12


def test_stop_strings_wait_for_min_tokens(client, server):
    token = server.post("/tokenize", prompt="x").json()["tokens"][0]
    asked = dict(TEXT, logit_bias={str(token): 100}, stop=["x"])
    assert client.completions.create(**asked).choices[0].text == ""
    late = client.completions.create(**asked, extra_body={"min_tokens": 5})
    assert late.choices[0].text == "x" * 5 and late.choices[0].finish_reason == "stop" and late.usage.completion_tokens == 6


def test_a_bias_and_penalties_change_the_text(client, server):
    token = server.post("/tokenize", prompt="x").json()["tokens"][0]
    assert client.completions.create(**TEXT, logit_bias={str(token): 100}).choices[0].text == "x" * 12
    assert client.completions.create(**TEXT, presence_penalty=2).choices[0].text != ""


def test_several_prompts_have_their_answers_in_order(client):
    alone = [client.completions.create(**TEXT | {"prompt": prompt}).choices[0].text for prompt in ("One", "Two")]
    both = client.completions.create(**TEXT | {"prompt": ["One", "Two"]}, n=2)
    assert [choice.text for choice in both.choices] == [alone[0], alone[0], alone[1], alone[1]]
    assert both.usage.prompt_tokens == 6 and both.usage.completion_tokens == 48


class Person(BaseModel):
    age: int
    kind: bool


def test_a_schema_is_followed_with_drafts_on(client):
    for seed in range(3):
        done = client.chat.completions.parse(**ASKED | {"max_tokens": 200, "seed": seed}, response_format=Person)
        assert isinstance(done.choices[0].message.parsed, Person)
    done = client.chat.completions.create(
        **ASKED | {"max_tokens": 6}, response_format={"type": "json_object"}, extra_body={"tide": {"details": True}}
    )
    assert done.choices[0].message.content.startswith("{")


def test_details_have_the_depth_of_every_token_and_what_was_drafted(client):
    body = {"tide": {"details": True}}
    on = client.chat.completions.create(**ASKED, extra_body=body).choices[0]
    off = client.chat.completions.create(**ASKED, extra_body={"tide": {"details": True, "exits": False}}).choices[0]
    assert on.message == off.message
    assert {token["depth"] for token in off.tide["tokens"]} == {4} and off.tide["drafted"] == 0
    assert on.tide["drafted"] >= on.tide["accepted"] == sum(token["depth"] < 4 for token in on.tide["tokens"])
    assert "".join(token["text"] for token in on.tide["tokens"]) in on.message.content
    assert on.tide["timings"].keys() == {"queue", "prompt", "decode", "tokens_per_second"}
    chunks = list(client.chat.completions.create(**ASKED, extra_body=body, stream=True))
    tokens = [token for chunk in chunks for choice in chunk.choices for token in getattr(choice, "tide", {}).get("tokens", [])]
    assert [token["id"] for token in tokens] == ids_of(on)


def test_errors_are_those_the_client_knows(client, server):
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here. There is tiny."):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED, extra_body={"best_of": 2})
    assert caught.value.body == {
        "message": "this server has no field 'best_of'. Leave it out.",
        "type": "BadRequestError",
        "param": "best_of",
        "code": 400,
    }
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"


HARMLESS = dict(user="me", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True)
HARMLESS |= dict(prompt_cache_key="k", prompt_cache_retention="24h", safety_identifier="s")
OF_CHATS = dict(modalities=["text"], audio=None, reasoning_effort="low", verbosity="high")
OF_CHATS |= dict(prediction={"type": "content", "content": "Hello"})


def test_fields_without_effect_are_accepted(client):
    done = client.chat.completions.create(**ASKED, **OF_CHATS, extra_body=HARMLESS)
    assert done.choices[0].message == client.chat.completions.create(**ASKED).choices[0].message
    done = client.completions.create(**TEXT, best_of=1, extra_body=HARMLESS | {"suffix": None})
    assert done.choices[0].text == client.completions.create(**TEXT).choices[0].text


def test_the_chat_template_gets_the_reasoning_effort(another):
    template = "<s>{% for m in messages %}<user>{{ m.content }}{% endfor %}{{ reasoning_effort }}<bot>"
    own = another(model=Loaded(tiny().model, bytewise(template)))
    count, longer = (
        own.post("/v1/chat/completions", messages=ASKED["messages"], max_tokens=1, **fields).json()["usage"]["prompt_tokens"]
        for fields in ({}, {"reasoning_effort": "low"})
    )
    assert longer == count + len("low")


def test_a_stream_ends_with_done_and_is_not_cached(server):
    with server.http.stream("POST", "/v1/completions", json=dict(TEXT, stream=True)) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["x-request-id"]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
