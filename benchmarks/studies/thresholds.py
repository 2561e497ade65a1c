"""Thresholds, as the original swept them: 16 prompts, 8 that need reasoning and 8 of general knowledge, at every threshold of
mode fast, with tokens, different tokens, correct answers and wall clock. Exits off and mode exact stand beside it.
"""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import replace
from typing import Any

from kept import Kept, Record, identity
from studies.sources import ids_of, open_engine, router_path

QUESTIONS = [  # a question, and what its answer has to hold
    ("What is 17 + 25? Think step by step.", r"\b42\b"),
    ("A box has 3 rows of 8 eggs. How many eggs are there? Think step by step.", r"\b24\b"),
    ("Tom has 50 euros and buys 3 books for 9 euros each. How much is left? Think step by step.", r"\b23\b"),
    ("A train goes 60 km in one hour. How far does it go in 3 hours? Think step by step.", r"\b180\b"),
    ("What is half of 90, plus 5? Think step by step.", r"\b50\b"),
    ("What comes next: 2, 4, 8, 16? Think step by step.", r"\b32\b"),
    ("If all cats are animals and Tom is a cat, is Tom an animal? Answer yes or no, with a reason.", r"(?i)\byes\b"),
    ("A rectangle is 7 m long and 4 m wide. What is its area? Think step by step.", r"\b28\b"),
    ("What is the capital of France?", r"Paris"),
    ("Which planet is closest to the sun?", r"Mercury"),
    ("What is water made of?", r"(?i)hydrogen"),
    ("Who wrote Romeo and Juliet?", r"Shakespeare"),
    ("How many days has a week?", r"(?i)\b(7|seven)\b"),
    ("What is the largest ocean?", r"Pacific"),
    ("Which gas do plants take from the air?", r"(?i)carbon dioxide|CO2|CO₂"),
    ("In which country is the Great Wall?", r"China"),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threshold", type=float, nargs="+", default=[0.95, 0.85, 0.7, 0.5, 0.3])
    parser.add_argument("--new-tokens", type=int, default=96)


def run(options: argparse.Namespace) -> Record:
    engine, tokenizer = open_engine(options)
    settings = dict(new_tokens=options.new_tokens, model=options.model, router=identity(router_path(options)))
    kept = Kept(options.work / "thresholds.jsonl", settings | {"asked": identity(QUESTIONS)})
    exact = replace(engine.config, mode="exact")
    ways = {"exits off": (exact, False), "exact": (exact, True)}
    ways |= {f"fast, {one!r}": (replace(exact, mode="fast", exit_threshold=one), True) for one in options.threshold}
    with engine:
        for number, (question, wanted) in enumerate(QUESTIONS):
            ids = ids_of(tokenizer, question)
            for place in range(len(ways)):  # another one begins each time
                name = list(ways)[(number + place) % len(ways)]
                kept.once(f"{name}: {number}", lambda ids=ids, name=name, wanted=wanted: _answer(
                    engine, tokenizer, ids, ways[name], wanted, options.new_tokens))  # fmt: skip
    return {
        "what": "The original's sweep: 16 prompts by threshold, with tokens, correct answers and wall clock",
        "settings": f"8 prompts that need reasoning, 8 of general knowledge; greedy, up to {options.new_tokens} new tokens, "
        f"batch 1, interleaved",
        "table": {name: _row(kept, name) for name in ways},
        "figures": {"prompts": len(QUESTIONS)},
    }


def _answer(engine: Any, tokenizer: Any, ids: list[int], way: tuple[Any, bool], wanted: str, new_tokens: int) -> Record:
    from TIDE.calibration.prompts import continued

    with engine.using(*way):
        wall, cpu = time.perf_counter(), time.process_time()
        found = continued(engine, [ids], new_tokens)[0]
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        rate = engine.last_stats.exited_tokens
    text = tokenizer.decode(found, skip_special_tokens=True)
    return took | {"ids": found, "exited": rate, "text": text, "is_right": bool(re.search(wanted, text))}


def _row(kept: Kept, name: str) -> Record:
    own = [kept.records[f"{name}: {number}"] for number in range(len(QUESTIONS))]
    full = [kept.records[f"exits off: {number}"] for number in range(len(QUESTIONS))]
    tokens = sum(len(one["ids"]) for one in own)
    return {
        "right": sum(one["is_right"] for one in own),
        "texts of exits off": sum(one["ids"] == other["ids"] for one, other in zip(own, full, strict=True)),
        "tokens": tokens,
        "different tokens": len({token for one in own for token in one["ids"]}),
        "exits": round(sum(one["exited"] for one in own) / tokens, 3),
        "seconds": round(sum(one["wall"] for one in own), 1),
        "CPU seconds": round(sum(one["cpu"] for one in own), 1),
    }
