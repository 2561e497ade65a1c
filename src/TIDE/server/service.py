"""The parts of a server, put together: a model with its tokenizer, the worker, and what routes need of them."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request

from TIDE.engine.engine import TIDE
from TIDE.engine.rows.context import context_of
from TIDE.server.errors import APIError
from TIDE.server.grammar import Grammars
from TIDE.server.job import Ask, Call
from TIDE.server.metrics import Metrics
from TIDE.server.parsing import response_template
from TIDE.server.prompt import Prompts
from TIDE.server.requests import Sampling
from TIDE.server.sampling import SamplingDefaults, seeds, with_processor
from TIDE.server.settings import ServerSettings
from TIDE.server.worker import Worker

T = TypeVar("T")


class Service:
    """A model as routes see it.

    Args:
        name: of the model, unless the settings have others.
    """

    def __init__(self, engine: TIDE, tokenizer: Any, name: str, settings: ServerSettings) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.settings = settings
        self.root = name
        self.names = settings.names or (name,)
        self.created = int(time.time())
        vocabulary = engine.adapter.vocab_size
        made_for = context_of(engine.model).made_for
        self.limit = settings.max_model_len or made_for
        if made_for is not None and self.limit is not None and self.limit > made_for:
            raise ValueError(
                f"max_model_len must be at most the {made_for} tokens this model was made for, found {self.limit}."
            )
        self.prompts = Prompts(copy.deepcopy(tokenizer), self.limit, vocabulary)
        self._tokenizing = ThreadPoolExecutor(1, "tide-tokenizer")
        self.sampling = SamplingDefaults(engine.model.generation_config, vocabulary)
        self.grammars = Grammars(tokenizer, vocabulary, self.sampling.ends)
        self.template = response_template(tokenizer, engine.model)
        self.metrics = Metrics(self.names[0])
        self.worker = Worker(engine, tokenizer, settings, self.metrics)

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked not in self.names:
            raise APIError(404, f"there is no model {asked[:200]!r} here. There is {', '.join(self.names)}.", "model")

    async def tokenizing(self, work: Callable[..., T], *given: Any) -> T:
        """Run something with the tokenizer of `prompts`. It has a thread of its own: long texts hold up nobody."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work, *given)

    def asks(
        self,
        asked: Sampling,
        prompts: list[list[int]],
        tokens: int | None,
        logprobs: int | None,
        keeps_special: bool = False,
    ) -> list[Ask]:
        """Return the answers of a request: `n` for each prompt."""
        found = []
        each, own_seeds = asked.n or 1, seeds(asked, (asked.n or 1) * len(prompts))
        for number, ids in enumerate(prompts):
            room = self.prompts.room(ids, tokens, "prompt")
            options = self.sampling.options(asked, room, keeps_logits=logprobs is not None)
            for place in range(number * each, (number + 1) * each):
                processor = self.grammars.processor(asked.response_format, len(ids))
                own = with_processor(options, processor) | {"seed": own_seeds[place]}
                found.append(Ask(ids, own, asked.stops, logprobs, asked.tide.exits, keeps_special, asked.min_tokens or 0))
        return found


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def note(request: Request, call: Call | None = None, **facts: Any) -> None:
    """Add facts to the access log's line of a request."""
    if call is not None:
        facts["completion_tokens"] = call.completion_tokens
    request.scope["tide"].update(facts)
