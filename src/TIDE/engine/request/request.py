"""A request: prompts and how to continue them, prepared by transformers itself.

`model.generate` resolves generation configs, keywords, special tokens, processors and stopping criteria, and
hands them to a `custom_generate` callable. Ours takes them and returns; decoding happens outside. What TIDE
does not do is refused here with the alternative named; nothing is ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import GenerationMode, MaxLengthCriteria, PrefixConstrainedLogitsProcessor

from TIDE.engine.request.inputs import USE_GENERATE, left_padding
from TIDE.engine.request.options import Made, OptionCache, check, row_seeds, take_own
from TIDE.engine.rows.logits_processors import Sampling, TextPenalties, of_rows, read
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import Context, StopRule
from TIDE.stats import Seconds


@dataclass
class Request:
    """Prompts and how to continue them."""

    ids: torch.Tensor  # (rows, columns), left-padded; without columns where there are embeddings only
    embeds: torch.Tensor | None  # (rows, columns, hidden)
    padding: list[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    seed: int | Sequence[int] | None = None  # of sampling; one for each row, or one for all
    salt: str | None = None  # K/V are shared with texts of the same salt only

    @property
    def prompt_columns(self) -> int:
        """Columns of the prompts, padding included."""
        return self.ids.shape[1] if self.embeds is None else self.embeds.shape[1]

    @property
    def columns(self) -> int:
        """Columns of the longest text that may come of it."""
        if self.config.max_length is None:
            return self.prompt_columns
        return math.ceil(self.config.max_length) + self.prompt_columns - self.ids.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return self.prompt_columns - min(self.padding)

    @property
    def keeps_scores(self) -> bool:
        """True if the answer is to come with the logits or scores of its tokens."""
        return bool(self.config.return_dict_in_generate and (self.config.output_scores or self.config.output_logits))

    def rows(self, num_layers: int, context: Context) -> list[Row]:
        """Return a row for each prompt."""
        stop = StopRule(self.criteria, context, self.ids.device)
        samplings = self._samplings()
        unseen = self.prompt_columns - self.ids.shape[1]
        seconds = Seconds()
        stop.warn_past_context(self.longest)
        return [
            Row(
                ([0] * unseen + ids)[pad:],
                stop,
                num_layers,
                index=index,
                padding=([0] * unseen + ids)[:pad],
                embeds=None if self.embeds is None else self.embeds[index, pad:],
                unseen=unseen,
                sampling=samplings[index],
                salt=self.salt,
                seconds=seconds,
            )
            for index, (ids, pad) in enumerate(zip(self.ids.tolist(), self.padding, strict=True))
        ]

    def _samplings(self) -> list[Sampling]:
        """Return how the tokens of each row are chosen."""
        do_sample = bool(self.config.do_sample)
        seeds = row_seeds(self.seed, len(self.padding)) if do_sample else [None] * len(self.padding)
        unseen = self.prompt_columns - self.ids.shape[1]
        found = []
        for pad, seed, own in zip(self.padding, seeds, of_rows(self.processors, len(self.padding)), strict=True):
            params, custom = read(own, do_sample, unseen - pad)
            found.append(Sampling(params, own, custom, seed, self.keeps_scores))
        return found

    def final_columns(self, rows: list[Row]) -> int:
        """Return how many columns are final in every row."""
        ends = {row: len(row.padding) + len(row.tokens) for row in rows}
        going = [ends[row] for row in rows if not row.finished]
        return min(going) if going else max(ends.values())

    def column(self, rows: list[Row], column: int) -> torch.Tensor:
        """Return the (rows,) ids of a final column on the host, padding where a row ended before it.

        Moving them to a device would wait for the round that is already running there.
        """
        return torch.tensor([self._id_at(row, column - len(row.padding)) for row in rows])

    def _id_at(self, row: Row, position: int) -> int:
        return row.tokens[position] if position < len(row.tokens) else self.pad_token_id

    def output(self, rows: list[Row]) -> torch.Tensor:
        """Return (rows, columns) prompts and continuations, padded on the right where rows ended early."""
        texts = [row.shown() for row in rows]
        width = max(map(len, texts))
        texts = [text + [self.pad_token_id] * (width - len(text)) for text in texts]
        return torch.from_numpy(np.array(texts, np.int64)).to(self.ids.device)  # torch takes three times as long for lists

    @property
    def pad_token_id(self) -> int:
        """The token that fills rows that end before others; a single row needs none."""
        found = _padding_token(self.config)
        return 0 if found is None else found


def prepare(
    model: PreTrainedModel,
    ids: torch.Tensor | None,
    generation_config: GenerationConfig | None,
    options: dict[str, Any],
    vocabulary: int,
    remembered: OptionCache,
) -> Request:
    """Let transformers make sense of `options`, as `model.generate` would, and TIDE of its own: see `options.py`."""
    _refuse_keywords(options)
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    options = dict(options)
    check(options, configs)
    own = take_own(options, vocabulary)
    key, mask = None, options.get("attention_mask")
    if generation_config is None and ids is not None and len(ids) == 1 and mask is not None and not own.processors:
        plain, padding = {name: own for name, own in options.items() if name != "attention_mask"}, left_padding(mask, ids.shape)
        key = None if any(padding) else remembered.key(model.generation_config, plain, ids.device)
        if key is not None and (made := remembered.find(key, ids.shape[1])) is not None:
            return Request(ids, None, padding, *made, own.seed, own.salt)
    options["stopping_criteria"] = _with_stop_strings(configs, options)
    if own.processors:
        options["logits_processor"] = LogitsProcessorList([*own.processors, *(options.get("logits_processor") or ())])
    if generation_config is None and not any(getattr(config, "cache_implementation", None) for config in configs):
        options.setdefault("use_cache", False)  # theirs would be made for nothing
    with _no_stop_strings(configs):
        request: Request = model.generate(ids, generation_config=generation_config, custom_generate=_capture, **options)
    request.seed, request.salt = own.seed, own.salt
    request = _accepted(request)
    if key is not None and ids is not None and request.embeds is None and request.ids.shape == ids.shape:
        remembered.keep(key, ids.shape[1], Made(request.processors, request.criteria, request.config))
    return request


def captured(model: PreTrainedModel, *given: Any, own: dict[str, Any], **rest: Any) -> Request:
    """Return the request that `model.generate` hands to the user's own `custom_generate`; `own` are TIDE's options."""
    request = _capture(model, *given, **rest)
    check({}, [request.config])
    request.seed, request.salt, _ = take_own(own, vocabulary=0)
    return _accepted(request)


def _accepted(request: Request) -> Request:
    _refuse_modes(request.config)
    if len(request.ids) > 1:
        _refuse_for_several_rows(request)
    return request


def _padding_token(config: GenerationConfig) -> int | None:
    """The padding token, or the first end token in its place, as in `model.generate`."""
    if config.pad_token_id is not None:
        return int(config.pad_token_id)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list | tuple) else [config.eos_token_id]
    return None if ends[0] is None else int(ends[0])


def _capture(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **rest: Any,  # naming any of it would make `generate` take it for a keyword of ours and pass it twice
) -> Request:
    """Called by `model.generate` where it would start decoding."""
    attention_mask = rest.pop("attention_mask", None)
    embeds = rest.pop("inputs_embeds", None)
    made_by_generate = {"position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position", "synced_gpus"}
    if extra := sorted(name for name, value in rest.items() if name not in made_by_generate and value not in (None, {})):
        raise ValueError(f"TIDE does not pass {extra} on to the model; {USE_GENERATE}.")
    shape = (input_ids if embeds is None else embeds).shape[:2]
    padding = left_padding(attention_mask, shape)
    for one in logits_processor:
        if isinstance(one, TextPenalties):
            one.start = input_ids.shape[1]
    return Request(input_ids, embeds, padding, logits_processor, stopping_criteria, generation_config)


def _with_stop_strings(configs: list[GenerationConfig], options: dict[str, Any]) -> StoppingCriteriaList:
    """The user's criteria and one for stop strings, for which `generate` keeps no tokenizer in this path."""
    criteria = StoppingCriteriaList(options.get("stopping_criteria") or [])
    tokenizer = options.pop("tokenizer", None)
    asked = [options.pop("stop_strings", None), *(config.stop_strings for config in configs)]
    strings = next((found for found in asked if found), None)
    if strings is not None:
        if tokenizer is None:
            raise ValueError("stop_strings need the tokenizer to be compared: pass tokenizer=... as well.")
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria


@contextmanager
def _no_stop_strings(configs: list[GenerationConfig]) -> Iterator[None]:
    """The criterion is ours already: `generate` must not look for a tokenizer to make it again."""
    held = [config.stop_strings for config in configs]
    for config in configs:
        config.stop_strings = None
    try:
        yield
    finally:
        for config, strings in zip(configs, held, strict=True):
            config.stop_strings = strings


def _refuse_keywords(options: dict[str, Any]) -> None:
    refused = ("position_ids", "past_key_values", "assistant_model", "negative_prompt_ids", "custom_generate")
    for name in (*refused, "token_healing"):
        if options.get(name) is not None:
            raise ValueError(f"TIDE generates from the prompt as it is and does not take {name}; {USE_GENERATE}.")


def _refuse_modes(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"TIDE decodes greedily or by sampling and does not do {mode.value.replace('_', ' ')}; {USE_GENERATE}."
        )
    refused = {
        "classifier-free guidance": config.guidance_scale not in (None, 1),
        "SynthID watermarks, which count the calls to them": isinstance(
            config.watermarking_config, SynthIDTextWatermarkingConfig
        ),
    }
    if asked := [name for name, is_asked in refused.items() if is_asked]:
        raise ValueError(f"TIDE does not do {', '.join(asked)}; {USE_GENERATE}.")


def _refuse_for_several_rows(request: Request) -> None:
    """Refuse processors that look at several rows at once: TIDE's rows advance separately."""
    config = request.config
    by_row = {
        "prefix_allowed_tokens_fn": any(isinstance(one, PrefixConstrainedLogitsProcessor) for one in request.processors),
        "encoder_no_repeat_ngram_size": bool(config.encoder_no_repeat_ngram_size),
        "encoder_repetition_penalty": config.encoder_repetition_penalty not in (None, 1),
    }
    if asked := [name for name, is_asked in by_row.items() if is_asked]:
        raise ValueError(f"{', '.join(asked)} look at the rows together, and TIDE's advance separately. Pass one row per call.")
    if _padding_token(config) is None and not all(type(one) is MaxLengthCriteria for one in request.criteria):
        raise ValueError(
            "rows may end at different lengths and there is no padding token. Pass pad_token_id=..., or one row per call."
        )


def refuse_ropes_that_change(request: Request, switches_at: int | None) -> None:
    """Rotary frequencies chosen by the longest row of a pass cannot serve rows that advance separately."""
    longest = request.columns
    if switches_at is not None and longest > switches_at and (len(request.ids) > 1 or any(request.padding)):
        raise ValueError(
            f"this model's rotary embedding changes after {switches_at} tokens, for all rows of a batch at once, and up to "
            f"{longest} are asked for. Pass one row per call, without padding, or ask for less."
        )
