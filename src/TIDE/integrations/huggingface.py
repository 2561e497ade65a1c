"""TIDE inside Hugging Face code: `model.generate` and pipelines.

model.generate(**inputs, custom_generate=TIDE.custom_generate, tide=engine)
TIDE.pipeline(engine, tokenizer)("Once upon a time", max_new_tokens=40)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers import pipeline as transformers_pipeline
from transformers.generation.streamers import BaseStreamer

from TIDE.engine.engine import TIDE
from TIDE.engine.request.request import captured


def custom_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    tide: TIDE | None = None,
    seed: int | Sequence[int] | None = None,
    cache_salt: str | None = None,
    **rest: Any,
) -> torch.Tensor:
    """Decode for `model.generate`, in place of its own loop.

    Args:
        tide: the engine.
        seed: of sampling, as in `TIDE.generate`.
        cache_salt: prompts that begin alike share K/V if they have the same one.
    """
    if not isinstance(tide, TIDE):
        raise TypeError(
            f"custom_generate needs an engine: model.generate(..., custom_generate=TIDE.custom_generate, tide=engine); "
            f"found {type(tide).__name__} for tide."
        )
    if tide.model is not model:
        raise ValueError(
            f"the engine belongs to another {type(tide.model).__name__} than the {type(model).__name__} that generates. Make "
            f"one for this model: TIDE.TIDE(model, ...)."
        )
    own = dict(seed=seed, cache_salt=cache_salt)
    request = captured(model, input_ids, logits_processor, stopping_criteria, generation_config, own=own, **rest)
    return tide.answer(request, _streamer_of_the_caller())


def _streamer_of_the_caller() -> BaseStreamer | None:
    """Return the streamer given to `model.generate`, which does not pass it to a custom decoding loop."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (frame.f_code.co_name == "generate" and "streamer" in frame.f_locals):
        frame = frame.f_back
    return None if frame is None else frame.f_locals["streamer"]


def pipeline(engine: TIDE, tokenizer: Any, **options: Any) -> Any:
    """Return a transformers pipeline for text generation that decodes with an engine.

    Args:
        options: of `transformers.pipeline`, and defaults of generation.
    """
    return transformers_pipeline(
        "text-generation", model=engine.model, tokenizer=tokenizer, custom_generate=custom_generate, tide=engine, **options
    )
