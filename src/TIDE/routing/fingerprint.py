"""Fingerprints identify the model a router file was made for.

Sizes and class distinguish families; two models of one family differ in their weights. So the *signs* of a few
thousand weights are hashed, taken from every parameter at fixed indices:

    weights  -0.02  0.31 -0.00  ...   ->   1 0 1 ...   ->   sha256, shortened

A sign is the same in fp32, bf16 and fp16, even for a value that underflowed to zero, so a model has one fingerprint
however it was loaded. Quantized parameters are left out: a quantized copy is another model. If a model is partly
offloaded to disk, its weights are not known, and only sizes and class are compared.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from TIDE.adapters.weights import holds_numbers
from TIDE.hub import is_hub_id
from TIDE.routing.storage import shown

SAMPLES = 4096
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: its multiples spread evenly, and along no row or column
DOWNLOADED = re.compile(r"(?:^|/)models--([^/]+)/snapshots/[^/]+$")  # a folder of the hub's cache


@dataclass(frozen=True)
class Fingerprint:
    """The identity of a model.

    Attributes:
        name: its id on the hub, otherwise the last part of its path; never compared.
        weights: hash of the signs of sampled weights; None: not known.
        tokenizer: hash of vocabulary and chat template; None: not known.
    """

    architecture: str
    name: str
    hidden_dim: int
    num_layers: int
    vocab_size: int
    weights: str | None
    tokenizer: str | None

    def describe(self) -> str:
        """Return one line for display."""
        sizes = f"{self.num_layers} layers of {self.hidden_dim}, vocabulary {self.vocab_size}"
        tokenizer = f", tokenizer {shown(self.tokenizer)}" if self.tokenizer else ""
        name, weights = shown(self.name or "a model without a name"), shown(self.weights or "not known")
        return f"{name} ({shown(self.architecture)}, {sizes}, weights {weights}{tokenizer})"

    def mismatch(self, other: Fingerprint) -> list[str]:
        """Return the fields in which two models differ, without names and fields that one side does not know."""
        pairs = {field.name: (getattr(self, field.name), getattr(other, field.name)) for field in fields(self)}
        return [name for name, (own, found) in pairs.items() if name != "name" and None not in (own, found) and own != found]


def fingerprint(model: nn.Module, tokenizer: Any = None) -> Fingerprint:
    """Return the fingerprint of a Hugging Face causal LM, including its tokenizer if one is given."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    return Fingerprint(
        architecture=type(model).__name__,
        name=_name(str(getattr(config, "_name_or_path", None) or "")),
        hidden_dim=int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        vocab_size=int(text.vocab_size),
        weights=_hash_of_weights(model),
        tokenizer=None if tokenizer is None else _hash_of_tokenizer(tokenizer),
    )


@torch.no_grad()
def _hash_of_weights(model: nn.Module) -> str | None:
    if any(parameter.is_meta for parameter in model.parameters()):
        return None
    parameters = [parameter for _, parameter in sorted(model.named_parameters()) if _holds_numbers(parameter)]
    if not parameters:
        return _short(b"")
    each = -(-SAMPLES // len(parameters))
    home = parameters[0].device  # all samples are gathered there, for one transfer
    signs = [torch.signbit(torch.take(parameter, _places(parameter, each))).to(home) for parameter in parameters]
    return _short(bytes(torch.cat(signs).cpu().tolist()))


def _places(parameter: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sampled indices of a flattened parameter, the same for every dtype and device."""
    places = [((index * GOLDEN) % 2**64) * parameter.numel() >> 64 for index in range(count)]
    return torch.tensor(places, device=parameter.device)


def _holds_numbers(parameter: nn.Parameter) -> bool:
    return holds_numbers(parameter) and parameter.numel() > 0 and parameter.element_size() > 1


def _hash_of_tokenizer(tokenizer: Any) -> str:
    known = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "chat_template", None)]
    return _short(json.dumps(known, sort_keys=True).encode())


def _name(path: str) -> str:
    """Return the hub id of a model; of a local one the last part of its path, as files are shared and folders are not."""
    if is_hub_id(path, (".gguf",)):
        return path
    parts = path.replace("\\", "/").rstrip("/")
    if downloaded := DOWNLOADED.search(parts):
        return downloaded[1].replace("--", "/")
    return parts.rsplit("/", 1)[-1]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
