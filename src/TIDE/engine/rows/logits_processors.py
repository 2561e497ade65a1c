"""Logits processors: those that kernels know, read as numbers, and the rest, which run on the host.

transformers makes a list of processors of every request, with the user's own among them. Where all of them are known, and stand
in the order that kernels apply them in, kernels need their numbers only. Otherwise the whole list runs on the host between deep
pass and choice. Drafts are always chosen by what kernels know: the full model's choice, with the whole list, verifies them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as theirs

from TIDE.kernels.reference.sampling import MOST_BANS, NOWHERE, Params

LEFT_OUT = "prompt_ignore_length"  # of a repetition penalty: columns from the first on that it does not count
TEMPERED = 4  # the order of temperature; filters come after it


class TextPenalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties, for new tokens.

    Attributes:
        start: columns of the prompt, which do not count.
    """

    def __init__(self, presence: float = 0.0, frequency: float = 0.0) -> None:
        self.presence = presence
        self.frequency = frequency
        self.start = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new = input_ids[:, self.start :]
        times = torch.zeros_like(scores).scatter_add_(1, new, torch.ones_like(new, dtype=scores.dtype))
        return scores - (self.presence * (times > 0) + self.frequency * times)


class LogitBias(LogitsProcessor):
    """OpenAI's logit bias: adds to the logits of some tokens."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.bias = dict(bias)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for token, value in self.bias.items():
            scores[:, token] += value
        return scores


class Sampling(NamedTuple):
    """How the tokens of a row are chosen."""

    params: Params = Params()  # what kernels do: for every token, or for drafts only
    processors: LogitsProcessorList | None = None  # as transformers made them
    custom: tuple[str, ...] = ()  # names of processors that kernels do not know: the whole list runs on the host
    seed: int | None = None  # None: greedy
    keeps_scores: bool = False  # logits and scores are part of the answer


class _Known(NamedTuple):
    """A processor in numbers: fields of `Params`, or None if its settings are beyond kernels."""

    order: int | None  # kernels apply lower ones first; None: its place does not matter, if it is before the filters
    read: Callable[[Any, int], dict[str, Any] | None]


def of_rows(processors: LogitsProcessorList | None, rows: int) -> list[LogitsProcessorList | None]:
    """Return the processors of each row. From 5.23 on transformers' repetition penalty leaves out padding, and knows how many
    columns of each row that are."""
    found = [getattr(one, LEFT_OUT, None) for one in processors or ()]
    columns = [own.tolist() if isinstance(own, torch.Tensor) else None for own in found]
    if all(own is None for own in columns):
        return [processors] * rows
    for own in columns:
        if own is not None and len(own) != rows:
            raise ValueError(f"expected {LEFT_OUT} of {rows} rows, found {len(own)}. Give a whole number, or one for each row.")
    pairs = list(zip(processors or (), columns, strict=True))
    return [
        LogitsProcessorList(one if own is None else _leaving_out(one, own[row]) for one, own in pairs) for row in range(rows)
    ]


def _leaving_out(one: Any, columns: int) -> Any:
    own = copy.copy(one)
    setattr(own, LEFT_OUT, columns)
    return own


def read(processors: LogitsProcessorList | None, do_sample: bool, shift: int) -> tuple[Params, tuple[str, ...]]:
    """Return what kernels know of processors, and the names of those that keep the list on the host; none: kernels do it all.

    Args:
        shift: position of a token less the columns that processors see before it.
    """
    params, others, last = Params(noise=do_sample), [], 0
    for one in processors or ():
        known = KNOWN.get(type(one))
        found = None if known is None else known.read(one, shift)
        merged = None if found is None else _merged(params, found)
        if known is None or merged is None:
            others.append(type(one).__name__)
            continue
        params = merged
        order = min(last, TEMPERED) if known.order is None else known.order
        if order < last:
            others.append(type(one).__name__)
        last = max(last, order)
    return params, tuple(others)


def _merged(params: Params, found: dict[str, Any]) -> Params | None:
    """Add what a processor does; None if another one has set the same number, or lists become too long."""
    default = Params()
    for name, value in found.items():
        if name in ("bias", "bans"):
            found[name] = (*getattr(params, name), *value)
        elif getattr(params, name) != getattr(default, name):
            return None
    merged = params._replace(**found)
    forbidden = {token for token, value in merged.bias if value == float("-inf")}
    is_forbidden = merged.forced[0] != NOWHERE and merged.forced[1] in forbidden
    return None if len(merged.bans) > MOST_BANS or is_forbidden else merged


def _sequence_bias(one: Any, shift: int) -> dict[str, Any] | None:
    if any(len(sequence) > 1 for sequence in one.sequence_bias):
        return None
    return {"bias": tuple((int(sequence[0]), float(value)) for sequence, value in one.sequence_bias.items())}


def _never(tokens: Any) -> dict[str, Any]:
    return {"bias": tuple((token, float("-inf")) for token in sorted(set(tokens.tolist())))}


def _before(tokens: Any, columns: int, shift: int) -> dict[str, Any]:
    """Ban tokens while fewer columns stand before them."""
    last = columns + shift - 1
    return {"bans": tuple((token, 0, last) for token in tokens.tolist()) if last >= 0 else ()}


def _at_begin(one: Any, shift: int) -> dict[str, Any]:
    at = one.begin_index + shift
    return {"bans": tuple((token, at, at) for token in one.begin_suppress_tokens.tolist())}


def _forced_end(one: Any, shift: int) -> dict[str, Any] | None:
    tokens = one.eos_token_id.flatten().tolist()
    return {"forced": (int(one.max_length) - 1 + shift, tokens[0])} if len(tokens) == 1 else None


def _repetition(one: Any, shift: int) -> dict[str, Any] | None:
    left_out = getattr(one, LEFT_OUT, None) or 0
    if left_out not in (0, -shift):
        return None
    return {"repetition": float(one.penalty), "counts_padding": not left_out}


def _filter(one: Any, **found: Any) -> dict[str, Any] | None:
    """A filter that keeps one token at least and removes the others for good."""
    return found if getattr(one, "min_tokens_to_keep", 1) == 1 and one.filter_value == -float("inf") else None


KNOWN: dict[type, _Known] = {
    theirs.RepetitionPenaltyLogitsProcessor: _Known(1, _repetition),
    TextPenalties: _Known(2, lambda one, shift: {"presence": one.presence, "frequency": one.frequency}),
    theirs.SequenceBiasLogitsProcessor: _Known(3, _sequence_bias),
    LogitBias: _Known(3, lambda one, shift: {"bias": tuple(one.bias.items())}),
    # what is forbidden stays so whatever comes before or after
    theirs.NoBadWordsLogitsProcessor: _Known(None, _sequence_bias),
    theirs.SuppressTokensLogitsProcessor: _Known(None, lambda one, shift: _never(one.suppress_tokens)),
    theirs.MinLengthLogitsProcessor: _Known(None, lambda one, shift: _before(one.eos_token_id, one.min_length, shift)),
    theirs.MinNewTokensLengthLogitsProcessor: _Known(
        None, lambda one, shift: _before(one.eos_token_id, one.prompt_length_to_skip + one.min_new_tokens, shift)
    ),
    theirs.SuppressTokensAtBeginLogitsProcessor: _Known(None, _at_begin),
    theirs.ForcedBOSTokenLogitsProcessor: _Known(None, lambda one, shift: {"forced": (1 + shift, int(one.bos_token_id))}),
    theirs.ForcedEOSTokenLogitsProcessor: _Known(None, _forced_end),
    theirs.TemperatureLogitsWarper: _Known(TEMPERED, lambda one, shift: {"temperature": float(one.temperature)}),
    theirs.TopKLogitsWarper: _Known(5, lambda one, shift: _filter(one, top_k=int(one.top_k))),
    theirs.TopPLogitsWarper: _Known(6, lambda one, shift: _filter(one, top_p=float(one.top_p))),
    theirs.MinPLogitsWarper: _Known(7, lambda one, shift: _filter(one, min_p=float(one.min_p))),
    theirs.LogitNormalization: _Known(8, lambda one, shift: {}),
}
