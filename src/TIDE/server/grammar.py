"""JSON answers: tokens that would leave a JSON schema are not allowed.

llguidance says which tokens may follow a text. It walks along the text token by token; where a text is not the one it has
walked (drafts were rejected, or a row was put back), it goes back to where both agree.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessor

from TIDE.server.errors import APIError, refused
from TIDE.server.requests import ResponseFormat

ANY_OBJECT = {"type": "object"}
NO_ANSWER = "this JSON schema allows no answer at all. Allow one."


class Grammars:
    """Makes processors for answers of a format.

    Args:
        vocabulary: tokens that the model has logits for.
        ends: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: list[int]) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.ends = ends

    def processor(self, asked: ResponseFormat | None, prompt: int) -> GrammarProcessor | None:
        """Return the processor of an answer after a prompt of `prompt` tokens; None: it may be any text."""
        if asked is None or asked.type == "text":
            return None
        if asked.type == "json_object":
            return GrammarProcessor(self._matcher(json.dumps(ANY_OBJECT)), prompt)
        schema = None if asked.json_schema is None else asked.json_schema.schema_
        if schema is None:
            raise refused("expected response_format.json_schema.schema, found none.", "response_format")
        if schema is False:
            raise refused(NO_ANSWER, "response_format")
        return GrammarProcessor(self._matcher(json.dumps({} if schema is True else schema)), prompt)

    def _matcher(self, schema: str) -> Any:
        words = self._words
        import llguidance

        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": " ?"})
        except ValueError as problem:
            raise _not_followed(str(problem)) from problem
        matcher = llguidance.LLMatcher(words, grammar, log_level=0)
        if matcher.is_error():
            raise _not_followed(matcher.get_error())
        allowed = matcher.compute_logit_bias()
        if matcher.is_error():  # some schemas are read and fail at the first token
            raise _given_up(matcher, "response_format")
        if not any(allowed):
            raise refused(NO_ANSWER, "response_format")
        return matcher

    @functools.cached_property
    def _words(self) -> Any:
        """The vocabulary as llguidance reads it: about a second for a large one, once."""
        if importlib.util.find_spec("llguidance") is None:
            raise APIError(400, "this server has no JSON answers: its operator may install llguidance.", "response_format")
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(self.tokenizer, n_vocab=self.vocabulary, eos_token=self.ends or None)
        except ValueError as problem:
            reason = " ".join(str(problem).split())[:200]
            raise refused(f"there are no JSON answers with this model's tokenizer: {reason}", "response_format") from problem


def _not_followed(problem: str) -> APIError:
    return refused(f"this JSON schema cannot be followed: {' '.join(problem.split())[:300]}", "response_format")


def _given_up(matcher: Any, param: str | None) -> APIError:
    """Return the error of a schema that reached a limit of llguidance; the state of its parser stays out of the message."""
    reason = " ".join(matcher.get_error().partition("<state>")[0].split())[:300]
    return refused(f"this JSON schema cannot be followed: llguidance gave up with {reason!r}. Make the schema simpler.", param)


class GrammarProcessor(LogitsProcessor):
    """Forbids tokens that leave the grammar. Where those before it forbid all that the grammar allows, the grammar wins: at the
    end of the JSON nothing but the end may follow, whatever `min_tokens` says.

    Args:
        prompt: tokens before the answer.

    Attributes:
        walked: tokens that the matcher has taken; none after the end of the JSON.
    """

    def __init__(self, matcher: Any, prompt: int) -> None:
        self.matcher = matcher
        self.prompt = prompt
        self.walked: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._walk(input_ids[0, self.prompt :].tolist())
        allowed = np.frombuffer(self.matcher.compute_logit_bias(), dtype=np.uint8)
        if self.matcher.is_error():
            raise _given_up(self.matcher, param=None)
        mask = torch.zeros(scores.shape[-1], dtype=torch.bool)
        mask[: len(allowed)] = torch.from_numpy(allowed[: len(mask)] > 0)
        mask = mask.to(scores.device)
        kept = scores.masked_fill(~mask, -torch.inf)
        is_lost = (kept == -torch.inf).all(-1, keepdim=True)
        return torch.where(is_lost & mask, torch.zeros_like(scores), kept)

    def _walk(self, text: list[int]) -> None:
        """Bring the matcher to the end of a text."""
        pairs = zip(self.walked, text, strict=False)
        alike = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(self.walked), len(text)))
        if alike < len(self.walked):
            self.matcher.rollback(len(self.walked) - alike)
        taken = self.matcher.try_consume_tokens(text[alike:]) if text[alike:] else 0
        self.walked = text[: alike + taken]
        if len(self.walked) < len(text) and not self.matcher.is_stopped():
            raise RuntimeError(f"the grammar of an answer does not allow its token {text[len(self.walked)]}.")
