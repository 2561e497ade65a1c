"""An EAGLE-3 head as a router file: one exit before the first layer, scored by the probability of its own best token.

read      from a folder; how its configuration is meant may be open (`UntriedHead`)
tried     on its model: one reading, its agreement, the model's fingerprint; it can be saved and exported then
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.routing.eagle3.files import read_files
from TIDE.routing.eagle3.head import EagleHead, EagleSizes
from TIDE.routing.eagle3.read import UntriedHead, read_head
from TIDE.routing.eagle3.resolve import check_depths, check_fit, resolve
from TIDE.routing.exits import EAGLE3, Exit
from TIDE.routing.fingerprint import fingerprint
from TIDE.routing.router import OwnProbability
from TIDE.routing.router_file import RouterFile

THRESHOLD = 0.5
MOST_DRAFTS = 7  # in a row, as many as such heads are trained for


def read_folder(folder: Path, name: str | None = None) -> RouterFile:
    """Read the EAGLE-3 head of a folder.

    Args:
        name: of the head, such as its id on the hub.
    """
    files = read_files(folder)
    head, vocabulary = read_head(files)
    facts = {
        "origin": f"EAGLE-3 head, {files.layout} layout",
        "source": name or str(folder),
        "tried": "not yet: which of the readings is right is found out with its model",
        "readings": [_reading(sizes) for sizes in head.readings],
    }
    exits = {0: Exit(head, OwnProbability(), THRESHOLD)}
    return RouterFile(EAGLE3, exits, (0,), MOST_DRAFTS, vocabulary, facts=facts, path=folder)


def tried(file: RouterFile, adapter: ModelAdapter) -> RouterFile:
    """Return a head as it is read for a model; one that was tried before is only compared with the model."""
    head, made_for = file.exits[0].head, file.fingerprint
    assert isinstance(head, EagleHead)
    if not isinstance(head, UntriedHead):
        name = str(file.path or "this router file")
        check_fit(head, file.vocabulary, adapter, name, None if made_for is None else made_for.vocab_size)
        check_depths(head.sizes, adapter.num_layers, name)
        return file
    found = resolve(head, file.vocabulary, adapter, str(file.facts.get("source") or file.path))
    vocabulary = file.vocabulary
    if vocabulary is None and found.head.sizes.vocabulary != adapter.vocab_size:
        vocabulary = torch.arange(found.head.sizes.vocabulary)  # the model has padding behind its tokens
    figures = {"agreement": found.agreement[0], "agreement_by_step": found.agreement}
    return replace(
        file,
        exits={0: Exit(found.head, OwnProbability(), THRESHOLD, figures)},
        vocabulary=vocabulary,
        fingerprint=fingerprint(adapter.model),
        facts=file.facts | {"tried": found.words, "readings": found.readings},
    )


def _reading(sizes: EagleSizes) -> dict[str, object]:
    named = "2, half, last but three" if not sizes.depths else ", ".join(map(str, sizes.depths))
    flags = {name: getattr(sizes, name) for name in ("rope_theta", "norm_output", "norm_before_residual")}
    return {"depths": named} | flags
