"""Settings of a request as the engine takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from TIDE.kernels.reference.noise import row_seed
from TIDE.server.errors import refused
from TIDE.server.requests import Sampling

GREEDY = 1e-5  # temperatures below are 0, as in vLLM
COLDEST = 0.01  # of those above: logits stay finite
LEAST_TOP_P = 1e-6
DEFAULTS = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0)


class SamplingDefaults:
    """Defaults where a request says nothing: the model's generation config, then OpenAI's defaults.

    Args:
        vocabulary: tokens that there are logits for.
    """

    def __init__(self, config: GenerationConfig, vocabulary: int) -> None:
        own = {name: getattr(config, name, None) for name in DEFAULTS}
        self.values = {name: DEFAULTS[name] if value is None else value for name, value in own.items()}
        ends = config.eos_token_id
        self.ends: list[int] = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]
        self.vocabulary = vocabulary

    def options(self, asked: Sampling, most_tokens: int, keeps_logits: bool) -> dict[str, Any]:
        """Return keywords for `engine.add`, all but the seed and the grammar."""
        values = {name: own if (given := getattr(asked, name)) is None else given for name, own in self.values.items()}
        found: dict[str, Any] = dict(
            max_new_tokens=most_tokens,
            do_sample=values["temperature"] >= GREEDY,
            repetition_penalty=float(values["repetition_penalty"]),
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=self._bias(asked.logit_bias),
            cache_salt=asked.cache_salt,
        )
        if found["do_sample"]:
            found["temperature"] = max(COLDEST, float(values["temperature"]))
            found["top_p"] = max(LEAST_TOP_P, float(values["top_p"]))
            found["top_k"] = max(0, values["top_k"])
            found["min_p"] = float(values["min_p"]) or None
        ends = self._ends(asked)
        found["eos_token_id"] = ends or None
        if asked.ignore_eos and asked.has_format:
            found["suppress_tokens"] = self.ends or None  # the grammar allows them where it allows nothing else
        if asked.min_tokens and ends:
            found["min_new_tokens"] = min(asked.min_tokens, most_tokens)
        if asked.min_tokens and asked.min_tokens > most_tokens:
            raise refused(f"min_tokens must be at most max_tokens, {most_tokens}, found {asked.min_tokens}.", "min_tokens")
        if keeps_logits:
            found |= dict(return_dict_in_generate=True, output_logits=True)
        return found

    def _ends(self, asked: Sampling) -> list[int]:
        own = asked.stop_token_ids or []
        if wrong := [token for token in own if not 0 <= token < self.vocabulary]:
            raise refused(f"stop_token_ids must be from 0 to {self.vocabulary - 1}, found {wrong[0]}.", "stop_token_ids")
        return [*([] if asked.ignore_eos and not asked.has_format else self.ends), *own]

    def _bias(self, bias: dict[str, float] | None) -> dict[int, float] | None:
        if not bias:
            return None
        found = {}
        for token, value in bias.items():
            if not token.isascii() or not token.isdigit() or int(token[:12]) >= self.vocabulary:
                raise refused(
                    f"logit_bias must name token ids from 0 to {self.vocabulary - 1}, found {token[:40]!r}.", "logit_bias"
                )
            found[int(token)] = value
        return found


def seeds(asked: Sampling, count: int) -> Sequence[list[int]]:
    """Return a seed for each answer. The same seed gives the same answers, in the same order."""
    seed = int(torch.randint(2**63 - 1, (1,))) if asked.seed is None else asked.seed % 2**64
    return [[row_seed(seed, number)] for number in range(count)]


def with_processor(options: dict[str, Any], processor: Any) -> dict[str, Any]:
    return options if processor is None else {**options, "logits_processor": LogitsProcessorList([processor])}
