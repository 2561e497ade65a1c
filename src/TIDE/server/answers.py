"""Answers as clients expect them. Only fields that were set are sent."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import Response
from pydantic import BaseModel

Reason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    """A JSON object that is sent without the fields that were not set."""

    def model_post_init(self, context: Any) -> None:
        fixed = {name for name, field in type(self).model_fields.items() if field.default is not None}
        self.model_fields_set.update(fixed)

    @property
    def as_json(self) -> str:
        """The object as JSON."""
        return self.model_dump_json(exclude_unset=True)

    def response(self) -> Response:
        return Response(self.as_json, media_type="application/json")


class Usage(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt: int, completion: int) -> Usage:
        return cls(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


class WrittenToken(Answer):
    """A token and the depth at which it was decided; `text` as it was written, before stop strings are cut off."""

    id: int
    text: str
    depth: int
    score: float | None = None


class Timings(Answer):
    """Seconds from arrival to start, from there to the first token, and from that to the last."""

    queue: float
    prompt: float
    decode: float
    tokens_per_second: float


class Details(Answer):
    """The work of TIDE for an answer, or for the tokens of a chunk. Counts and times come with the end."""

    tokens: list[WrittenToken]
    num_layers: int
    drafted: int | None = None
    accepted: int | None = None
    layers_run: int | None = None
    seed: int | None = None
    timings: Timings | None = None


class TokenLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Answer):
    content: list[ContentLogprob]


class TextLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class FunctionCall(Answer):
    name: str
    arguments: str


class ToolCall(Answer):
    index: int | None = None
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Answer):
    """A whole message, or what a chunk adds to it."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason
    tide: Details | None = None


class Envelope(Answer):
    """The fields of every answer to a generation request."""

    id: str
    object: str
    created: int
    model: str


class ChatAnswer(Envelope):
    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(Answer):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None
    tide: Details | None = None


class ChatChunk(Envelope):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatDelta]
    usage: Usage | None = None


class TextChoice(Answer):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Reason | None = None
    tide: Details | None = None


class TextAnswer(Envelope):
    """A completion, or a chunk of one."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[TextChoice]
    usage: Usage | None = None


class ModelCard(Answer):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tide"
    root: str
    max_model_len: int | None


class ModelList(Answer):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Answer):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Answer):
    prompt: str


class Health(Answer):
    status: Literal["ok"] = "ok"


class Version(Answer):
    version: str


class Problem(Answer):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(Answer):
    error: Problem


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
