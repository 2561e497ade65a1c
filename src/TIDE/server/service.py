"""The parts of a server, put together: a model with its tokenizer, the worker, and the answers to generate for a request."""

from __future__ import annotations

import copy
import time
from typing import Any

from fastapi import Request

from TIDE.engine.engine import TIDE
from TIDE.engine.rows.stop import context_of
from TIDE.server.errors import APIError
from TIDE.server.grammar import Grammars
from TIDE.server.job import Call, GenerationSpec
from TIDE.server.metrics import Metrics
from TIDE.server.parsing import response_template
from TIDE.server.prompt import Prompts
from TIDE.server.requests import ChatRequest, CompletionRequest
from TIDE.server.sampling import SamplingDefaults, seeds, with_processor
from TIDE.server.settings import ServerSettings
from TIDE.server.worker import Worker


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
        self.created = int(time.time())
        vocabulary = engine.adapter.vocab_size
        made_for = context_of(engine.model).made_for
        limit = settings.max_model_len or made_for
        if made_for is not None and limit is not None and limit > made_for:
            raise ValueError(f"max_model_len must be at most the {made_for} tokens this model was made for, found {limit}.")
        self.prompts = Prompts(copy.deepcopy(tokenizer), limit, vocabulary)
        self.sampling = SamplingDefaults(engine.model.generation_config, vocabulary)
        self.grammars = Grammars(tokenizer, vocabulary, self.sampling.ends)
        self.template = response_template(tokenizer, engine.model)
        self.metrics = Metrics(self.names[0])
        self.worker = Worker(engine, tokenizer, settings, self.metrics)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; the first is in answers."""
        return self.settings.names or (self.root,)

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise APIError(404, f"there is no model {name[:200]!r} here. There is {', '.join(self.names)}.", "model")

    def specs(
        self, body: ChatRequest | CompletionRequest, prompts: list[list[int]], keeps_special: bool = False
    ) -> list[GenerationSpec]:
        """Return the answers of a request: `n` for each prompt."""
        specs, logprobs, count = [], body.asked_logprobs, body.n or 1
        next_seed = iter(seeds(body, count * len(prompts)))
        for ids in prompts:
            room = self.prompts.room(ids, body.asked_tokens, "prompt")
            options = self.sampling.options(body, room, keeps_logits=logprobs is not None)
            for _ in range(count):
                processor = self.grammars.processor(body.response_format, len(ids))
                of_answer = with_processor(options, processor) | {"seed": next(next_seed)}
                exits, least = body.tide.exits, body.min_tokens or 0
                specs.append(GenerationSpec(ids, of_answer, body.stops, logprobs, exits, keeps_special, least))
        return specs


def note(request: Request, call: Call | None = None, **facts: Any) -> None:
    """Add facts to the access log's line of a request."""
    if call is not None:
        facts["completion_tokens"] = call.completion_tokens
    request.scope["tide"].update(facts)
