"""/v1/completions: a text in, its continuation out."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from fastapi import Request
from fastapi.responses import Response

from TIDE.server.answers import Answer, Reason, TextAnswer, TextChoice, TextLogprobs, Usage
from TIDE.server.errors import refused
from TIDE.server.job import Ask, Burst, Call
from TIDE.server.logprobs import Logprob, for_text
from TIDE.server.requests import CompletionRequest
from TIDE.server.service import Service, new_id, note
from TIDE.server.stream import collected, given_up_on_error, streamed, unless_gone


async def complete(service: Service, request: Request, asked: CompletionRequest) -> Response:
    """Continue texts, at once or as they are written."""
    service.check_model(asked.model)
    if asked.stream_options and not asked.stream:
        raise refused("stream_options goes with stream=true only.", "stream_options")
    if asked.max_tokens == 0 and not asked.echo:
        raise refused("max_tokens=0 goes with echo=true only.", "max_tokens")
    if asked.best_of not in (None, asked.n or 1):
        raise refused(f"best_of must be n, {asked.n or 1}, found {asked.best_of}: every answer is returned.", "best_of")
    service.worker.check_count(len(asked.prompts) * (asked.n or 1), "n" if len(asked.prompts) == 1 else "prompt")
    prompts = await unless_gone(request, service.tokenizing(_tokenized, service, asked))
    note(request, model=service.names[0], stream=bool(asked.stream), prompt_tokens=sum(map(len, prompts)))
    for ids in prompts:
        service.prompts.room(ids, asked.max_tokens, "prompt")
    call = service.worker.submit(await asyncio.to_thread(_asks, service, asked, prompts))
    with given_up_on_error(request, call):
        echoes = await unless_gone(request, _echoes(service, asked, prompts, call))
        reply = _Reply(service, asked, call, prompts, echoes)
    if asked.stream:
        return await streamed(request, reply.call, reply.begin(), reply.chunks, reply.end)
    return reply.whole(await collected(request, reply.call)).response()


def _tokenized(service: Service, asked: CompletionRequest) -> list[list[int]]:
    return [service.prompts.of_text(prompt, asked.add_special_tokens) for prompt in asked.prompts]


def _asks(service: Service, asked: CompletionRequest, prompts: list[list[int]]) -> list[Ask]:
    """Return the answers of a request; the first one to each prompt has it scored, where logprobs of an echo are asked for."""
    scores = asked.logprobs if asked.echo else None
    if asked.max_tokens == 0:
        return [] if scores is None else [Ask(ids, None, scores=scores) for ids in prompts]
    asks, each = service.asks(asked, prompts, asked.max_tokens, asked.logprobs), asked.n or 1
    return [replace(ask, scores=None if number % each else scores) for number, ask in enumerate(asks)]


class Echo:
    """A prompt as part of the answer: its text and, if asked for, the logprobs of its tokens."""

    def __init__(self, text: str, logprobs: TextLogprobs | None) -> None:
        self.text = text
        self.logprobs = logprobs


async def _echoes(service: Service, asked: CompletionRequest, prompts: list[list[int]], call: Call) -> list[Echo]:
    """Return the prompts as parts of the answers: nothing of them, unless that is asked for."""
    if not asked.echo:
        return [Echo("", None)] * len(prompts)
    tokenizer = service.prompts.tokenizer
    texts = [
        given if isinstance(given, str) else await service.tokenizing(tokenizer.decode, ids)
        for given, ids in zip(asked.prompts, prompts, strict=True)
    ]
    if asked.logprobs is None:
        return [Echo(text, None) for text in texts]
    logprobs = [await service.tokenizing(for_text, tokenizer, scores, 0) for scores in await call.scores()]
    return list(map(Echo, texts, logprobs))


class _Reply:
    """The answers of one request, as they are sent."""

    def __init__(
        self, service: Service, asked: CompletionRequest, call: Call, prompts: list[list[int]], echoes: list[Echo]
    ) -> None:
        self.service = service
        self.asked = asked
        self.call = call
        self.prompt_tokens = sum(map(len, prompts))
        self.echoes = [echo for echo in echoes for _ in range(asked.n or 1)]
        self.offsets = [len(echo.text) for echo in self.echoes]
        self.id = new_id("cmpl")
        self.created = int(time.time())
        self.counts = [0] * len(call.jobs)  # tokens of each answer, as far as they were sent
        self.is_echo = asked.max_tokens == 0  # nothing is written

    @property
    def usage(self) -> Usage:
        return Usage.of(self.prompt_tokens, sum(self.counts))

    def whole(self, bursts: list[list[Burst]]) -> TextAnswer:
        choices = self._echoed() if self.is_echo else [self._choice(own) for own in bursts]
        return self._answer(choices, self.usage)

    def _echoed(self) -> list[TextChoice]:
        """Return the prompts as the beginnings of answers, or as all of them."""
        reason: Reason | None = "length" if self.is_echo else None
        return [
            TextChoice(index=place, text=echo.text, logprobs=echo.logprobs, finish_reason=reason)
            for place, echo in enumerate(self.echoes)
        ]

    def _choice(self, bursts: list[Burst]) -> TextChoice:
        last = bursts[-1]
        self.counts[last.index] = last.count
        echo = self.echoes[last.index]
        text = echo.text + "".join(burst.text for burst in bursts)
        choice = TextChoice(index=last.index, text=text, logprobs=None, finish_reason=last.reason)
        if self.asked.logprobs is not None:
            own = self._logprobs([one for burst in bursts for one in burst.logprobs], last.index)
            choice.logprobs = _after(echo.logprobs, own)
        if self.asked.tide.details:
            tokens = [token for burst in bursts for token in burst.tokens]
            choice.tide = self.call.jobs[last.index].details(tokens, is_last=True)
        return choice

    def _logprobs(self, found: list[Logprob], index: int) -> TextLogprobs:
        """Return logprobs of the next tokens of an answer."""
        made = for_text(self.service.tokenizer, found, self.offsets[index])
        self.offsets[index] += sum(map(len, made.tokens))
        return made

    def begin(self) -> list[Answer]:
        return [self._answer([choice], None) for choice in self._echoed() if choice.text or self.is_echo]

    def chunks(self, burst: Burst) -> list[Answer]:
        if self.is_echo:
            return []
        self.counts[burst.index] = burst.count
        wants_tokens = burst.tokens and (self.asked.logprobs is not None or self.asked.tide.details)
        if not burst.text and not wants_tokens and not burst.is_last:
            return []
        choice = TextChoice(index=burst.index, text=burst.text, logprobs=None, finish_reason=burst.reason)
        if self.asked.logprobs is not None:
            choice.logprobs = self._logprobs(burst.logprobs, burst.index)
        if self.asked.tide.details:
            choice.tide = self.call.jobs[burst.index].details(burst.tokens, burst.is_last)
        return [self._answer([choice], self.usage if self.asked.sends_usage_always else None)]

    def end(self) -> list[Answer]:
        return [self._answer([], self.usage)] if self.asked.sends_usage else []

    def _answer(self, choices: list[TextChoice], usage: Usage | None) -> TextAnswer:
        answer = TextAnswer(id=self.id, created=self.created, model=self.service.names[0], choices=choices)
        if usage is not None or self.asked.sends_usage:
            answer.usage = usage
        return answer


def _after(first: TextLogprobs | None, rest: TextLogprobs) -> TextLogprobs:
    """Return logprobs of a prompt and of what follows as one."""
    if first is None:
        return rest
    return TextLogprobs(
        tokens=first.tokens + rest.tokens,
        token_logprobs=first.token_logprobs + rest.token_logprobs,
        top_logprobs=(first.top_logprobs or []) + (rest.top_logprobs or []),
        text_offset=first.text_offset + rest.text_offset,
    )
