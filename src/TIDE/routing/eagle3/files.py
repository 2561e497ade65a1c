"""The files of an EAGLE-3 head: a folder with config.json and weights, in one of two layouts.

                    original (EAGLE, SpecForge, AngelSlim)          speculators
    config.json     flat fields of a Llama                          the same in "transformer_layer_config"
    weights         pytorch_model.bin or model.safetensors          model.safetensors
    the block       "midlayer.…"                                    "layers.0.…"

Weights are read as tensors only, so no code of a file runs. Names are made those of the speculators layout.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from TIDE.routing.storage import Refused, are_whole, read_pickle, read_tensors, shown

ORIGINAL, SPECULATORS = "original", "speculators"
PARTS = ("low", "mid", "high")  # older names of norms of the three states
AGAIN = "Get it again from where it came"


class HeadFiles(NamedTuple):
    """The contents of a folder."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @property
    def layout(self) -> str:
        return ORIGINAL if self.config.get("speculators_model_type") is None else SPECULATORS

    @property
    def block(self) -> dict[str, Any]:
        """The configuration of the decoder block."""
        return self.config["transformer_layer_config"] if self.layout == SPECULATORS else self.config


def read_files(folder: Path) -> HeadFiles:
    """Read a folder; raise with the reason if it holds no EAGLE-3 head."""
    config = read_config(folder)
    tensors: dict[str, torch.Tensor] = {}
    for path in _weights(folder):
        for given, tensor in _tensors(path).items():
            name = _name(given)
            if name in tensors and not _are_equal(tensors[name], tensor):
                raise ValueError(
                    f"{path} was not loaded: expected {shown(name)} once, found it with other values as {shown(given)}. "
                    f"{AGAIN}."
                )
            tensors[name] = tensor
    return HeadFiles(folder, config, tensors)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a folder; raise with the reason if it is not that of an EAGLE-3 head."""
    config = _config(folder / "config.json")
    _check_kind(config, folder)
    return config


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"there is no router file and no EAGLE-3 head in {path.parent}: expected router.safetensors, or config.json and "
            f"weights. Give a folder that has them."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} was not loaded: expected JSON, found {shown(problem)}. {AGAIN}.") from problem
    if not isinstance(config, dict):
        raise ValueError(f"{path} was not loaded: expected names and values, found {type(config).__name__}. {AGAIN}.")
    return config


def _check_kind(config: dict[str, Any], folder: Path) -> None:
    kind = config.get("speculators_model_type")
    said = config.get("architectures") or []
    names = said if isinstance(said, list) else [said]
    if kind is not None and kind != "eagle3":
        raise ValueError(f"{folder} holds a draft model of the kind {kind!r:.60}; TIDE reads eagle3. Give an EAGLE-3 head.")
    if kind is not None and not isinstance(config.get("transformer_layer_config"), dict):
        raise ValueError(f"{folder}/config.json is damaged: it lacks transformer_layer_config. {AGAIN}.")
    block = config if kind is None else config["transformer_layer_config"]
    for name, holder in (("eagle_config", config), ("rope_scaling", block), ("rope_parameters", block)):
        if not isinstance(value := holder.get(name) or {}, dict):
            raise ValueError(
                f"{folder}/config.json is damaged: expected names and values as {name}, found {value!r:.60}. {AGAIN}."
            )
    if config.get("quantization_config"):
        raise ValueError(f"{folder} holds quantized weights; TIDE reads fp32, bf16 and fp16. Give the head as it was trained.")
    layers = config.get("num_hidden_layers", 1)
    if (
        kind is None
        and layers != 1
        and "eagle" not in str(names).lower()
        and not {"eagle_config", "draft_vocab_size"} & set(config)
    ):
        raise ValueError(
            f"{folder} holds {shown(', '.join(map(str, names))) or 'a model'} of {shown(layers)} layers: expected an EAGLE-3 "
            f"head of one, whose architecture is LlamaForCausalLMEagle3. Give the head, not its model."
        )


def _weights(folder: Path) -> list[Path]:
    """Return the files with weights: safetensors, otherwise pickles of tensors."""
    for pattern in ("model*.safetensors", "*.safetensors", "pytorch_model*.bin", "*.bin"):
        if found := sorted(folder.glob(pattern)):
            return found
    raise FileNotFoundError(f"there are no weights in {folder}: expected model.safetensors or pytorch_model.bin. {AGAIN}.")


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        found = read_tensors(path)[0] if path.suffix == ".safetensors" else read_pickle(path)
    except Refused as problem:
        raise ValueError(f"{path} was not loaded: {problem}. {AGAIN}.") from problem
    except Exception as problem:  # a damaged file can fail in any way
        raise ValueError(
            f"{path} was not loaded: it is truncated, damaged, or holds more than tensors ({type(problem).__name__}). {AGAIN}."
        ) from problem
    if not isinstance(found, dict):
        raise ValueError(f"{path} was not loaded: expected tensors by name, found {type(found).__name__}. {AGAIN}.")
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            what = f"{type(tensor).__name__} as {name!r:.60}"
            raise ValueError(f"{path} was not loaded: expected tensors by name, found {what}. {AGAIN}.")
        if not are_whole([tensor]):
            raise ValueError(
                f"{path} was not loaded: expected {shown(name)} with all its numbers, found a tensor without. {AGAIN}."
            )
    return found


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _name(name: str) -> str:
    """Return the name of a tensor in the speculators layout."""
    name = name.removeprefix("model.")
    for number, part in enumerate(PARTS):
        name = name.replace(f"aux_norm_{part}.", f"fc_norm.{number}.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name
