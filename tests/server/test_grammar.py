"""JSON answers: the matcher follows the text, also back, where drafts were rejected."""

from __future__ import annotations

import json

import pytest
import torch

from servers import bytewise
from TIDE.server.errors import APIError
from TIDE.server.grammar import Grammars
from TIDE.server.requests import ResponseFormat

TOKENIZER = bytewise()
SIZE = len(TOKENIZER)


@pytest.fixture(scope="module")
def grammars():
    return Grammars(TOKENIZER, SIZE + 3, [TOKENIZER.eos_token_id])  # models may have more logits than there are tokens


def asked(**schema: object) -> ResponseFormat:
    return ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def allowed(processor, text: str, prompt: str = "Hi") -> set[str]:
    """The tokens that may follow a text."""
    scores = processor(torch.tensor([ids(prompt) + ids(text)]), torch.zeros(1, SIZE + 3))
    found = (scores[0] == 0).nonzero()[:, 0].tolist()
    assert all(token < SIZE for token in found)
    return {TOKENIZER.decode([token]) for token in found}


def test_tokens_that_leave_the_schema_are_forbidden_and_it_goes_back_with_the_text(grammars):
    processor = grammars.processor(asked(enum=["red", "rose"]), prompt=2)
    assert allowed(processor, "") == {'"'}
    assert allowed(processor, '"r') == {"e", "o"}
    assert allowed(processor, '"ro') == {"s"}
    assert allowed(processor, '"re') == {"d"}, "the draft was rejected"
    assert allowed(processor, '"r') == {"e", "o"}
    assert allowed(processor, '"rose"') == {"</s>"}


def test_text_is_free_and_an_object_is_an_object(grammars):
    assert grammars.processor(None, 0) is None
    assert grammars.processor(ResponseFormat(type="text"), 0) is None
    assert allowed(grammars.processor(ResponseFormat(type="json_object"), 2), "") == {"{"}


@pytest.mark.parametrize(
    "schema", [{"type": "wrong"}, {"$ref": "https://example.org/x"}, {"type": "integer", "minimum": 5, "maximum": 4}]
)
def test_schemas_that_cannot_be_followed_are_refused(grammars, schema):
    with pytest.raises(APIError, match="this JSON schema") as caught:
        grammars.processor(asked(**schema), 0)
    assert caught.value.status == 400 and caught.value.param == "response_format"


def test_a_tokenizer_that_cannot_be_read_is_an_error_of_the_request(grammars):
    class Odd:
        eos_token_id = 0

    with pytest.raises(APIError, match="no JSON answers with this model's tokenizer"):
        Grammars(Odd(), 10, [0]).processor(ResponseFormat(type="json_object"), 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_by_a_schema_are_the_same_with_and_without_drafts(server, temperature):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 99, "minimum": -9}, "b": {"enum": ["x", "yz"]}},
    }
    body = dict(prompt="Hi", max_tokens=120, temperature=temperature, seed=3)
    form = {"type": "json_schema", "json_schema": {"schema": schema | {"required": ["a", "b"], "additionalProperties": False}}}
    on, off = (
        server.post("/v1/completions", **body, response_format=form, tide={"details": True, "exits": exits}).json()["choices"][
            0
        ]
        for exits in (True, False)
    )
    assert on["text"] == off["text"] and json.loads(on["text"]).keys() == {"a", "b"} and on["finish_reason"] == "stop"
    assert on["tide"]["drafted"] > on["tide"]["accepted"], "some drafts were rejected"
