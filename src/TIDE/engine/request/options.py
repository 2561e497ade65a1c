"""Options of a request: those TIDE has beside transformers', checks of both before anything runs, and a cache of parsed ones.

seed                                    an integer, or one for each row
presence_penalty, frequency_penalty     OpenAI's, for new tokens
logit_bias                              {token id: number}, added to logits
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation import logits_process as theirs

from TIDE.engine.rows.logits_processors import LogitBias, TextPenalties
from TIDE.kernels.reference.noise import row_seed

OWN = ("seed", "cache_salt", "presence_penalty", "frequency_penalty", "logit_bias")
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
ELSEWHERE = {  # options of OpenAI, vLLM, llama.cpp and Ollama, and what they are called here
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_output_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings, with tokenizer=...",
    "stop_token_ids": "eos_token_id",
    "ignore_eos": "eos_token_id=None",
    "temp": "temperature, with do_sample=True",
    "top_n": "top_k, with do_sample=True",
    "repeat_penalty": "repetition_penalty",
    "logprobs": "output_scores, with return_dict_in_generate=True",
    "stream": "engine.stream(...), or a streamer",
    "prompt": "inputs=tokenizer(prompt, return_tensors='pt')",
    "messages": "inputs=tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors='pt', "
    "return_dict=True)",
}


PLAIN = {bool, int, float, str, type(None)}
MOST_SETS = 256  # sets of options
ALIKE = {  # processors that do the same after any prompt, and keep nothing
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.TemperatureLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopPLogitsWarper,
    theirs.MinPLogitsWarper,
    theirs.LogitNormalization,
}


class Own(NamedTuple):
    """TIDE's own options."""

    seed: int | Sequence[int] | None
    salt: str | None
    processors: list[LogitsProcessor]


def take_own(options: dict[str, Any], vocabulary: int) -> Own:
    """Take TIDE's own options out of `options`; penalties and biases become processors."""
    seed, salt, presence, frequency, bias = (options.pop(name, None) for name in OWN)
    for own in seed if _is_list(seed) else [] if seed is None else [seed]:
        _checked_seed(own)
    penalties = [_number("presence_penalty", presence), _number("frequency_penalty", frequency)]
    processors: list[LogitsProcessor] = [TextPenalties(*penalties)] if any(penalties) else []
    if bias:
        processors.append(LogitBias(_checked_bias(bias, vocabulary)))
    return Own(seed, _checked_salt(salt), processors)


def check(options: Mapping[str, Any], configs: Sequence[GenerationConfig]) -> None:
    """Refuse names that transformers does not have, and values that cannot work; say what to use instead."""
    for name, value in options.items():
        if name in ELSEWHERE and value is not None:
            raise TypeError(f"there is no option {name} here: use {ELSEWHERE[name]}.")
    for name in ("logits_processor", "stopping_criteria"):
        _check_callables(name, options.get(name))

    def asked(name: str) -> Any:
        given = [options.get(name), *(getattr(config, name, None) for config in configs)]
        return next((value for value in given if value is not None), None)

    for name in LENGTHS:
        if (length := asked(name)) is not None and (isinstance(length, bool | str) or not hasattr(length, "__ceil__")):
            raise TypeError(f"{name} must be a whole number of tokens, found {length!r}. Use {name}=64.")
    does_sample = bool(asked("do_sample"))
    allowed = {
        "temperature": (0.0, math.inf, "Use do_sample=False to always take the best token."),
        "top_p": (0.0, 1.0, "Use 1.0 to allow all tokens, or do_sample=False to always take the best one."),
        "repetition_penalty": (0.0, math.inf, "Use 1.0 for no penalty."),
    }
    for name, (above, most, instead) in allowed.items():
        value = asked(name)
        if value is None or (name != "repetition_penalty" and not does_sample):
            continue
        if not isinstance(value, int | float) or not above < value <= most or value == math.inf:
            up_to = "" if most == math.inf else f" and at most {most:g}"
            raise ValueError(f"{name} must be a number above {above:g}{up_to}, found {value!r}. {instead}")


def _check_callables(name: str, value: Any) -> None:
    if value is None or (isinstance(value, list | tuple) and all(map(callable, value))):
        return
    found = repr(value) if isinstance(value, list | tuple) else type(value).__name__
    raise TypeError(f"{name} must be a list of callables, found {found}. Use {name}=[...], each called with ids and scores.")


def row_seeds(seed: int | Sequence[int] | None, rows: int) -> list[int]:
    """Return a seed for each row; without one, torch's generator gives it."""
    if seed is None:
        seed = int(torch.randint(2**63 - 1, (1,)))
    if _is_list(seed):
        assert isinstance(seed, Sequence)
        if len(seed) != rows:
            raise ValueError(f"expected one seed for each row, {rows}, found {len(seed)}. A single integer serves all rows.")
        return [_checked_seed(own) for own in seed]
    return [row_seed(_checked_seed(seed), row) for row in range(rows)]


def _is_list(seed: Any) -> bool:
    return isinstance(seed, Sequence) and not isinstance(seed, str)


def _checked_seed(seed: Any) -> int:
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"a seed must be an integer, found {type(seed).__name__}. Pass seed=0, or one integer for each row.")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"a seed must fit into 64 bits, from -2**63 to 2**64 - 1, found {seed}.")
    return seed % 2**64


def _number(name: str, value: Any) -> float:
    if value is None:
        return 0.0
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, found {value!r}. Use 0 for none.")
    return float(value)


def _checked_bias(bias: Any, vocabulary: int) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise TypeError(f"logit_bias must map token ids to numbers, found {type(bias).__name__}.")
    found = {}
    for token, value in bias.items():
        if not isinstance(token, int) or not 0 <= token < vocabulary:
            raise ValueError(f"logit_bias must name token ids from 0 to {vocabulary - 1}, found {token!r}.")
        if not isinstance(value, int | float) or math.isnan(value) or value == math.inf:
            raise ValueError(f"logit_bias must be numbers below infinity, found {value!r} for token {token}.")
        found[token] = float(value)
    return found


def _checked_salt(salt: Any) -> str | None:
    if salt is not None and not isinstance(salt, str):
        raise ValueError(f"cache_salt must be a string, found {salt!r}. Texts of other salts share no K/V with it.")
    return salt


class Made(NamedTuple):
    """Options as transformers reads them."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


class OptionCache:
    """Options of one row and what transformers made of them, for prompts of any length. Other defaults of the model empty it.

    `model.generate` takes a millisecond or two to make processors, criteria and a config of options, longer than a round of a
    small model, and servers get the same ones again and again. They are kept where nothing depends on the prompt but the length
    of the text.
    """

    def __init__(self) -> None:
        self._defaults: Hashable = None
        self._made: dict[Hashable, tuple[Made, int]] = {}

    def key(self, defaults: GenerationConfig | None, options: Mapping[str, Any], device: Any) -> Hashable | None:
        """Return what options are remembered by; None: they are not, for they may mean something else the next time.

        Args:
            options: of one row, the prompt and its mask left out.
        """
        if type(options.get("max_new_tokens")) is not int or defaults is None:
            return None
        own, theirs = _plain(options), _plain(vars(defaults))
        if own is None or theirs is None:
            return None
        if theirs != self._defaults:
            self._defaults, self._made = theirs, {}
        return own, device

    def find(self, key: Hashable, columns: int) -> Made | None:
        """Return what came of options, for a prompt of `columns` columns."""
        if key not in self._made:
            return None
        (processors, criteria, config), was = self._made[key]
        config = copy.copy(config)
        config.max_length += columns - was
        return Made(processors, StoppingCriteriaList(_for(config, one) for one in criteria), config)

    def keep(self, key: Hashable, columns: int, made: Made) -> None:
        """Remember what came of options after a prompt of `columns` columns, if it can be made fit for others."""
        kinds = {type(one) for one in made.criteria}
        is_plain = kinds <= {MaxLengthCriteria, EosTokenCriteria} and {type(one) for one in made.processors} <= ALIKE
        if is_plain and made.config.max_length == columns + (made.config.max_new_tokens or 0):
            if len(self._made) == MOST_SETS:
                self._made.pop(next(iter(self._made)))
            self._made[key] = made, columns


def _plain(options: Mapping[str, Any]) -> frozenset[Hashable] | None:
    """Return options as something to compare, if all of them are numbers and words, or lists of such."""
    found = set[Hashable]()
    for name, value in options.items():
        parts = tuple(value) if type(value) in (list, tuple) else (value,)
        kinds = tuple(map(type, parts))  # 1, 1.0 and True are the same otherwise
        if not set(kinds) <= PLAIN:
            return None
        found.add((name, type(value), kinds, parts))
    return frozenset(found)


def _for(config: GenerationConfig, one: Any) -> Any:
    if type(one) is MaxLengthCriteria:
        return MaxLengthCriteria(config.max_length, one.max_position_embeddings)
    return one
