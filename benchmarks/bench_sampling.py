"""Speed of sampled and processed decoding beside greedy decoding, one row, exits off and exact, interleaved on every prompt.

    python benchmarks/bench_sampling.py                      the embedded default model with its exits
    python benchmarks/bench_sampling.py --model llama-8b     a random Llama of that size in bf16, for a GPU: exits off only
    python benchmarks/bench_sampling.py --model tiny         a smoke test

    greedy              the best token
    sampled             temperature 0.7, top-p 0.9
    repetition          greedy, repetition penalty 1.1
    all                 temperature, top-k, top-p, min-p, three penalties and a bias
    own processor       greedy, with a LogitsProcessor of the user's own, which runs on the host

Texts have the same length, so speeds compare. Exact must write what exits off writes, token by token: the number that does not
is printed. Prints a table of tokens per second (medians over prompts), then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import LogitsProcessor

import TIDE
from bench_decode import SHAPES, random_model
from TIDE.engine.cache.prefix_tree import new_salt

QUESTIONS = [
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "List five ways to save energy at home.",
    "Explain how a bicycle stays upright.",
    "Translate into French: I would like a cup of tea, please.",
    "What is the difference between a list and a tuple in Python?",
    "Summarize the plot of Romeo and Juliet.",
    "Write a poem about autumn.",
    "How do vaccines work?",
    "Give me a recipe for pancakes.",
]


class Own(LogitsProcessor):
    """Makes the token written last a little less likely."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter_add(1, ids[:, -1:], torch.full_like(ids[:, -1:], -1, dtype=scores.dtype))


WAYS: dict[str, dict[str, Any]] = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True, temperature=0.7, top_p=0.9, top_k=0),
    "sampled, top-k 50": dict(do_sample=True, temperature=0.7, top_p=0.9, top_k=50),
    "repetition": dict(do_sample=False, repetition_penalty=1.1),
    "all": dict(
        do_sample=True,
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={5: 1.0},
    ),
    "own processor": dict(do_sample=False, logits_processor=[Own()]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help=f"one of {', '.join(SHAPES)}, or what TIDE.load_model takes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--router", default=None, help="None: the one of the embedded default, if that is the model")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS))
    parser.add_argument("--rounds", type=int, default=2, help="times every prompt is answered, the first to warm up")
    parser.add_argument("--ways", nargs="*", choices=list(WAYS), default=list(WAYS))
    options = parser.parse_args()

    if options.model in SHAPES:
        model, router = random_model(options.model), options.router
        prompts = [torch.randint(10, model.config.vocab_size, (1, 128), device=model.device) for _ in range(options.prompts)]
    else:
        model, tokenizer = TIDE.load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype))
        router = options.router or (TIDE.default_router() if options.model == "default" else None)
        prompts = [chat(tokenizer, question, model.device) for question in QUESTIONS[: options.prompts]]
    model.generation_config.eos_token_id = None
    with TIDE.TIDE(model, router) as engine:
        found = measured(engine, prompts, options)
        found["backend"] = engine.backend
    report(found, options)


def chat(tokenizer: Any, question: str, device: torch.device) -> torch.Tensor:
    messages = [{"role": "user", "content": question}]
    given = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return given["input_ids"].to(device)


def measured(engine: Any, prompts: list[torch.Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """Answer every prompt in every way, one after the other."""
    modes = ["exits off"] if engine.policy is None else ["exits off", "exact"]
    seconds: dict[tuple[str, str], list[float]] = {(mode, way): [] for mode in modes for way in options.ways}
    different = dict.fromkeys(options.ways, 0)
    drafted = {way: [0, 0] for way in options.ways}
    for round_ in range(options.rounds):
        for seed, ids in enumerate(prompts):
            for way in options.ways:
                texts = []
                for mode in modes:
                    began = time.perf_counter()
                    texts.append(answer(engine, ids, way, mode, seed, options.new_tokens))
                    if round_:
                        seconds[mode, way].append(time.perf_counter() - began)
                different[way] += texts[0] != texts[-1]
                drafted[way][0] += engine.last_stats.drafted
                drafted[way][1] += engine.last_stats.accepted
    speeds = {f"{mode}, {way}": options.new_tokens / statistics.median(own) for (mode, way), own in seconds.items() if own}
    return dict(modes=modes, speeds=speeds, different=different, drafted=drafted)


def answer(engine: Any, ids: torch.Tensor, way: str, mode: str, seed: int, new_tokens: int) -> list[int]:
    asked = dict(max_new_tokens=new_tokens, attention_mask=torch.ones_like(ids), pad_token_id=0, **WAYS[way])
    if asked["do_sample"]:
        asked["seed"] = seed
    with engine.using(engine.config, exits=mode == "exact"):
        found = engine.generate(ids, cache_salt=new_salt(), **asked)
    return found[0].tolist()


def report(found: dict[str, Any], options: argparse.Namespace) -> None:
    print(
        f"{'tokens/s':20}" + "".join(f"{mode:>12}{'/greedy':>9}" for mode in found["modes"]) + f"{'accepted':>10}{'differ':>8}"
    )
    for way in options.ways:
        line = f"{way:20}"
        for mode in found["modes"]:
            own = found["speeds"].get(f"{mode}, {way}", float("nan"))
            line += f"{own:12.1f}{own / found['speeds'].get(f'{mode}, greedy', float('nan')):9.3f}"
        drafted, accepted = found["drafted"][way]
        print(line + f"{accepted / drafted if drafted else 0.0:10.2f}{found['different'][way]:8d}")
    print(json.dumps(dict(found, model=options.model, new_tokens=options.new_tokens)))


if __name__ == "__main__":
    main()
