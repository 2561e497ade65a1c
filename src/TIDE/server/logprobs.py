"""Logprobs of tokens: of the model's raw logits, before temperature, penalties and biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from TIDE.server.answers import ChatLogprobs, ContentLogprob, TextLogprobs, TokenLogprob


class Logprob(NamedTuple):
    """The logprob of a token, and the best tokens of its place with theirs."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[Logprob]:
    """Return the logprobs of tokens by (tokens, vocabulary) logits, each with those of the `top` best tokens."""
    logprobs = torch.log_softmax(logits.float(), -1)
    of_tokens = logprobs.gather(1, torch.tensor(tokens, device=logprobs.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(top, logprobs.shape[1]))
    pairs = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return [Logprob(*row) for row in zip(tokens, of_tokens, pairs, strict=True)]


class TokenTexts:
    """The text of single tokens in the middle of a text. Some tokenizers strip the space that a text begins with, so a token is
    decoded behind another one, whose text is cut off."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self.cut = tokenizer.decode(self.before)

    def __call__(self, token: int) -> str:
        both: str = self.tokenizer.decode([*self.before, token])
        return both[len(self.cut) :] if both.startswith(self.cut) else self.first(token)

    def first(self, token: int) -> str:
        """Return the text of a token that begins a text."""
        found: str = self.tokenizer.decode([token])
        return found


def for_chat(tokenizer: Any, found: Sequence[Logprob]) -> ChatLogprobs:
    text_of = TokenTexts(tokenizer)

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text = text_of(token)
        return dict(token=text, logprob=_finite(logprob), bytes=list(text.encode()))

    return ChatLogprobs(
        content=[
            ContentLogprob(**entry(one.token, one.logprob), top_logprobs=[TokenLogprob(**entry(*pair)) for pair in one.top])
            for one in found
        ]
    )


def for_text(tokenizer: Any, found: Sequence[Logprob | int], offset: int) -> TextLogprobs:
    """Return logprobs of tokens whose text begins at an offset; a token without any is the first of a prompt."""
    text_of = TokenTexts(tokenizer)
    tokens: list[str] = []
    offsets: list[int] = []
    for one in found:
        tokens.append(text_of.first(one) if isinstance(one, int) else text_of(one.token))
        offsets.append(offset)
        offset += len(tokens[-1])
    known = [None if isinstance(one, int) else one for one in found]
    return TextLogprobs(
        tokens=tokens,
        token_logprobs=[None if one is None else _finite(one.logprob) for one in known],
        top_logprobs=[
            None if one is None else {text_of(token): _finite(value) for token, value in (*one.top, one[:2])} for one in known
        ],
        text_offset=offsets,
    )


def _finite(value: float) -> float:
    """Return a number that JSON has."""
    return max(value, -9999.0)
