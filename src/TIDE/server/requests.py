"""Requests as clients send them. A field that is not here is refused by its name; those marked as accepted have no effect."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MOST_LOGPROBS = 20
MOST_LEVELS = 100  # of JSON inside JSON: llguidance reads 128
# Of a list only the first fault is told: thousands of them take seconds to list.
Tokens = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]


def shallow(value: Any) -> Any:
    """Return JSON that is not nested deeper than code which calls itself for each level can go."""
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for several in inner for one in several]
        if not level:
            return value
    raise PydanticCustomError("nested", f"expected JSON of {MOST_LEVELS} levels at most; it is nested deeper. Make it flatter")


AnyJSON = Annotated[Any, AfterValidator(shallow)]
AnyObject = Annotated[dict[str, Any], AfterValidator(shallow)]


class Fields(BaseModel):
    """A JSON object: types are not converted, and unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Accepted(Fields):
    """Fields that clients send and that have no effect here."""

    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JSONSchema(Fields):
    name: str | None = None
    description: str | None = None
    schema_: AnyObject | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class TIDEOptions(Fields):
    """TIDE's own: `details` adds depths, drafts and times to the answer; `exits` False runs all layers for every token."""

    details: bool = False
    exits: bool = True


class Sampling(Accepted):
    """How answers are written: the same for chats and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1, le=64)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    temperature: float | None = Field(default=None, ge=0, le=100)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=2**31 - 1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(default=None, max_length=1024)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    stop: str | Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=32)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=1024)
    response_format: ResponseFormat | None = None
    cache_salt: str | None = Field(default=None, max_length=256)
    tide: TIDEOptions = TIDEOptions()

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        found = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [one for one in found if one]

    @property
    def has_format(self) -> bool:
        """True if the answer must follow a grammar."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def sends_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def sends_usage_always(self) -> bool:
        return bool(self.sends_usage and self.stream_options and self.stream_options.continuous_usage_stats)


class TextPart(Fields):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, part: Any) -> Any:
        kind = part.get("type") if isinstance(part, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError("not_text", "this server reads text only: expected a part of type 'text'")
        return part


class Message(BaseModel):
    """A message of a chat. What else it holds is shown to the chat template."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[AnyObject], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    __pydantic_extra__: dict[str, AnyJSON]


class Function(Fields):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: AnyObject | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    name: str


class NamedTool(Fields):
    """A tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class ChatRequest(Sampling):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: AnyObject | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)  # for the chat template
    # accepted: this server writes text only, and as long as the model does
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    prediction: dict[str, Any] | None = None  # makes answers quicker elsewhere, never different

    @property
    def asked_logprobs(self) -> int | None:
        """How many alternatives each token comes with; None: no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def asked_tokens_in(self) -> str:
        """The field that they are asked for in."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"


class CompletionRequest(Sampling):
    """The body of /v1/completions."""

    prompt: str | Tokens | Texts | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
    max_tokens: int | None = Field(default=16, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool = True
    best_of: int | None = Field(default=None, ge=1)  # accepted if it is n
    suffix: None = None  # accepted

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def asked_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


class TokenizeRequest(Fields):
    """The body of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: AnyObject | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
