"""Answers with a format end where the format ends, whatever else is asked of their length."""

from __future__ import annotations

import json

import pytest
import torch

from servers import bytewise
from TIDE.server.grammar import Grammars
from TIDE.server.requests import ResponseFormat

HI = [{"role": "user", "content": "Hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
LENGTHS = [{"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 3}]


def form(schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_ends_where_nothing_but_the_end_may_follow(server, lengths, temperature):
    body = dict(max_tokens=60, temperature=temperature, **lengths)
    answer = server.post("/v1/chat/completions", messages=HI, response_format=form({"enum": ["a"]}), **body).json()
    assert answer["choices"][0]["message"]["content"] == '"a"' and answer["choices"][0]["finish_reason"] == "stop"
    answer = server.post("/v1/completions", prompt="Hi", response_format=form({"enum": ["a"]}), **body).json()
    assert answer["choices"][0]["text"] == '"a"' and answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_forced_call_ends_where_nothing_but_the_end_may_follow(server, lengths):
    choice = {"type": "function", "function": {"name": "f"}}
    body = dict(messages=HI, tools=[TOOL], tool_choice=choice, max_tokens=80, temperature=0, **lengths)
    (choice,) = server.post("/v1/chat/completions", **body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"a": "x"}


@pytest.mark.parametrize("lengths", [{"ignore_eos": True}, {"min_tokens": 24}], ids=str)
def test_an_answer_that_may_go_on_does_not_end_early(server, lengths):
    """The end token is made the likeliest one."""
    schema = {"type": "integer", "minimum": 1}
    body = dict(prompt="Hi", max_tokens=24, temperature=0, response_format=form(schema), logit_bias={"2": 100})
    free = server.post("/v1/completions", **body).json()
    assert free["usage"]["completion_tokens"] == 2 and free["choices"][0]["finish_reason"] == "stop"
    held = server.post("/v1/completions", **body, **lengths).json()
    assert held["usage"]["completion_tokens"] == 24 and int(held["choices"][0]["text"]) >= 10**22, held


def test_a_text_that_goes_on_after_its_end_may_only_end_again():
    tokenizer = bytewise()
    processor = Grammars(tokenizer, len(tokenizer), [2]).processor(ResponseFormat.model_validate(form({"enum": ["a", "b"]})), 1)

    def allowed(text: str, *more: int) -> list[int]:
        ids = [7, *tokenizer(text, add_special_tokens=False)["input_ids"], *more]
        return (processor(torch.tensor([ids]), torch.zeros(1, len(tokenizer)))[0] == 0).nonzero()[:, 0].tolist()

    assert allowed('"a"') == [2]
    assert allowed('"a"', 2) == [2] and allowed('"a"', 2, 2, 9) == [2]
    assert allowed('"') == tokenizer("ab", add_special_tokens=False)["input_ids"], "it goes back from there"
    assert allowed('"b"', 2, 2) == [2]
