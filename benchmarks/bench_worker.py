"""The server's worker under load, in process and without HTTP, beside transformers' continuous batching.

    python benchmarks/bench_worker.py --rows 1 2 4 8 16 32 64           the embedded default model with its exits, for a GPU
    python benchmarks/bench_worker.py --prompts question.jsonl          prompts of a file with Spec-Bench's `turns`
    python benchmarks/bench_worker.py --rows 1 3 --each 1 --new-tokens 8 --without continuous     a smoke test

As many clients as rows, each asking one question after another, so the number of rows stays the same. Answers have three
quarters to five quarters of --new-tokens, so that they do not end together. They are greedy, or every second one is sampled
with a seed (--sampled). Answers of TIDE must not depend on the load: the number of those that differ from the same question
asked alone is printed, and must be 0. Those of the manager, which has one set of settings, all have --new-tokens.

    exits off, exact    the worker of `tide serve`
    continuous          transformers' manager, kept open; all of it greedy

Prints tokens per second and the first token's milliseconds (median, p95), then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import TIDE
from bench_batch import answered, continuous, texts
from bench_decode import on_gpu, timed
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.server.job import GenerationSpec
from TIDE.server.metrics import Metrics
from TIDE.server.settings import ServerSettings
from TIDE.server.worker import Worker

Answer = tuple[list[int], float]  # tokens, and seconds to the first of them


async def ask(worker: Worker, ids: list[int], number: int, new: int, exits: bool) -> Answer:
    """Return one answer of the worker: greedy, or sampled where there is a number for it."""
    sampled = dict(do_sample=True, temperature=0.8, top_p=0.9, seed=number) if number else dict(do_sample=False)
    options = dict(sampled, max_new_tokens=new, eos_token_id=None, cache_salt=new_salt())
    began, first, tokens = time.perf_counter(), 0.0, []
    async for delta in worker.submit([GenerationSpec(ids, options, exits=exits)]).deltas():
        first = first or time.perf_counter() - began
        tokens += [token.id for token in delta.tokens]
    return tokens, first


async def loaded(
    worker: Worker, prompts: list[list[int]], clients: int, options: argparse.Namespace, exits: bool
) -> tuple[list[Answer], float]:
    """Return all answers and the seconds they took, with so many clients."""
    answers: list[Answer] = [([], 0.0)] * len(prompts)

    async def client(own: range) -> None:
        for number in own:
            seed = number if options.sampled and number % 2 else 0
            answers[number] = await ask(worker, prompts[number], seed, tokens_of(number, options.new_tokens), exits)

    began = time.perf_counter()
    await asyncio.gather(*(client(range(first, len(prompts), clients)) for first in range(clients)))
    return answers, time.perf_counter() - began


def tokens_of(number: int, new: int) -> int:
    """Return the tokens of an answer."""
    return new * (3 + number % 3) // 4


async def compared(worker: Worker, manager: Any, give: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    await worker.start()
    gc.collect()
    gc.freeze()  # as `tide serve` does
    found = []
    print(f"{'rows':>5}  {'':<12}{'tok/s':>9}{'first ms':>10}{'p95':>8}{'differ':>8}")
    for rows in options.rows:
        (prompts,), new = give(rows * options.each), options.new_tokens
        written = sum(tokens_of(number, new) for number in range(len(prompts)))
        for name, exits in (("exits off", False), ("exact", True)):
            alone, _ = await loaded(worker, prompts, 1, options, exits)
            await loaded(worker, prompts, rows, options, exits)
            runs = [await loaded(worker, prompts, rows, options, exits) for _ in range(options.rounds)]
            differ = sum(own[0] != other[0] for answers, _ in runs for own, other in zip(alone, answers, strict=True))
            firsts = sorted(1000 * first for answers, _ in runs for _, first in answers)
            speed = written / statistics.median(seconds for _, seconds in runs)
            p95 = firsts[int(0.95 * (len(firsts) - 1))]
            found.append(dict(rows=rows, name=name, tok_s=speed, first_ms=statistics.median(firsts), p95_ms=p95, differ=differ))
            print(f"{rows:>5}  {name:<12}{speed:>9.1f}{found[-1]['first_ms']:>10.1f}{p95:>8.1f}{differ:>8}", flush=True)
        if manager is not None:
            run = functools.partial(answered, manager, prompts, new, rows)
            seconds = [timed(run)[0] for _ in range(options.rounds + 1)][1:]
            found.append(dict(rows=rows, name="continuous", tok_s=len(prompts) * new / statistics.median(seconds)))
            print(f"{rows:>5}  {'continuous':<12}{found[-1]['tok_s']:>9.1f}", flush=True)
    await worker.stop(60)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--each", type=int, default=2, help="questions of a client")
    parser.add_argument("--prompts", type=Path, default=None, help="a .jsonl file with `turns`; None: short questions")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of the longest prompt taken")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sampled", action="store_true", help="every second answer is")
    parser.add_argument("--without", nargs="*", default=[], choices=["continuous"])
    options = parser.parse_args()
    model, tokenizer = TIDE.load_model("default", dtype=torch.bfloat16 if on_gpu() else None)
    manager = continuous(model, options.new_tokens) if on_gpu() and "continuous" not in options.without else None
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        if on_gpu():  # the worker does the same for answers with exits
            with engine.using(engine.config, exits=False):
                engine.warm_up(max(options.rows), progress=False)
        worker = Worker(engine, tokenizer, ServerSettings(max_rows=max(options.rows)), Metrics("default"))
        found = asyncio.run(compared(worker, manager, texts(model, tokenizer, options), options))
        print(
            json.dumps(
                dict(
                    bench="worker",
                    new_tokens=options.new_tokens,
                    sampled=options.sampled,
                    backend=engine.backend,
                    results=found,
                )
            )
        )
    if manager is not None:
        manager.stop()


if __name__ == "__main__":
    main()
