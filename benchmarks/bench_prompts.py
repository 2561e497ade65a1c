"""Speed on real prompts, batch 1, greedy: `model.generate`, TIDE with exits off, and mode exact, by turns on every prompt.

    python benchmarks/bench_prompts.py --prompts PROMPTS.jsonl [--every N] [--new-tokens 128] [--router FILE]

PROMPTS.jsonl has "turns" (the first is asked) and "category" on each line. Times hold the prompt and the answer. Prints a
table by category, what exact mode drafted, and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import TIDE

RUNS = ("model.generate", "exits off", "exact")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--router", default=None, help="None: the one of the embedded default")
    parser.add_argument("--model", default="default")
    options = parser.parse_args()
    lines = [json.loads(line) for line in Path(options.prompts).read_text("utf-8").splitlines() if line.strip()]
    model, tokenizer = TIDE.load_model(options.model)
    sums: dict[str, dict[str, list[float]]] = {}
    same = asked = 0
    with TIDE.TIDE(model, options.router or TIDE.default_router()) as engine:

        def exits_off(**request):
            with engine.using(engine.config, exits=False):
                return engine.generate(**request)

        runs = {"model.generate": model.generate, "exits off": exits_off, "exact": engine.generate}
        for number, line in enumerate(lines[:: options.every]):
            messages = [{"role": "user", "content": line["turns"][0]}]
            inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
            texts = []
            for name in (*RUNS[number % 3 :], *RUNS[: number % 3]):
                start = time.perf_counter()
                found = runs[name](**inputs, max_new_tokens=options.new_tokens, do_sample=False)
                seconds = time.perf_counter() - start
                texts.append(found[0].tolist())
                own = sums.setdefault(line["category"], {}).setdefault(name, [0.0, 0.0])
                own[0] += found.shape[1] - inputs["input_ids"].shape[1]
                own[1] += seconds
            same += texts[0] == texts[1] == texts[2]
            asked += 1
    stats = engine.total_stats
    report(options, sums, dict(prompts=asked, same=same, drafted=stats.drafted, accepted=stats.accepted))


def report(options: argparse.Namespace, sums: dict, counts: dict) -> None:
    whole = {name: [sum(own[name][i] for own in sums.values()) for i in (0, 1)] for name in RUNS}
    print(f"{'':16}" + "".join(f"{name:>16}" for name in RUNS) + f"{'off/generate':>14}{'exact/off':>11}")
    rows = {}
    for category, own in [*sorted(sums.items()), ("all", whole)]:
        speed = {name: own[name][0] / own[name][1] for name in RUNS}
        ratios = speed["exits off"] / speed["model.generate"], speed["exact"] / speed["exits off"]
        rows[category] = {**{name: round(x, 2) for name, x in speed.items()}, "ratios": [round(x, 3) for x in ratios]}
        print(f"{category:16}" + "".join(f"{speed[name]:16.1f}" for name in RUNS) + f"{ratios[0]:14.2f}{ratios[1]:11.2f}")
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    facts = dict(new_tokens=options.new_tokens, every=options.every, torch=torch.__version__, threads=torch.get_num_threads())
    print(json.dumps({**facts, **counts, "tok/s": rows}))


if __name__ == "__main__":
    main()
