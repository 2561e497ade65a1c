"""Exported heads in the package speculators: the half that runs in TIDE's environment, `speculators_head.py` is the other.

PYTHONPATH=src:tests python tests/routing/data/export_head.py DIR      write heads DIR/0, DIR/1, … and the model they are for
python tests/routing/data/speculators_head.py check DIR/0              for each of them, in their environment
PYTHONPATH=src:tests python tests/routing/data/export_head.py DIR      again: print the largest differences of logits
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eagle_heads import config_of, tensors_of, with_vocabulary, write
from families import build
from TIDE.adapters.adapter import ModelAdapter
from TIDE.routing.eagle3.export import export
from TIDE.routing.eagle3.files import read_files
from TIDE.routing.eagle3.read import read_head
from TIDE.routing.policies import for_model
from TIDE.routing.source import load_router

FLAGS = [
    (),
    ("norm_before_residual",),
    ("norm_before_fc",),
    ("fc_norm", "norm_output"),
    ("norm_before_residual", "norm_output"),
]


def write_head(folder: Path, flags: tuple[str, ...]) -> None:
    model, own = build("llama", num_hidden_layers=8), dict.fromkeys(flags, True)
    model.save_pretrained(folder.with_name("model"))
    tensors = with_vocabulary(tensors_of(40, **own), torch.arange(3, 123, 3))
    source = write(folder.with_name(f"{folder.name}-source"), config_of("speculators", **own), tensors)
    export(for_model(load_router(source), ModelAdapter(model)), folder, "speculators", str(folder.with_name("model")))
    given = {"ids": torch.randint(0, 128, (1, 10)), "states": torch.randn(1, 10, 192) * 3}
    save_file(given, folder.with_name(f"{folder.name}-given.safetensors"))


def difference(folder: Path) -> float:
    """Return the largest difference of logits of drafts 1, 2, 3."""
    given, theirs = (load_file(folder.with_name(f"{folder.name}-{name}.safetensors")) for name in ("given", "logits"))
    head = read_head(read_files(folder)).head
    head = head.read_as(head.readings[0])
    table = build("llama", num_hidden_layers=8).get_input_embeddings().weight.detach()
    embedded = table[torch.nn.functional.pad(given["ids"], (1, 0))]
    guesses = head.unroll(embedded, torch.nn.functional.pad(given["states"], (0, 0, 0, 1)), 3)
    found = [head.logits(own[:, 1 + step : 11]) - theirs[f"logits.{step}"][:, : 10 - step] for step, own in enumerate(guesses)]
    return max(float(one.abs().max()) for one in found)


if __name__ == "__main__":
    for number, flags in enumerate(FLAGS):
        there = Path(sys.argv[1]) / str(number)
        if there.exists():
            print(flags or "plain", f"{difference(there):.1e}")
        else:
            write_head(there, flags)
