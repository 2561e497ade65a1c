"""The sizes of a model, from its config or the header of its file, without loading it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from TIDE.models.gguf_header import Array, entries


class Sizes(NamedTuple):
    """Sizes that a router file was made for; None: not known."""

    num_layers: int | None
    hidden_dim: int | None
    vocab_size: int | None

    def differ(self, other: Sizes) -> bool:
        return any(one != two for one, two in zip(self, other, strict=True) if None not in (one, two))

    def describe(self) -> str:
        return f"{self.num_layers} layers of {self.hidden_dim}, vocabulary {self.vocab_size}"


def model_sizes(name: str) -> Sizes | None:
    """Return the sizes of the default model, a folder, a hub id or a .gguf file; None: only loading it would tell."""
    if name.endswith(".gguf"):
        return _of_gguf(Path(name))
    if name == "default":
        from TIDE.models.default import NAME, cache_folder

        name = str(cache_folder() / NAME)
        if not Path(name).is_dir():
            return None
    from transformers import AutoConfig

    try:
        text = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config(decoder=True)
        return Sizes(int(text.num_hidden_layers), int(text.hidden_size), int(text.vocab_size))
    except Exception:  # loading the model says what is wrong with it
        return None


def _of_gguf(path: Path) -> Sizes | None:
    known = {}
    try:
        for key, value in entries(path):
            _, _, word = key.partition(".")
            known[word] = value
            if known.keys() >= {"block_count", "embedding_length", "ggml.tokens"}:
                break
    except (OSError, ValueError):
        return None
    tokens = known.get("ggml.tokens")
    vocabulary = known.get("vocab_size") or (tokens.length if isinstance(tokens, Array) else None)
    return Sizes(known.get("block_count"), known.get("embedding_length"), vocabulary)
