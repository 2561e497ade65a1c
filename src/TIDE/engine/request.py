"""What the user asked for, prepared by transformers itself.

`model.generate` resolves generation configs, keywords, special tokens, processors and stopping criteria, and
hands them to a `custom_generate` callable. Ours takes them and returns; decoding happens outside. What TIDE
does not do is refused here with the alternative named; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation import GenerationMode, PrefixConstrainedLogitsProcessor

USE_GENERATE = "use model.generate for it"


@dataclass
class Request:
    """Prompts and how to continue them."""

    ids: torch.Tensor  # (rows, columns), left-padded
    padding: list[int]
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def pad_token_id(self) -> int:
        """What fills rows that end before others; a single row needs none."""
        found = _padding_token(self.config)
        return 0 if found is None else found


def prepare(
    model: PreTrainedModel, ids: torch.Tensor, generation_config: GenerationConfig | None, options: dict[str, Any]
) -> Request:
    """Let transformers make sense of `options`, as `model.generate` would."""
    _refuse_keywords(options)
    configs = [config for config in (generation_config, model.generation_config) if config is not None]
    options = dict(options)
    options["stopping_criteria"] = _with_stop_strings(configs, options)
    with _no_stop_strings(configs):
        request: Request = model.generate(ids, generation_config=generation_config, custom_generate=_capture, **options)
    return _accepted(request)


def captured(model: PreTrainedModel, *given: Any, **rest: Any) -> Request:
    """What `model.generate` hands to a `custom_generate` of the user's own call."""
    return _accepted(_capture(model, *given, **rest))


def _accepted(request: Request) -> Request:
    _refuse_modes(request.config)
    if len(request.ids) > 1:
        _refuse_for_several_rows(request)
    return request


def check_ids(model: PreTrainedModel, input_ids: Any) -> torch.Tensor:
    """(rows, columns) token ids, or an error that says what is wrong with them."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.dtype not in (torch.long, torch.int):
        found = input_ids.dtype if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise TypeError(
            f'expected input_ids as a tensor of token ids, found {found}. Use tokenizer(text, return_tensors="pt").'
        )
    if input_ids.ndim != 2:
        raise ValueError(
            f"expected input_ids of shape (rows, tokens), found {tuple(input_ids.shape)}. Use input_ids[None] for one prompt."
        )
    if input_ids.numel() == 0:
        raise ValueError("the prompt is empty. Start from at least one token, such as tokenizer.bos_token_id.")
    vocabulary = getattr(model.get_input_embeddings(), "num_embeddings", model.config.get_text_config(decoder=True).vocab_size)
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocabulary:
        raise ValueError(
            f"token ids must be from 0 to {vocabulary - 1} for this model, found {int(input_ids.min())} to "
            f"{int(input_ids.max())}. Does the tokenizer belong to the model?"
        )
    return input_ids.long()


def left_padding(mask: torch.Tensor | None, ids: torch.Tensor) -> list[int]:
    """Columns of padding before each row; anything but left padding is refused."""
    if mask is None:
        return [0] * len(ids)
    if mask.shape != ids.shape:
        raise ValueError(f"attention_mask must have the shape of input_ids, {tuple(ids.shape)}, found {tuple(mask.shape)}.")
    mask = mask.bool()
    if not bool(mask.any(-1).all()):
        raise ValueError("a prompt is empty: its attention_mask is all zeros. Give every row at least one token.")
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError("prompts must be padded on the left. Set tokenizer.padding_side = 'left'.")
    return (~mask).sum(-1).tolist()


def context_limit(model: PreTrainedModel) -> int | None:
    """Tokens the model was made for, where its config says so."""
    config = model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    return int(limit) if limit else None


def check_context(model: PreTrainedModel, lengths: list[int], room_for: int) -> None:
    """Make sure that prompts of these lengths and `room_for` more tokens fit."""
    limit = context_limit(model)
    if limit is not None and max(lengths) + room_for > limit:
        raise ValueError(
            f"the prompt has {max(lengths)} tokens and the model's context holds {limit}. Shorten the prompt or choose a "
            f"model with a longer context."
        )


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
    made_by_generate = {"position_ids", "past_key_values", "use_cache", "logits_to_keep", "cache_position", "synced_gpus"}
    if extra := sorted(name for name, value in rest.items() if name not in made_by_generate and value not in (None, {})):
        raise ValueError(f"TIDE does not pass {extra} on to the model; {USE_GENERATE}.")
    return Request(input_ids, left_padding(attention_mask, input_ids), logits_processor, stopping_criteria, generation_config)


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
    refused = ("inputs_embeds", "position_ids", "past_key_values", "assistant_model", "negative_prompt_ids", "custom_generate")
    for name in (*refused, "token_healing"):
        if options.get(name) is not None:
            raise ValueError(f"TIDE generates from input_ids as they are and does not take {name}; {USE_GENERATE}.")


def _refuse_modes(config: GenerationConfig) -> None:
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"TIDE decodes greedily or by sampling and does not do {mode.value.replace('_', ' ')}; {USE_GENERATE}."
        )
    refused = {
        "classifier-free guidance": config.guidance_scale not in (None, 1),
        "returning a dict of outputs": bool(config.return_dict_in_generate),
        "SynthID watermarks, which count the calls to them": isinstance(
            config.watermarking_config, SynthIDTextWatermarkingConfig
        ),
    }
    if asked := [name for name, is_asked in refused.items() if is_asked]:
        raise ValueError(f"TIDE does not do {', '.join(asked)}; {USE_GENERATE}.")


def _refuse_for_several_rows(request: Request) -> None:
    """What is told which row it works on, or keeps something of all rows: TIDE's rows advance separately."""
    config = request.config
    by_row = {
        "prefix_allowed_tokens_fn": any(isinstance(one, PrefixConstrainedLogitsProcessor) for one in request.processors),
        "encoder_no_repeat_ngram_size": bool(config.encoder_no_repeat_ngram_size),
        "encoder_repetition_penalty": config.encoder_repetition_penalty not in (None, 1),
    }
    if asked := [name for name, is_asked in by_row.items() if is_asked]:
        raise ValueError(f"{', '.join(asked)} look at the rows together, and TIDE's advance separately. Pass one row per call.")
    if _padding_token(config) is None:
        raise ValueError(
            "rows may end at different lengths and there is no padding token. Pass pad_token_id=..., or one row per call."
        )


def refuse_ropes_that_change(request: Request, switches_at: int | None, limit: int | None) -> None:
    """Rotary frequencies chosen by the longest row of a pass cannot serve rows that advance separately."""
    longest = min(request.config.max_length, limit or request.config.max_length)
    if switches_at is not None and longest > switches_at and (len(request.ids) > 1 or any(request.padding)):
        raise ValueError(
            f"this model's rotary embedding changes after {switches_at} tokens, for all rows of a batch at once, and up to "
            f"{longest} are asked for. Pass one row per call, without padding, or ask for less."
        )
