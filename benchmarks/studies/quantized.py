"""Quantized models and exits together: do exits of the full model still serve its quantized copy?

Weights are quantized by torchao, the exits are those of the model before. For every copy: is mode exact still the text of exits
off, how many drafts stand, and how far are its own texts from those of the model before? TIDE asks for a router file of a
copy's own; here the file is relabelled on purpose.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kept import Kept, Record, identity
from studies.sources import asked_ids, router_path

COPIES = {  # name -> class of torchao.quantization
    "as it is": None,
    "int8 weights": "Int8WeightOnlyConfig",
    "int8 weights and activations": "Int8DynamicActivationInt8WeightConfig",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt")


def run(options: argparse.Namespace) -> Record:
    import TIDE

    _, tokenizer = TIDE.load_model(options.model)
    asked = asked_ids(tokenizer, options)
    settings = dict(prompts=options.prompts, new_tokens=options.new_tokens, longest=options.longest, model=options.model)
    settings |= dict(router=identity(router_path(options)), asked=identity(asked))
    kept = Kept(options.work / "quantized.jsonl", settings)
    notes = {}
    for name, kind in COPIES.items():
        if not all(f"{name} {place}" in kept.records for place in range(len(asked))):
            try:
                _answers(options, kept, name, kind, asked)
            except Exception as problem:  # of torchao, its kernels or the model: the other copies go on
                notes[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:120]}"
    table = {name: _row(kept, name, len(asked)) for name in COPIES if name not in notes}
    return {
        "what": "Exits of a model on its quantized copies",
        "settings": f"torchao, batch 1, greedy, {options.new_tokens} new tokens, {len(asked)} prompts",
        "table": table,
        "figures": {"prompts": len(asked)},
        **({"note": "not measured: " + "; ".join(f"{name}: {why}" for name, why in notes.items())} if notes else {}),
    }


def _answers(options: argparse.Namespace, kept: Kept, name: str, kind: str | None, asked: list[list[int]]) -> None:
    import TIDE
    from TIDE.routing.fingerprint import fingerprint

    model, tokenizer = TIDE.load_model(options.model)
    if kind is not None:
        from torchao import quantization

        quantization.quantize_(model, getattr(quantization, kind)())
    file = TIDE.RouterFile.load(router_path(options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "relabelled.safetensors")
        replace(file, fingerprint=fingerprint(model, tokenizer)).save(path)
        with TIDE.TIDE(model, path) as engine:
            for place, ids in enumerate(asked):
                kept.once(f"{name} {place}", lambda ids=ids, engine=engine: _answer(engine, ids, options.new_tokens))


def _answer(engine: Any, ids: list[int], new_tokens: int) -> Record:
    from TIDE.calibration.prompts import continued

    with engine.using(engine.config, exits=False):
        full = continued(engine, [ids], new_tokens)[0]
    exact, stats = continued(engine, [ids], new_tokens)[0], engine.last_stats
    return {"full": full, "exact": exact, "drafted": stats.drafted, "accepted": stats.accepted, "backend": engine.backend}


def _row(kept: Kept, name: str, count: int) -> Record:
    from TIDE.calibration.losses import rouge_l

    own = [kept.records[f"{name} {place}"] for place in range(count)]
    before = [kept.records[f"as it is {place}"] for place in range(count)]
    return {
        "exact is exits off": sum(one["exact"] == one["full"] for one in own),
        "accepted": round(sum(one["accepted"] for one in own) / max(1, sum(one["drafted"] for one in own)), 3),
        "drafts per token": round(sum(one["drafted"] for one in own) / sum(len(one["exact"]) for one in own), 3),
        "texts of the model before": sum(one["full"] == other["full"] for one, other in zip(own, before, strict=True)),
        "loss to those": round(fmean(rouge_l(one["full"], other["full"]) for one, other in zip(own, before, strict=True)), 3),
    }
