"""What drafting costs where it cannot help: mode exact against exits off, batch 1, interleaved.

    python benchmarks/bench_worst.py --prompts PROMPTS.jsonl [--count 6] [--new-tokens 128] [--search 24]

    random tokens       prompts of 60 tokens drawn at random
    temperature 1.5     real prompts, sampled
    low acceptance      of --search real prompts those on which the fewest drafts stood, for each token written
    never confident     routers whose scores are 0
    threshold 1.0       a fixed exit_threshold that lets nothing out

PROMPTS.jsonl is a file of prompts as `tide tune` takes them. Times hold the prompt and the answer. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch

import TIDE
from TIDE.calibration.prompts import load_prompts
from TIDE.engine.cache.prefix_tree import new_salt

SAMPLED = dict(do_sample=True, temperature=1.5, top_k=0, top_p=1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--search", type=int, default=24)
    options = parser.parse_args()
    model, tokenizer = TIDE.load_model("default")
    real = [torch.tensor([ids]) for ids in load_prompts(options.prompts, tokenizer)]
    some = real[:: max(1, len(real) // options.count)][: options.count]
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randint(0, len(tokenizer), (1, 60), generator=generator) for _ in range(options.count)]
    found = {}
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        found["random tokens"] = ratio(engine, noise, options.new_tokens)
        found["temperature 1.5"] = ratio(engine, some, options.new_tokens, **SAMPLED)
        worst = lowest(engine, real[:: max(1, len(real) // options.search)][: options.search], options)
        found["low acceptance"] = ratio(engine, worst, options.new_tokens)
    with tempfile.TemporaryDirectory() as folder, TIDE.TIDE(model, silent(Path(folder, "router.safetensors"))) as engine:
        found["never confident"] = ratio(engine, some, options.new_tokens)
    with TIDE.TIDE(model, TIDE.default_router(), TIDE.TIDEConfig(exit_threshold=1.0)) as engine:
        found["threshold 1.0"] = ratio(engine, some, options.new_tokens)
    for name, (off, exact) in found.items():
        print(f"{name:18} exits off {off:6.1f} tok/s, exact {exact:6.1f}, {exact / off:.3f}x")
    print(json.dumps({**vars(options), "tok/s": {name: [round(x, 2) for x in pair] for name, pair in found.items()}}))


def ratio(engine: TIDE.TIDE, prompts: list[torch.Tensor], new_tokens: int, **sampling) -> tuple[float, float]:
    """Tokens per second with exits off and in mode exact."""
    request = dict(max_new_tokens=new_tokens, **(sampling or dict(do_sample=False)))
    engine.generate(prompts[0], **{**request, "max_new_tokens": 8})
    tokens, seconds = [0, 0], [0.0, 0.0]
    for number, ids in enumerate([*prompts, *prompts]):
        for which in ((0, 1), (1, 0))[number % 2]:
            torch.manual_seed(number)
            start = time.perf_counter()
            with engine.using(engine.config, exits=bool(which)):
                text = engine.generate(ids, cache_salt=new_salt(), **request)
            seconds[which] += time.perf_counter() - start
            tokens[which] += text.shape[1] - ids.shape[1]
    return tokens[0] / seconds[0], tokens[1] / seconds[1]


def lowest(engine: TIDE.TIDE, prompts: list[torch.Tensor], options: argparse.Namespace) -> list[torch.Tensor]:
    """The prompts on which drafts stand least often."""
    shares = []
    for ids in prompts:
        text = engine.generate(ids, max_new_tokens=options.new_tokens, do_sample=False)
        shares.append(engine.last_stats.accepted / max(1, text.shape[1] - ids.shape[1]))
    order = sorted(range(len(prompts)), key=shares.__getitem__)
    return [prompts[index] for index in order[: options.count]]


def silent(path: Path) -> Path:
    """The shipped router file with scores of 0."""
    file = TIDE.RouterFile.load(TIDE.default_router())
    for at in file.exits.values():
        at.router.offset.fill_(-50.0)
    file.save(path)
    return path


if __name__ == "__main__":
    main()
