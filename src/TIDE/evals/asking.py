"""Requests of the harness, answered by an engine in batches.

    generate_until           greedy or sampled text up to a stop string, by `engine.generate`
    loglikelihood            of a continuation after a context, from the logits of `engine(input_ids)`
    loglikelihood_rolling    of a whole text, in windows

In mode fast `engine(input_ids)` gives the logits of the exits where tokens leave: the engine writes the given text, context
included. Otherwise they are the full model's, in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from TIDE.engine.cache.prefixes import new_salt
from TIDE.engine.engine import TIDE
from TIDE.engine.inputs import context_of

MOST_TOKENS = 2048  # of a text with its answer, unless the model was made for fewer
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
IGNORED = ("do_sample", "until", "max_gen_toks")


class Reply(NamedTuple):
    """The answer to one request."""

    value: Any  # as the harness takes it
    ids: list[int]  # generated
    tokens: int  # generated or, where nothing is, read
    exited: int


class Asker:
    """An engine and its tokenizer, as a reader and writer of texts.

    Args:
        rows: most rows of a pass.
        max_new_tokens: most new tokens of an answer, whatever its task asks for; None: as the task asks.
    """

    def __init__(
        self, engine: TIDE, tokenizer: PreTrainedTokenizerBase, rows: int = 1, max_new_tokens: int | None = None
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.rows = rows
        self.max_new_tokens = max_new_tokens
        self.max_length = min(MOST_TOKENS, context_of(engine.model).made_for or MOST_TOKENS)

    @property
    def prefix(self) -> int:
        """The token that texts begin after."""
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        return int(bos if bos is not None else eos if eos is not None else 0)

    def encode(self, text: str) -> list[int]:
        """Return token ids; a text that begins as the tokenizer would begin it, as chat templates do, is left as it is."""
        begun = bool(self.tokenizer.bos_token) and text.startswith(str(self.tokenizer.bos_token))
        return list(self.tokenizer(text, add_special_tokens=not begun, verbose=False)["input_ids"])

    def answer(self, kind: str, requests: Sequence[Sequence[Any]], brief: bool = False) -> list[Reply]:
        """Answer requests of one kind.

        Args:
            brief: a few tokens of each only, to warm up.
        """
        kinds: dict[str, Callable[..., list[Reply]]] = {
            "generate_until": self._generate,
            "loglikelihood": self._score,
            "loglikelihood_rolling": self._roll,
        }
        return kinds[kind](requests, 8 if brief else None)

    def _generate(self, requests: Sequence[Sequence[Any]], most: int | None) -> list[Reply]:
        found: list[Reply] = []
        for start in range(0, len(requests), self.rows):
            found += self._written(requests[start : start + self.rows], most)
        return found

    def _written(self, requests: Sequence[Sequence[Any]], most: int | None) -> list[Reply]:
        """Generate the answers of one batch; its requests have the same options."""
        options = dict(requests[0][1])
        new_tokens = most or self.max_new_tokens or int(options.get("max_gen_toks", 256))
        if new_tokens >= self.max_length:
            raise ValueError(f"expected fewer new tokens than the {self.max_length} of a text, found {new_tokens}.")
        prompts = [self.encode(request[0])[-(self.max_length - new_tokens) :] for request in requests]
        until = _stops(options)
        stops: dict[str, Any] = dict(stop_strings=until, tokenizer=self.tokenizer) if until else {}
        sampling = _sampling(options)
        self.engine.generate(
            **self._padded(prompts), **stops, **sampling, max_new_tokens=new_tokens, pad_token_id=0, cache_salt=new_salt()
        )
        return [self._text(row, until) for row in self.engine.last_rows]

    def _text(self, row: Any, until: list[str]) -> Reply:
        text = self.tokenizer.decode(row.new_tokens, skip_special_tokens=True)
        ends = [place for stop in until if (place := text.find(stop)) >= 0]
        return Reply(text[: min(ends, default=None)], list(row.new_tokens), len(row.new_tokens), row.stats.exited_tokens)

    def _score(self, requests: Sequence[Sequence[Any]], most: int | None) -> list[Reply]:
        return self._scored([self._pair(*request[:2]) for request in requests], most)

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context and of what follows; spaces at the end of a context belong to what follows."""
        kept = context.rstrip()
        whole = self.encode(context + continuation) if kept else [self.prefix, *self._bare(context + continuation)]
        before = self.encode(kept) if kept else [self.prefix]
        return before, whole[len(before) :]

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _roll(self, requests: Sequence[Sequence[Any]], most: int | None) -> list[Reply]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        found = []
        for (text,) in requests:
            windows = get_rolling_token_windows(self._bare(text), self.prefix, self.max_length - 1, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            parts = self._scored(pairs[:1] if most else pairs, most)
            value = sum(part.value[0] for part in parts)
            found.append(Reply(value, [], sum(part.tokens for part in parts), sum(part.exited for part in parts)))
        return found

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]], most: int | None) -> list[Reply]:
        """Return (log-likelihood, is greedy) of continuations. Pairs that are read alike share a row: choices of one token."""
        if most:
            pairs = [(before[-most:], after[:most]) for before, after in pairs]
        if (longest := max(len(after) for _, after in pairs)) > self.max_length:
            raise ValueError(f"expected continuations of up to {self.max_length} tokens, found one of {longest}.")
        read = [tuple((before + after)[-self.max_length - 1 : -1]) for before, after in pairs]
        rows = sorted({*read}, key=len)
        found: list[Reply | None] = [None] * len(pairs)
        for start in range(0, len(rows), self.rows):
            batch = rows[start : start + self.rows]
            logits = self._logits(batch)
            for row, own, counted in zip(batch, logits, self.engine.last_rows, strict=True):
                places = [place for place, ids in enumerate(read) if ids == row]
                for place in places:
                    found[place] = _judged(own, pairs[place][1], counted.stats.exited_tokens, len(row), place == places[0])
        return [reply for reply in found if reply is not None]

    def _logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return (rows, tokens, vocabulary) logits of texts."""
        padded = self._padded(rows)
        found: Any = self.engine(padded["input_ids"], padded["attention_mask"])
        logits: torch.Tensor = found.logits
        return logits

    def _padded(self, rows: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
        longest, device = max(map(len, rows)), self.engine.adapter.device
        ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        return {"input_ids": ids, "attention_mask": mask}


def _judged(logits: torch.Tensor, after: list[int], exited: int, tokens: int, is_first: bool) -> Reply:
    """Return the log-likelihood of `after` by the last rows of (tokens, vocabulary) logits; tokens read count once."""
    last = logits[-len(after) :].float() if after else logits[:0]
    wanted = torch.tensor(after, dtype=torch.long, device=last.device)
    chances = torch.log_softmax(last, dim=-1).gather(1, wanted[:, None]).double().sum().item()
    value = (chances, bool((last.argmax(-1) == wanted).all()))
    return Reply(value, [], tokens if is_first else 0, exited if is_first else 0)


def _stops(options: dict[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a request that the engine takes; sampled texts have a seed, the same for every contender."""
    if unknown := sorted({*options} - {*SAMPLING} - {*IGNORED}):
        raise ValueError(f"expected generation options {', '.join((*IGNORED, *SAMPLING))}, found {', '.join(unknown)}.")
    if not options.get("do_sample"):
        return {"do_sample": False}
    return {"do_sample": True, "seed": 0} | {name: options[name] for name in SAMPLING if name in options}
