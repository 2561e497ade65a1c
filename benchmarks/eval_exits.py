"""How good the exits of a router file are on prompts nobody has seen in calibration.

    python benchmarks/eval_exits.py --router FILE --prompts PROMPTS.jsonl [--model default] [--limit N]

The model answers the prompts greedily; every position of its answers is then asked at every exit of the file: top-1
agreement by draft step, and the router's AUROC, calibration error and coverage at the first step. PROMPTS.jsonl has
"turns" (the first is asked) or "prompt" on each line. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

import TIDE
from TIDE.adapters.adapter import ModelAdapter
from TIDE.calibration.collect import Budget, collect, extended
from TIDE.calibration.figures import router_figures
from TIDE.calibration.fit import Exits, exit_logits, guesses
from TIDE.calibration.self_texts import answer_prompts
from TIDE.routing.heads import DraftHead, Seen

STEPS = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--router", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--answer", type=int, default=256)
    options = parser.parse_args()
    lines = [json.loads(line) for line in Path(options.prompts).read_text("utf-8").splitlines() if line.strip()]
    prompts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines][: options.limit]
    model, tokenizer = TIDE.load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype))
    file = TIDE.RouterFile.load(options.router)
    texts = answer_prompts(model, tokenizer, prompts, 0, options.answer)
    found = {}
    adapter = ModelAdapter(model)
    vocabulary = None if file.vocabulary is None else file.vocabulary.to(model.device)
    with tempfile.TemporaryDirectory() as folder:
        budget = Budget(model.device, Path(folder))
        layers = adapter.num_layers
        seen = {depth: seen_by(at.head, depth, layers) for depth, at in file.exits.items()}
        data = collect(
            adapter, texts, sorted({layers, *(one for own in seen.values() for one in own.memories)}), budget, "states"
        )
        for depth, at in file.exits.items():
            with extended(adapter, [data], seen[depth].inputs, budget):
                found[depth] = evaluate(adapter, data, depth, at, vocabulary)
    print(f"{len(prompts)} prompts, {data.tokens} positions, {'all' if vocabulary is None else len(vocabulary)} tokens")
    for depth, figures in found.items():
        print(f"depth {depth:2}  {figures}")
    print(json.dumps({"router": Path(options.router).name, "positions": data.tokens, "exits": found}))


def seen_by(head: torch.nn.Module, depth: int, layers: int) -> Seen:
    """Return the depths whose states a head sees."""
    return head.seen(depth, layers) if isinstance(head, DraftHead) else Seen([depth], [])


@torch.no_grad()
def evaluate(adapter, data, depth, at, vocabulary) -> dict:
    device = adapter.model.device
    head, router = at.head.to(device, torch.float32), at.router.to(device)
    where = Exits(depth, vocabulary)
    scores, hits = [], []
    for shard, rows in data.in_order():
        asked = shard.asked[rows]
        step_hits = []
        for step, guess in enumerate(guesses(adapter, head, shard, rows, where.depth, STEPS)):
            parts = guess[asked].to(adapter.model.dtype).split(4096)
            logits = [exit_logits(adapter, head, part, vocabulary) for part in parts]
            best = torch.cat([own.argmax(-1) for own in logits])
            step_hits.append((best if vocabulary is None else vocabulary[best]) == shard.best[rows][asked])
            if step == 0:
                scores += [router(part, own).cpu() for part, own in zip(parts, logits, strict=True)]
        hits.append(torch.stack(step_hits, 1).cpu())
    right = torch.cat(hits)
    return {"steps": [round(float(x), 4) for x in right.float().mean(0)], **router_figures(torch.cat(scores), right[:, 0])}


if __name__ == "__main__":
    main()
