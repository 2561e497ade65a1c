"""Requests of the harness, answered by an engine in batches.

    generate_until           greedy or sampled text up to a stop string, by `engine.generate`; the repeats of a question, which
                             a third value of a request numbers, are sampled with other noise
    loglikelihood            of a continuation after a context: reading.py
    loglikelihood_rolling    of a whole text, in windows

In mode fast log-likelihoods are those of the exits where tokens leave, as if the engine wrote the given text, context included.
Otherwise they are the full model's. Every contender reads with its own pass, exits off and mode exact too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.engine.engine import TIDE
from TIDE.engine.request.inputs import left_padded
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import context_of
from TIDE.evals.reading import Read, read

MOST_TOKENS = 2048  # of a text with its answer, unless the model was made for fewer
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
IGNORED = ("do_sample", "until", "max_gen_toks")
MOST_LOGITS = 512  # tokens of a text whose logits exist at a time
Pair = tuple[list[int], list[int]]  # a context and what follows it


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
        asked = _sampling(options) | dict(max_new_tokens=new_tokens, pad_token_id=0, cache_salt=new_salt())
        asked |= {"seed": [_seed(*request) for request in requests]} if asked["do_sample"] else {}
        self.engine.generate(**left_padded(prompts, self.engine.adapter.device), **stops, **asked)
        return [self._text(row, until) for row in self.engine.last_rows]

    def _text(self, row: Row, until: list[str]) -> Reply:
        text = self.tokenizer.decode(row.new_tokens, skip_special_tokens=True)
        ends = [place for stop in until if (place := text.find(stop)) >= 0]
        return Reply(text[: min(ends, default=None)], row.new_tokens, len(row.new_tokens), row.stats.exited_tokens)

    def _score(self, requests: Sequence[Sequence[Any]], most: int | None) -> list[Reply]:
        return self._scored([self._pair(*request[:2]) for request in requests], most)

    def _pair(self, context: str, continuation: str) -> Pair:
        """Return the ids of a context and of what follows; spaces at the end of a context belong to what follows."""
        kept = context.rstrip()
        whole = self.encode(context + continuation) if kept else [self.prefix, *self._bare(context + continuation)]
        before = self.encode(kept) if kept else [self.prefix]
        return before, whole[len(before) :]

    def _bare(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _roll(self, requests: Sequence[Sequence[Any]], most: int | None) -> list[Reply]:
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        texts: list[list[Pair]] = []
        for (text,) in requests:
            windows = get_rolling_token_windows(self._bare(text), self.prefix, self.max_length - 1, 1)
            pairs = [make_disjoint_window(window) for window in windows]
            texts.append(pairs[:1] if most else pairs)
        parts = iter(self._scored([pair for pairs in texts for pair in pairs], most))
        return [_joined([next(parts) for _ in pairs]) for pairs in texts]

    def _scored(self, pairs: Sequence[Pair], most: int | None) -> list[Reply]:
        """Return (log-likelihood, is greedy) of continuations. Pairs that are read alike share a row: choices of one token."""
        if most:
            pairs = [(before[-most:], after[:most]) for before, after in pairs]
        if (longest := max((len(after) for _, after in pairs), default=0)) > self.max_length:
            raise ValueError(f"expected continuations of up to {self.max_length} tokens, found one of {longest}.")
        places: dict[tuple[int, ...], list[int]] = {}
        for place, (before, after) in enumerate(pairs):
            places.setdefault(tuple((before + after)[-self.max_length - 1 : -1]), []).append(place)
        rows = sorted(places, key=len)
        found: dict[int, Reply] = {}
        for start in range(0, len(rows), self.rows):
            batch = rows[start : start + self.rows]
            for row, own in zip(batch, read(self.engine, batch), strict=True):
                for place in places[row]:
                    is_first = place == places[row][0]  # tokens read count once
                    value = _judged(own, len(row), pairs[place][1])
                    found[place] = Reply(value, [], len(row) * is_first, own.exited * is_first)
        return [found[place] for place in range(len(pairs))]


def _joined(parts: list[Reply]) -> Reply:
    """Return the answer to a text that was read in windows."""
    value = sum(part.value[0] for part in parts)
    return Reply(value, [], sum(part.tokens for part in parts), sum(part.exited for part in parts))


def _judged(read: Read, size: int, end: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of what stands after the last tokens of a text of `size` tokens, and whether it is greedy."""
    total, is_greedy, first = 0.0, True, size - len(end)
    for start in range(first, size, MOST_LOGITS):
        logits = read.logits(start, min(size, start + MOST_LOGITS)).float()
        wanted = torch.tensor(end[start - first :][: len(logits)], device=logits.device)
        total += torch.log_softmax(logits, dim=-1).gather(1, wanted[:, None]).double().sum().item()
        is_greedy &= bool((logits.argmax(-1) == wanted).all())
    return total, is_greedy


def _stops(options: dict[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _sampling(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a request that the engine takes."""
    if unknown := sorted({*options} - {*SAMPLING} - {*IGNORED}):
        raise ValueError(f"expected generation options {', '.join((*IGNORED, *SAMPLING))}, found {', '.join(unknown)}.")
    if not options.get("do_sample"):
        return {"do_sample": False}
    return {"do_sample": True} | {name: options[name] for name in SAMPLING if name in options}


def _seed(context: str, options: dict[str, Any], repeat: int = 0) -> int:
    """Return the seed of a sampled text: of its question and repeat, the same for every contender and batch."""
    return int.from_bytes(hashlib.sha256(f"{repeat} {context}".encode()).digest()[:8], "big")
