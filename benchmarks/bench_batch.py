"""Decoding speed of many rows together: `model.generate`, transformers' continuous batching, and TIDE, interleaved in one run.

    python benchmarks/bench_batch.py --rows 1 4 8                       the embedded default model with its exits
    python benchmarks/bench_batch.py --prompts question.jsonl           prompts of a file with Spec-Bench's `turns`
    python benchmarks/bench_batch.py --model llama-8b --rows 1 8 32 64  a random Llama of that size in bf16, for a GPU
    python benchmarks/bench_batch.py --model tiny --rows 1 3            a smoke test

    generate            `model.generate` on the left-padded batch
    compiled            the same with a static cache, compiled (GPU only)
    continuous          transformers' continuous batching; its manager is kept open (GPU only)
    exits off, exact    TIDE on the same batch
    fast                TIDE in mode fast

Every text has the same number of new tokens. Prompts come from the whole file, whatever the number of rows. A batch ends with
its slowest row, so a few sets of prompts (--sets) say more than one: they are answered one after the other in every round.
Fewer than eight rows have more sets, so that one row alone is asked what eight are asked together.

Tokens per second are those of all rows together, medians over the rounds: with the prompts, and without them (the time of one
new token per row, taken just before, is taken off in every round). On a GPU they stand beside what the memory allows: weights
once and each row's K/V for every step. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import TIDE
from bench_decode import SHAPES, copy_bandwidth, on_gpu, random_model, step_bytes, timed
from bench_sampling import QUESTIONS
from TIDE.engine.cache.prefix_tree import new_salt

Run = Callable[[int], Any]
EIGHT = 8  # rows; fewer have as many prompts in all


class Seconds:
    """Seconds of a contender: by set of prompts, then by round."""

    def __init__(self, sets: int) -> None:
        self.first: list[list[float]] = [[] for _ in range(sets)]  # of one new token per row
        self.whole: list[list[float]] = [[] for _ in range(sets)]

    @property
    def behind(self) -> list[list[float]]:
        """Those behind the first token."""
        pairs = zip(self.whole, self.first, strict=True)
        return [[whole - first for whole, first in zip(*pair, strict=True)] for pair in pairs]

    @staticmethod
    def medians(seconds: list[list[float]]) -> list[float]:
        return [statistics.median(own) for own in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help=f"one of {', '.join(SHAPES)}, or what TIDE.load_model takes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--router", default=None, help="None: the one of the embedded default, if that is the model")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", type=Path, default=None, help="a .jsonl file with `turns`; None: short questions")
    parser.add_argument(
        "--prompt-tokens", type=int, default=128, help="of random models; otherwise, of the longest prompt taken"
    )
    parser.add_argument("--sets", type=int, default=1, help="of prompts; of fewer rows than eight, as many prompts in all")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=4, help="times everything runs before; graphs are made then")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    options = parser.parse_args()

    if options.model in SHAPES:
        model, router, tokenizer = random_model(options.model), options.router, None
    else:
        model, tokenizer = TIDE.load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype))
        router = options.router or (TIDE.default_router() if options.model == "default" else None)
    model.generation_config.eos_token_id = None
    prompts = texts(model, tokenizer, options, options.sets)
    manager = None if not on_gpu() or "continuous" in options.without else continuous(model, options.new_tokens)
    with TIDE.TIDE(model, router) as engine:
        if on_gpu():  # rows end at different times, and each number of rows that are left has graphs of its own
            engine.warm_up(rows=max(options.rows), tokens=options.prompt_tokens + options.new_tokens, progress=False)
        found = {rows: compared(engine, prompts(rows), manager, options) for rows in options.rows}
        facts = dict(model=options.model, new_tokens=options.new_tokens, sets=options.sets)
        facts |= dict(backend=engine.backend, dtype=str(model.dtype))
    if manager is not None:
        manager.stop()
    print(json.dumps(dict(facts, results=found)))


def texts(model: Any, tokenizer: Any, options: argparse.Namespace, sets: int = 1) -> Callable[[int], list[list[list[int]]]]:
    """Return a function that gives sets of a number of prompts, as ids; more sets of few prompts."""
    if tokenizer is None:
        return lambda rows: torch.randint(10, model.config.vocab_size, (sets, rows, options.prompt_tokens)).tolist()
    questions = QUESTIONS
    if options.prompts is not None:
        questions = [json.loads(line)["turns"][0] for line in options.prompts.read_text("utf-8").splitlines()]
    chats = [[{"role": "user", "content": question}] for question in questions]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    short = [own for own in ids if len(own) <= options.prompt_tokens]
    if not short:
        raise SystemExit(f"no prompt has at most {options.prompt_tokens} tokens: pass --prompt-tokens {min(map(len, ids))}.")

    def give(rows: int) -> list[list[list[int]]]:
        count = max(sets, sets * EIGHT // rows) if sets > 1 else 1
        return [spread(short, rows, number / count) for number in range(count)]

    return give


def spread(some: list[list[int]], count: int, shift: float) -> list[list[int]]:
    """Return so many of a list, evenly, moved by a part of the distance between two."""
    return [some[int((index + shift) * len(some) / count) % len(some)] for index in range(count)]


def continuous(model: Any, new_tokens: int) -> Any:
    """Return an open manager, on a copy of the model: it changes the model's attention."""
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    some = ContinuousBatchingConfig(max_memory_percent=0.3)  # TIDE and `model.generate` need memory too
    manager = copy.deepcopy(model).init_continuous_batching(config, some)
    manager.start()
    return manager


def compared(engine: Any, sets: list[list[list[int]]], manager: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Time every contender on sets of prompts."""
    runs = [contenders(engine, prompts, manager) for prompts in sets]
    runs = {name: [own[name] for own in runs] for name in runs[0] if name not in options.without}
    for new in (options.new_tokens,) * options.warm_up + (1, 1):
        for name in list(runs):
            try:
                for run in runs[name]:
                    run(new)
            except (RuntimeError, SystemExit) as problem:
                if name not in ("compiled", "continuous"):
                    raise
                print(f"{name} is left out: {problem}", flush=True)
                del runs[name]
    seconds = {name: Seconds(len(sets)) for name in runs}
    for number, place in itertools.product(range(options.rounds), range(len(sets))):
        for name in sorted(runs, reverse=bool(number % 2)):
            run, own = runs[name][place], seconds[name]
            own.first[place].append(timed(functools.partial(run, 1))[0])
            own.whole[place].append(timed(functools.partial(run, options.new_tokens))[0])
    limit = step_seconds(engine.model, sets[0], options.new_tokens) if on_gpu() else None
    return report(len(sets[0]), options.new_tokens, seconds, limit)


def contenders(engine: Any, prompts: list[list[int]], manager: Any) -> dict[str, Run]:
    width, device = max(map(len, prompts)), engine.model.device
    ids = torch.tensor([[0] * (width - len(own)) + own for own in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in prompts], device=device)
    asked = dict(attention_mask=mask, do_sample=False, pad_token_id=0)

    def tide(new: int, exits: bool, mode: str = "exact") -> torch.Tensor:
        with engine.using(TIDE.TIDEConfig(mode=mode), exits=exits):
            return engine.generate(ids, max_new_tokens=new, cache_salt=new_salt(), **asked)

    found: dict[str, Run] = {
        "generate": lambda new: engine.model.generate(ids, max_new_tokens=new, **asked),
        "exits off": lambda new: tide(new, exits=False),
    }
    if on_gpu():
        static = dict(asked, cache_implementation="static")
        found["compiled"] = lambda new: engine.model.generate(ids, max_new_tokens=new, **static)
    if manager is not None:
        found["continuous"] = lambda new: answered(manager, prompts, new)
    if engine.policy is not None:
        found["exact"] = lambda new: tide(new, exits=True)
        found["fast"] = lambda new: tide(new, exits=True, mode="fast")
    return found


def answered(manager: Any, prompts: list[list[int]], new: int, at_once: int | None = None) -> None:
    """Let continuous batching answer: all prompts together, or so many at a time."""
    first, waiting = prompts[:at_once], iter(prompts[len(prompts[:at_once]) :])
    running = {manager.add_request(own, max_new_tokens=new) for own in first}
    while running:
        output = manager.get_result(timeout=60)
        if output is None:
            raise SystemExit(f"continuous batching gave no answer to {len(running)} requests within 60 s.")
        if output.is_finished():
            running.discard(output.request_id)
            running |= {manager.add_request(own, max_new_tokens=new) for own in itertools.islice(waiting, 1)}


def step_seconds(model: Any, prompts: list[list[int]], new: int) -> float:
    """Return the seconds of a step if it took as long as reading weights and K/V takes, half of the new tokens written."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    column = 2 * config.num_hidden_layers * config.num_key_value_heads * dim * model.dtype.itemsize
    return (step_bytes(model) + sum(len(own) + new // 2 for own in prompts) * column) / copy_bandwidth()


def report(rows: int, new: int, seconds: dict[str, Seconds], limit: float | None) -> dict[str, Any]:
    """Print and return tokens per second of every contender."""
    print(f"{rows} rows".ljust(14) + f"{'with prompts':>14}{'decoding':>10}{'a row':>8}" + f"{'of limit':>10}" * bool(limit))
    found = {}
    for name, own in seconds.items():
        whole, behind = own.medians(own.whole), own.medians(own.behind)
        tokens, decoded = (rows * count * len(own.whole) for count in (new, new - 1))
        decoding = decoded / max(1e-9, sum(behind))
        found[name] = dict(tok_s=tokens / sum(whole), decoding=decoding, decoding_s=behind)
        found[name]["first_s"] = statistics.fmean(own.medians(own.first))
        line = f"{name:14}{tokens / sum(whole):14.1f}{decoding:10.1f}{decoding / rows:8.1f}"
        if limit:
            found[name]["of_limit"] = decoding * limit / rows
            line += f"{decoding * limit / rows:10.3f}"
        print(line, flush=True)
    return found


if __name__ == "__main__":
    main()
