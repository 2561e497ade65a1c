"""Determinism: is a sampled text the same whatever happens around it?

One prompt with one seed is written again and again: with exits and without, among other rows that begin before it, join while
it is written, and are taken away half-way. As a control, the same prompt with other seeds.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from kept import Kept, Record, identity
from studies.sources import ids_of, open_engine, router_path

PROMPT = "Write the first sentences of a story about a lighthouse."
OTHERS = (
    "Name three rivers of Europe.",
    "Write a Python function that adds two numbers.",
    "Why is the sky blue?",
    "Translate into French: good morning, my friend.",
)
SEED = 11
CONTROLS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rows", type=int, default=4, help="most rows at once")
    parser.add_argument("--temperature", type=float, default=0.8)


def run(options: argparse.Namespace) -> Record:
    engine, tokenizer = open_engine(options)
    settings = dict(new_tokens=options.new_tokens, rows=options.rows, temperature=options.temperature, model=options.model)
    asked = [ids_of(tokenizer, prompt) for prompt in (PROMPT, *OTHERS)]
    settings |= dict(router=identity(router_path(options)), asked=identity(asked))
    kept = Kept(options.work / "determinism.jsonl", settings)
    with engine:
        alone = kept.once("alone", lambda: _written(engine, asked, options, None, SEED))["ids"]
        runs = [kept.once(f"run {n}", lambda n=n: _written(engine, asked, options, n, SEED)) for n in range(options.runs)]
        others = [kept.once(f"seed {n}", lambda n=n: _written(engine, asked, options, None, n)) for n in range(CONTROLS)]
    return {
        "what": "The same sampled text in changing batches, with and without exits",
        "settings": f"embedded model, temperature {options.temperature}, {options.new_tokens} new tokens, "
        f"up to {options.rows} rows that join and leave at random",
        "figures": {
            "runs": len(runs),
            "same": sum(own["ids"] == alone for own in runs),
            "with_exits": sum(own["exits"] for own in runs),
            "with_neighbours": sum(own["neighbours"] > 0 for own in runs),
            "neighbours_removed": sum(own["removed"] for own in runs),
            "new_tokens": len(alone),
            "seeds": CONTROLS,
            "texts_of_seeds": len({tuple(own["ids"]) for own in others}),
        },
    }


def _written(engine: Any, asked: list[list[int]], options: argparse.Namespace, number: int | None, seed: int) -> Record:
    """Write the text once; run None: alone, with exits off."""
    import torch

    def add(ids: list[int], seed: int, exits: bool) -> Any:
        sampled = dict(do_sample=True, temperature=options.temperature, top_k=0, top_p=1.0, pad_token_id=0)
        given = torch.tensor([ids], device=engine.adapter.device)
        return engine.add(given, seed=seed, max_new_tokens=options.new_tokens, exits=exits, **sampled)

    chance = random.Random(number)
    exits = number is not None and chance.random() < 0.75
    waiting = [] if number is None else [chance.choice(asked) for _ in range(chance.randrange(options.rows))]
    begins, removed, neighbours = (chance.randrange(4) if waiting else 0), 0, len(waiting)
    others: list[Any] = []
    row = None
    for step in range(100_000):
        if row is None and step >= begins:
            row = add(asked[0], seed, exits)
        if waiting and chance.random() < 0.5:
            others.append(add(waiting.pop(), chance.randrange(1000), chance.random() < 0.5))
        if others and chance.random() < 0.1:
            other = others.pop()
            if not other.finished:
                engine.remove(other)
                removed += 1
        engine.step()
        if row is not None and row.finished:
            break
    for other in others:
        if not other.finished:
            engine.remove(other)
    engine.step()  # lets them go
    assert row is not None and row.error is None
    return {"ids": row.new_tokens, "exits": exits, "neighbours": neighbours, "removed": removed}
