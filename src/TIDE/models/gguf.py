"""GGUF files as models: read by transformers, dequantized."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase


class Loaded(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


def read_gguf(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Loaded:
    """Read a GGUF file, dequantized; its name and sizes go to stderr."""
    check_gguf(path.name)
    from TIDE.models.gguf_reader import parsed_once, sizes

    config = GgufConfig(dequantize=True)
    with parsed_once():
        stored, weights = sizes(path)
        unpacked = f"{weights * dtype.itemsize / 1e6:,.0f} MB unpacked to {str(dtype).removeprefix('torch.')}"
        print(f"reading {path.name}: a file of {stored / 1e6:,.0f} MB, {unpacked}", file=sys.stderr)
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, quantization_config=config, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model.config._name_or_path = path.name  # its folder's name says nothing of the model
    # dequantized: an ordinary model from here on
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    return Loaded(model, tokenizer)


def check_gguf(name: str) -> None:
    """Raise if a package that reads GGUF files is not installed."""
    if missing := [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]:
        raise ImportError(f"reading {name} needs {' and '.join(missing)}. Install with: pip install {' '.join(missing)}")
