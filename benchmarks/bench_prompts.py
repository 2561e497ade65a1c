"""Speed on real prompts, batch 1, greedy: `model.generate`, TIDE with exits off, and mode exact, interleaved on every prompt.

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
from TIDE.engine.cache.prefix_tree import new_salt

RUNS = ("model.generate", "exits off", "exact")
RATIOS = {
    "off/generate": ("exits off", "model.generate"),
    "exact/off": ("exact", "exits off"),
    "exact/generate": ("exact", "model.generate"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--generate-every", type=int, default=1, help="of these prompts, how often model.generate runs too")
    parser.add_argument("--warm-up", action="store_true", help="let TIDE answer all prompts once before")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--router", default=None, help="None: the one of the embedded default")
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    options = parser.parse_args()
    lines = [json.loads(line) for line in Path(options.prompts).read_text("utf-8").splitlines() if line.strip()]
    model, tokenizer = TIDE.load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype))
    settings = dict(max_new_tokens=options.new_tokens, do_sample=False)
    records: list[dict] = []
    counts, gaps = dict(prompts=0, exact_is_exits_off=0, with_generate=0, all_the_same=0), []
    with TIDE.TIDE(model, options.router or TIDE.default_router()) as engine:

        def exits_off(**request):
            with engine.using(engine.config, exits=False):
                return exact(**request)

        def exact(**request):
            return engine.generate(**request, cache_salt=new_salt())

        runs = {"model.generate": model.generate, "exits off": exits_off, "exact": exact}
        for run in (*runs.values(), *runs.values()):  # compile, capture, warm up
            run(**chat(tokenizer, lines[0], model.device), **settings)
        for line in lines[:: options.every] if options.warm_up else []:
            for run in (exits_off, engine.generate):
                run(**chat(tokenizer, line, model.device), **settings)
        for number, line in enumerate(lines[:: options.every]):
            inputs, texts, record = chat(tokenizer, line, model.device), {}, {"category": line["category"]}
            asked = [*RUNS[number % 3 :], *RUNS[: number % 3]]
            if number % options.generate_every:
                asked.remove("model.generate")
            for name in asked:
                start = time.perf_counter()
                found = runs[name](**inputs, **settings)
                if found.is_cuda:
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                texts[name] = found[0].tolist()
                record[name] = found.shape[1] - inputs["input_ids"].shape[1], seconds
            records.append(record)
            counts["prompts"] += 1
            counts["exact_is_exits_off"] += texts["exact"] == texts["exits off"]
            if "model.generate" not in texts:
                continue
            counts["with_generate"] += 1
            counts["all_the_same"] += texts["exact"] == texts["exits off"] == texts["model.generate"]
            if texts["exits off"] != texts["model.generate"]:
                gaps.append(gap(model, texts["model.generate"], texts["exits off"]))
        stats = engine.total_stats
    if gaps:
        print("the model's own logits where texts part, its token's less the other's:", sorted(round(x, 4) for x in gaps))
    report(options, records, dict(counts, drafted=stats.drafted, accepted=stats.accepted, by_step=stats.acceptance_by_step))


def chat(tokenizer, line: dict, device: torch.device) -> dict:
    messages = [{"role": "user", "content": line["turns"][0]}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True).to(device)


@torch.no_grad()
def gap(model, one: list[int], other: list[int]) -> float:
    """How much the model prefers its token to the other where two texts part, in one forward over what they share."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)) - 1)
    logits = model(torch.tensor([one[:at]], device=model.device)).logits[0, -1].float()
    return float(logits[one[at]] - logits[other[at]])


def speed(records: list[dict], name: str, other: str) -> float:
    """Tokens per second of a run, over the prompts that another had too."""
    both = [record[name] for record in records if name in record and other in record]
    return sum(tokens for tokens, _ in both) / sum(seconds for _, seconds in both) if both else float("nan")


def report(options: argparse.Namespace, records: list[dict], counts: dict) -> None:
    """Ratios compare the same prompts; a speed is over all prompts that it was measured on."""
    print(f"{'':16}" + "".join(f"{name:>16}" for name in RUNS) + "".join(f"{of:>16}" for of in RATIOS))
    rows = {}
    for category in [*sorted({record["category"] for record in records}), "all"]:
        own = [record for record in records if category in ("all", record["category"])]
        speeds = {name: speed(own, name, name) for name in RUNS}
        ratios = {of: speed(own, a, b) / speed(own, b, a) for of, (a, b) in RATIOS.items()}
        rows[category] = {name: round(value, 3) for name, value in (speeds | ratios).items()}
        print(
            f"{category:16}" + "".join(f"{x:16.1f}" for x in speeds.values()) + "".join(f"{x:16.2f}" for x in ratios.values())
        )
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    facts = dict(new_tokens=options.new_tokens, dtype=options.dtype, every=options.every, warm_up=options.warm_up)
    facts |= dict(torch=torch.__version__, threads=torch.get_num_threads())
    print(json.dumps({**facts, **counts, "tok/s": rows}))


if __name__ == "__main__":
    main()
