"""/v1/completions: a text in, its continuation out."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import NamedTuple

from fastapi import Request
from fastapi.responses import Response

from TIDE.server.answers import Answer, TextAnswer, TextChoice, TextLogprobs
from TIDE.server.errors import refused
from TIDE.server.job import Call, Delta, GenerationSpec
from TIDE.server.logprobs import for_text
from TIDE.server.reply import Reply, cancelled_on_error, unless_gone
from TIDE.server.requests import CompletionRequest
from TIDE.server.service import Service, note


async def complete(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Continue texts, at once or as they are written."""
    service.check_model(body.model)
    if body.stream_options and not body.stream:
        raise refused("stream_options goes with stream=true only.", "stream_options")
    if body.max_tokens == 0 and not body.echo:
        raise refused("max_tokens=0 goes with echo=true only.", "max_tokens")
    if body.best_of not in (None, body.n or 1):
        raise refused(f"best_of must be n, {body.n or 1}, found {body.best_of}: every answer is returned.", "best_of")
    service.worker.check_count(len(body.prompts) * (body.n or 1), "n" if len(body.prompts) == 1 else "prompt")
    prompts = await unless_gone(request, service.prompts.run(_tokenized, service, body))
    prompt_tokens = sum(map(len, prompts))
    note(request, model=service.names[0], stream=bool(body.stream), prompt_tokens=prompt_tokens)
    for ids in prompts:
        service.prompts.room(ids, body.max_tokens, "prompt")
    call = service.worker.submit(await asyncio.to_thread(_specs, service, body, prompts))
    with cancelled_on_error(request, call):
        echoes = await unless_gone(request, _echoes(service, body, prompts, call))
        reply = TextReply(service, body, call, prompt_tokens, echoes)
    return await reply.response(request)


def _tokenized(service: Service, body: CompletionRequest) -> list[list[int]]:
    return [service.prompts.of_text(prompt, body.add_special_tokens) for prompt in body.prompts]


def _specs(service: Service, body: CompletionRequest, prompts: list[list[int]]) -> list[GenerationSpec]:
    """Return the answers of a request; the first one to each prompt has it scored, for the logprobs of an echo."""
    scores = body.logprobs if body.echo else None
    if body.max_tokens == 0:
        return [] if scores is None else [GenerationSpec(ids, None, scores=scores) for ids in prompts]
    specs, count = service.specs(body, prompts), body.n or 1
    return [replace(spec, scores=None if index % count else scores) for index, spec in enumerate(specs)]


class Echo(NamedTuple):
    """A prompt as part of the answer: its text and, if requested, the logprobs of its tokens."""

    text: str = ""
    logprobs: TextLogprobs | None = None


async def _echoes(service: Service, body: CompletionRequest, prompts: list[list[int]], call: Call) -> list[Echo]:
    """Return the prompts as parts of the answers, empty unless requested."""
    if not body.echo:
        return [Echo()] * len(prompts)
    tokenizer, run = service.prompts.tokenizer, service.prompts.run
    texts = [
        prompt if isinstance(prompt, str) else await run(tokenizer.decode, ids)
        for prompt, ids in zip(body.prompts, prompts, strict=True)
    ]
    if body.logprobs is None:
        return list(map(Echo, texts))
    return list(map(Echo, texts, [await run(for_text, tokenizer, scores, 0) for scores in await call.scores()]))


class TextReply(Reply):
    """The texts of one request, with their prompts if requested.

    Attributes:
        offsets: characters of each answer that have logprobs already, the echo included.
        is_echo: the answers are the prompts alone.
    """

    whole = chunk = TextAnswer

    def __init__(self, service: Service, body: CompletionRequest, call: Call, prompt_tokens: int, echoes: list[Echo]) -> None:
        super().__init__(service, body, call, prompt_tokens, "cmpl")
        self.echoes = [echo for echo in echoes for _ in range(body.n or 1)]
        self.offsets = [len(echo.text) for echo in self.echoes]
        self.is_echo = body.max_tokens == 0

    def _echoed(self) -> list[TextChoice]:
        """Return the prompts as the beginnings of answers, or as all of them."""
        return [
            TextChoice(index=index, text=echo.text, logprobs=echo.logprobs, finish_reason="length" if self.is_echo else None)
            for index, echo in enumerate(self.echoes)
        ]

    def begin(self) -> list[Answer]:
        return [self.chunk_of([choice], None) for choice in self._echoed() if choice.text or self.is_echo]

    def parts(self, delta: Delta) -> list[TextChoice]:
        if self.is_echo or (not delta.text and self.is_silent(delta)):
            return []
        return [TextChoice(index=delta.index, text=delta.text, logprobs=None)]

    def choice(self, deltas: list[Delta]) -> TextChoice:
        return TextChoice(index=deltas[0].index, text="".join(delta.text for delta in deltas), logprobs=None)

    def choices(self, answers: list[list[Delta]]) -> list[TextChoice]:
        if self.is_echo:
            return self._echoed()
        choices = super().choices(answers)
        for choice, echo in zip(choices, self.echoes, strict=True):
            choice.text = echo.text + choice.text
            if echo.logprobs is not None:
                choice.logprobs = _joined(echo.logprobs, choice.logprobs)
        return choices

    def logprobs(self, delta: Delta) -> TextLogprobs:
        made = for_text(self.tokenizer, delta.logprobs, self.offsets[delta.index])
        self.offsets[delta.index] += sum(map(len, made.tokens))
        return made


def _joined(first: TextLogprobs, rest: TextLogprobs) -> TextLogprobs:
    """Return logprobs of a prompt and of its continuation as one."""
    return TextLogprobs(
        tokens=first.tokens + rest.tokens,
        token_logprobs=first.token_logprobs + rest.token_logprobs,
        top_logprobs=(first.top_logprobs or []) + (rest.top_logprobs or []),
        text_offset=first.text_offset + rest.text_offset,
    )
