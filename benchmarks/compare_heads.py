"""Our memory head and EAGLE-3's, before the first layer: agreement on prompts of Spec-Bench after training on equal texts.

    python benchmarks/compare_heads.py --prompts question.jsonl --keep DIR [--texts 400] [--seeds 0 1 2] [--minutes 60]

Every kind is trained on the same texts, which the model writes itself, on the same tokens, in the same order and for the same
number of steps, and then asked at every position of the model's greedy answers to other prompts. DIR keeps texts and what was
measured, so that a run that was interrupted or out of minutes goes on when repeated, and the last EAGLE-3 head as
eagle3.safetensors, to export. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

import TIDE
from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Budget, Collection, collect
from TIDE.calibration.fit import Exits, Schedule, Split, agreement, fit_head, fresh_head, measure
from TIDE.calibration.self_texts import answer_prompts
from TIDE.calibration.text import Text
from TIDE.calibration.texts import load_texts
from TIDE.calibration.vocabulary import ranked
from TIDE.routing.eagle3.fresh import fresh_depths, fresh_eagle_head
from TIDE.routing.exits import EAGLE3, Exit
from TIDE.routing.fingerprint import fingerprint
from TIDE.routing.heads import head_sizes, memory_depths
from TIDE.routing.router import OwnProbability
from TIDE.routing.router_file import RouterFile

STEPS = 3


def memory(adapter: ModelAdapter, vocabulary: torch.Tensor, seed: int) -> nn.Module:
    return fresh_head(
        "memory", head_sizes("memory", adapter.model.config.get_text_config(decoder=True), adapter.hidden_dim), seed
    )


def eagle(**readings: object) -> Callable[[ModelAdapter, torch.Tensor, int], nn.Module]:
    def build(adapter: ModelAdapter, vocabulary: torch.Tensor, seed: int) -> nn.Module:
        head = fresh_eagle_head(adapter, vocabulary, seed)
        own = {name: value(adapter.num_layers) if callable(value) else value for name, value in readings.items()}
        return head.read_as(replace(head.sizes, **own)) if own else head

    return build


KINDS = {
    "memory": memory,
    "eagle3": eagle(),
    "eagle3, depths of memory": eagle(depths=lambda layers: tuple(memory_depths(layers, STEPS))),
    "eagle3, norm_before_residual": eagle(norm_before_residual=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["memory", "eagle3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=400)
    parser.add_argument("--answer", type=int, default=128, help="longest text, in tokens")
    parser.add_argument("--every", type=int, default=16, help="of so many prompts one is asked")
    parser.add_argument("--tokens", type=int, default=16384, help="of the draft vocabulary, by probability mass")
    parser.add_argument("--epochs", type=float, default=4)
    parser.add_argument("--batch", type=int, default=1024, help="tokens of a step")
    parser.add_argument("--positions", type=int, default=384, help="of a step whose logits are compared")
    parser.add_argument("--minutes", type=float, default=60, help="after which no further training is begun")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    args.keep.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * args.minutes
    model, tokenizer = TIDE.load_model(args.model, dtype=torch.bfloat16 if torch.cuda.is_available() else None)
    own, asked = texts(args, model, tokenizer)
    adapter = ModelAdapter(model)
    with tempfile.TemporaryDirectory() as folder:
        layers = adapter.num_layers
        depths = sorted({0, *fresh_depths(layers), *memory_depths(layers, STEPS), layers})
        budget = Budget(adapter.device, Path(folder))
        train, valid, spec = (
            collect(adapter, some, depths, budget, title)
            for some, title in (
                ([text for text in own if not text.is_held_out], "states to learn from"),
                ([text for text in own if text.is_held_out], "states to choose a step by"),
                (asked, "states to measure on"),
            )
        )
        vocabulary = ranked(adapter, train).first(args.tokens)
        found = compared(args, adapter, Split(train, valid), spec, vocabulary, ends)
    adapter.close()
    print(
        f"{len(own)} texts of {train.tokens} positions; {len(asked)} prompts, {spec.tokens} positions; {len(vocabulary)} tokens"
    )
    for name, one in found.items():
        print(f"{name:34} {one['agreement']}  mean {one['mean']:.4f}  {one['seconds']:.0f} s")
    print(json.dumps({"texts": len(own), "positions": spec.tokens, "settings": told(args), "found": found}))


def told(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in ("texts", "answer", "every", "tokens", "epochs", "batch", "positions")}


def texts(args: argparse.Namespace, model, tokenizer) -> tuple[list[Text], list[Text]]:
    """Return the texts to train on and the answers to prompts, written once."""
    path = args.keep / f"texts-{args.texts}-{args.answer}-{args.every}.json"
    if not path.exists():
        lines = [json.loads(line) for line in Path(args.prompts).read_text("utf-8").splitlines() if line.strip()]
        prompts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines][:: args.every]
        written = load_texts("self", model, tokenizer, args.texts, 0, args.answer)
        path.write_text(json.dumps([written, answer_prompts(model, tokenizer, prompts, 0, args.answer)]))
    own, asked = json.loads(path.read_text())
    return [Text(*one) for one in own], [Text(*one) for one in asked]


def compared(args: argparse.Namespace, adapter: ModelAdapter, split: Split, spec: Collection, vocabulary, ends: float) -> dict:
    """Train and measure kind after kind, seed after seed."""
    path = args.keep / "found.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    found = {}
    schedule = Schedule(epochs=args.epochs, batch_tokens=args.batch, positions=args.positions)
    schedule = schedule.fitted_to(adapter.hidden_dim, len(vocabulary), adapter.device)
    for seed in args.seeds:
        for kind in args.kinds:
            name = f"{kind}, seed {seed}"
            key = json.dumps([name, told(args), asdict(schedule)])
            if key not in kept and time.monotonic() < ends:
                kept[key] = trained(adapter, kind, split, spec, vocabulary, schedule, seed, args.keep)
                path.write_text(json.dumps(kept, indent=1))
                print(name, kept[key], flush=True)
            if key in kept:
                found[name] = kept[key]
    return found


def trained(adapter, kind: str, split: Split, spec: Collection, vocabulary, schedule: Schedule, seed: int, keep: Path) -> dict:
    began, where = time.perf_counter(), Exits(0, vocabulary)
    head = KINDS[kind](adapter, vocabulary, seed).to(torch.float32)
    measure(adapter, head, split.train, 0)
    fitted = fit_head(adapter, head, split, where, schedule, seed, f"{kind}, seed {seed}")
    shares = agreement(adapter, fitted.head, spec, where, STEPS)
    if kind == EAGLE3:
        exit_ = Exit(fitted.head.cpu(), OwnProbability(), 0.5, {"agreement_by_step": shares})
        RouterFile(EAGLE3, {0: exit_}, (0,), 7, vocabulary.cpu(), fingerprint(adapter.model)).save(keep / "eagle3.safetensors")
    return {
        "agreement": [round(share, 4) for share in shares],
        "mean": round(sum(shares) / len(shares), 4),
        "held_out": [round(share, 4) for share in fitted.agreement],
        "seconds": round(time.perf_counter() - began, 1),
    }


if __name__ == "__main__":
    main()
