"""The table of model families: the path of the decoder layers and the return type of a layer.

Everything else (embedding, positions, masks, norms, scaling, the LM head) is done by the model's own `forward`. A model that
is not in the table is probed (`probe.py`); a new family is one line.
"""

from __future__ import annotations

from typing import NamedTuple


class Family(NamedTuple):
    """The path and the return type of a model's decoder layers."""

    layers: str  # path of the layer list in the model
    answers: int = 0  # size of the tuple a layer returns, hidden states first; 0: the hidden states alone


LLAMA_LIKE = Family("model.layers")
GPT_LIKE = Family("transformer.h")

# config.model_type -> Family
FAMILIES: dict[str, Family] = {
    "bloom": Family("transformer.h", answers=2),
    "cohere": LLAMA_LIKE,
    "cohere2": LLAMA_LIKE,
    "deepseek_v3": LLAMA_LIKE,
    "exaone4": LLAMA_LIKE,
    "falcon": Family("transformer.h", answers=2),
    "gemma": LLAMA_LIKE,
    "gemma2": LLAMA_LIKE,
    "gemma3_text": LLAMA_LIKE,
    "gemma4_text": LLAMA_LIKE,
    "glm4": LLAMA_LIKE,
    "glm4_moe": LLAMA_LIKE,
    "gpt2": GPT_LIKE,
    "gpt_bigcode": GPT_LIKE,
    "gpt_neo": Family("transformer.h", answers=2),
    "gpt_neox": Family("gpt_neox.layers"),
    "gpt_oss": LLAMA_LIKE,
    "gptj": Family("transformer.h", answers=2),
    "granite": LLAMA_LIKE,
    "lfm2": LLAMA_LIKE,
    "llama": LLAMA_LIKE,
    "llama4_text": LLAMA_LIKE,
    "minimax_m2": LLAMA_LIKE,
    "ministral3": LLAMA_LIKE,
    "mistral": LLAMA_LIKE,
    "mixtral": LLAMA_LIKE,
    "mpt": Family("transformer.blocks", answers=2),
    "nemotron": LLAMA_LIKE,
    "olmo": LLAMA_LIKE,
    "olmo2": LLAMA_LIKE,
    "olmo3": LLAMA_LIKE,
    "opt": Family("model.decoder.layers"),
    "phi": LLAMA_LIKE,
    "phi3": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": LLAMA_LIKE,
    "qwen3_moe": LLAMA_LIKE,
    "qwen3_next": LLAMA_LIKE,
    "smollm3": LLAMA_LIKE,
    "stablelm": LLAMA_LIKE,
    "starcoder2": LLAMA_LIKE,
}
