"""Prompts: texts and messages to token ids, and whether they fit. What cannot fit is refused before it is tokenized."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jinja2.exceptions import TemplateError

from TIDE.server.errors import refused
from TIDE.server.requests import ChatRequest, Message, TokenizeRequest, shallow

T = TypeVar("T")


class Prompts:
    """Turns texts and messages of clients into token ids.

    Args:
        limit: tokens of a prompt and its answer; None: any number.
        vocabulary: token ids the model knows.
    """

    def __init__(self, tokenizer: Any, limit: int | None, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.vocabulary = vocabulary
        longest = max((len(token) for token in tokenizer.get_vocab()), default=1)
        self.most_characters = None if limit is None else limit * longest
        self._thread = ThreadPoolExecutor(1, "tide-tokenizer")

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work that uses the tokenizer. It has a thread of its own, so that long texts do not hold up the server."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def of_text(self, prompt: str | Sequence[int], add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Return the ids of a text, or those that were given; `param` is the field they came in."""
        if not isinstance(prompt, str):
            if wrong := [token for token in prompt if not 0 <= token < self.vocabulary]:
                raise refused(f"token ids must be from 0 to {self.vocabulary - 1}, found {wrong[0]}.", param)
            return self._checked(list(prompt), param)
        self._check_characters(len(prompt), param)
        ids = self.tokenizer(_encodable(prompt, param), add_special_tokens=add_special_tokens)["input_ids"]
        return self._checked(list(ids), param)

    def of_messages(self, asked: ChatRequest | TokenizeRequest) -> list[int]:
        """Return the ids of a chat in the model's template."""
        messages = [_plain(message, number) for number, message in enumerate(asked.messages or ())]
        self._check_characters(sum(len(str(value)) for message in messages for value in message.values()), "messages")
        if self.tokenizer.chat_template is None:
            raise refused("this model has no chat template. Use /v1/completions.", "messages")
        if asked.continue_final_message and asked.add_generation_prompt:
            raise refused("continue_final_message goes with add_generation_prompt=false only.", "continue_final_message")
        options = dict(asked.chat_template_kwargs or {})
        if isinstance(asked, ChatRequest) and asked.reasoning_effort is not None:
            options.setdefault("reasoning_effort", asked.reasoning_effort)
        if wrong := {"tokenize", "return_tensors", "return_dict", "chat_template", "conversation"} & set(options):
            raise refused(f"chat_template_kwargs may not set {sorted(wrong)[0]!r}.", "chat_template_kwargs")
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=[tool.model_dump(exclude_none=True) for tool in asked.tools] if asked.tools else None,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                tokenize=False,
                **options,
            )
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as problem:
            said = " ".join(str(problem).split())[:300]
            raise refused(f"the chat template does not take these messages: {said}", "messages") from problem
        self._check_characters(len(text), "messages")  # tools and options of the template are in it
        ids = self.tokenizer(_encodable(text, "messages"), add_special_tokens=False)["input_ids"]
        return self._checked(list(ids), "messages")

    def room(self, ids: Sequence[int], asked: int | None, param: str, asked_in: str = "max_tokens") -> int:
        """Return how many tokens an answer may have; more than fit are refused.

        Args:
            param: the field of the prompt.
            asked_in: the field of the number that was asked for.
        """
        if self.limit is None:
            return 2**20 if asked is None else asked
        room = self.limit - len(ids)
        if room < 1 and asked != 0:
            raise refused(f"{self._said(len(ids))} An answer needs one more: shorten the prompt.", param)
        if asked is not None and asked > room:
            raise refused(f"{self._said(len(ids))} There is room for {room}, and {asked} are asked for.", asked_in)
        return room if asked is None else asked

    def _said(self, tokens: int) -> str:
        return f"This model's maximum context length is {self.limit} tokens, and the prompt has {tokens}."

    def _check_characters(self, count: int, param: str) -> None:
        if self.most_characters is not None and count > self.most_characters:
            raise refused(
                f"This model's maximum context length is {self.limit} tokens, and {count} characters cannot fit. Shorten them.",
                param,
            )

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise refused("the prompt is empty. Send one token at least.", param)
        if self.limit is not None and len(ids) > self.limit:
            raise refused(f"{self._said(len(ids))} Shorten it.", param)
        return ids


def _plain(message: Message, number: int) -> dict[str, Any]:
    """Return a message as chat templates expect it: its content is one text, arguments of calls are objects, and fields
    without a value are not there."""
    found = {name: value for name, value in message.model_dump(exclude_unset=True).items() if value is not None}
    found["content"] = message.content or ""
    if isinstance(message.content, list):
        found["content"] = "".join(part.text for part in message.content)
    calls = found.pop("tool_calls", None)
    if calls:
        found["tool_calls"] = [_read(call, f"messages[{number}].tool_calls[{place}]") for place, call in enumerate(calls)]
    return found


def _read(call: dict[str, Any], place: str) -> dict[str, Any]:
    """Return an earlier call with its arguments as an object: OpenAI's API has them as text, templates write them as JSON."""
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), dict):
        return call
    text = function.get("arguments")
    try:
        arguments = {} if text is None or text == "" or text.isspace() else shallow(json.loads(text))
    except (ValueError, TypeError, AttributeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise refused(f"{place}.function.arguments: expected a JSON object as text, found {str(text)[:80]!r}.", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


def _encodable(text: str, param: str) -> str:
    """Refuse text that is no Unicode: JSON may hold halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        found = text[problem.start]
        raise refused(f"expected Unicode text, found the lone surrogate {found!r}.", param) from None
    return text
