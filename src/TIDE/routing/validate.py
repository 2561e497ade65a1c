"""Checks of router files: whether the documents and tensors of a file, or a record about to be written, can be used."""

from __future__ import annotations

from typing import Any

import torch

from TIDE.routing import storage
from TIDE.routing.certificate import Certificate
from TIDE.routing.exits import EAGLE3, KINDS, build_exit
from TIDE.routing.fingerprint import Fingerprint
from TIDE.routing.record import Record, parts_in


def fields_of(document: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the fields of a RouterFile. Unused tensors are an error."""
    for name, tensor in tensors.items():
        if not (isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.is_contiguous()):
            raise ValueError(f"{name} is not a plain tensor")
    if document["strategy"] not in KINDS:
        raise ValueError(f"expected a strategy of {list(KINDS)}, found {document['strategy']!r}")
    vocabulary = tensors.pop("vocabulary", None)
    if document["vocabulary"] != (None if vocabulary is None else len(vocabulary)):
        raise ValueError(f"expected a vocabulary of {document['vocabulary']} tokens")
    tensors = storage.restore(tensors)
    exits = {}
    for depth in sorted(document["exits"], key=int):
        exits[int(depth)] = build_exit(document["strategy"], depth, document["exits"][depth], tensors)
    parts = parts_in(document, tensors)
    if tensors:
        raise ValueError(f"it holds tensors that belong to no exit: {sorted(tensors)[:3]}")
    made_for, certificate = document["fingerprint"], document.get("certificate")  # older files have none
    same = {name: document[name] for name in ("version", "strategy", "max_pending", "config", "facts", "figures")}
    return (
        same
        | parts
        | {
            "exits": exits,
            "checkpoints": tuple(document["checkpoints"]),
            "vocabulary": None if vocabulary is None else vocabulary.long(),
            "fingerprint": None if made_for is None else Fingerprint(**made_for),
            "certificate": None if certificate is None else Certificate.from_dict(certificate),
        }
    )


def wrong_with(file: Record) -> str | None:
    """Return what makes a router file unusable, read or about to be written; None if nothing does."""
    depths = list(file.exits)
    if file.strategy not in KINDS:
        return f"expected a strategy of {list(KINDS)}, found {file.strategy!r}"
    if not depths:
        return "it holds no routers"
    if depths != sorted(depths) or not all(_is_whole(depth, 0) for depth in depths):
        return f"expected exits at rising depths, found {depths}"
    known = [depth for depth in depths if depth in file.checkpoints]
    if list(file.checkpoints) != known or not all(_is_whole(depth, 0) for depth in file.checkpoints):
        return f"expected checkpoints among the exits {depths}, rising, found {list(file.checkpoints)}"
    if not _is_whole(file.max_pending, 1):
        return f"expected a max_pending of at least 1, found {file.max_pending!r}"
    if not all(isinstance(values, dict) for values in (file.config, file.facts, file.figures)):
        return "expected names and values as config, facts and figures"
    if file.certificate is not None and (wrong := file.certificate.wrong()):
        return wrong
    for part in file.parts.values():
        if wrong := part.wrong():
            return wrong
    for depth, at in file.exits.items():
        if wrong := at.wrong(file.strategy):
            return f"at depth {depth}, {wrong}"
    if len({at.sizes.hidden_dim for at in file.exits.values()}) > 1:
        return "its exits are for states of different sizes"
    if file.strategy == EAGLE3 and depths != [0]:
        return f"expected an EAGLE-3 head before the first layer, found {depths}"
    return None if file.vocabulary is None else _wrong_with_vocabulary(file.vocabulary, file.fingerprint)


def _wrong_with_vocabulary(vocabulary: torch.Tensor, made_for: Fingerprint | None) -> str | None:
    if vocabulary.ndim != 1 or not len(vocabulary) or vocabulary.is_floating_point():
        return f"expected a list of token ids as vocabulary, found {vocabulary.dtype} of {tuple(vocabulary.shape)}"
    least, most = int(vocabulary.min()), int(vocabulary.max())
    if least < 0 or (made_for and most >= made_for.vocab_size) or len(vocabulary.unique()) < len(vocabulary):
        return f"its vocabulary holds token ids that do not exist or come twice, from {least} to {most}"
    return None


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def refuse_constant(name: str) -> None:
    raise ValueError(f"it holds the number {name}")
