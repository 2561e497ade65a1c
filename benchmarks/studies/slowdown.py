"""Slowdown attacks: how slow can a prompt make mode exact, and what is the bound?

Prompts are searched on which drafts are rejected: every rejected draft is work for nothing. Then exits off and mode exact are
timed, interleaved, on prompts as they were, on those that the search found, and with exits that are as bad as exits can be:
routers that are always sure and a head with random weights. That is as bad as a text can be from beginning to end; one whose
drafts hold for a while and then do not could cost more for a moment, until drafting rests. CPU seconds of one thread stand
beside the wall clock, because they depend less on who else uses the machine.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from kept import Kept, Record, identity
from studies.attack import plain_words, search
from studies.sources import asked_ids, open_engine, router_path

SURE = 50.0  # offset of a router's score


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="changes tried for each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt")


def run(options: argparse.Namespace) -> Record:
    import TIDE

    engine, tokenizer = open_engine(options)
    starts = asked_ids(tokenizer, options)
    sizes = dict(prompts=options.prompts, new_tokens=options.new_tokens, longest=options.longest, model=options.model)
    sizes |= dict(router=identity(router_path(options)), asked=identity(starts))
    kept, timed = (Kept(options.work / f"slowdown-{part}.jsonl", sizes) for part in ("search", "timed"))
    with engine:

        def harm(ids: list[int]) -> Record:
            text, stats = _written(engine, ids, options.new_tokens, exits=True)
            return {"harm": stats.rejected / len(text), "drafted": stats.drafted, "accepted": stats.accepted, "new": len(text)}

        worst = search(kept, starts, harm, options.steps, plain_words(tokenizer, engine.adapter.vocab_size))
        before = [kept.records[f"{number} start"] for number in range(len(starts))]
        table = {"prompts as they are": _compared(engine, starts, options, timed, "plain")}
        found = [own["ids"] for own in worst]
        table["prompts that were searched"] = _compared(engine, found, options, timed, f"found {options.steps}")
    with tempfile.TemporaryDirectory() as folder:
        path = _hopeless(router_path(options), Path(folder, "hopeless.safetensors"))
        with TIDE.TIDE(engine.model, path) as hopeless:
            table["exits that are sure and never right"] = _compared(hopeless, starts, options, timed, "hopeless")
    return {
        "what": "Slowdown attacks on mode exact: exits off against exact on prompts that were searched to defeat drafting",
        "settings": f"batch 1, greedy, {options.new_tokens} new tokens, {len(starts)} prompts of up to {options.longest} "
        f"tokens, {options.steps} changes tried for each; seconds of CPU time and of the wall clock, prompts included",
        "table": table,
        "figures": {
            "rejected_before": round(fmean(own["harm"] for own in before), 3),
            "rejected_after": round(fmean(own["harm"] for own in worst), 3),
            "same_texts": sum(own["same"] for own in timed.records.values()),
            "texts": len(timed.records),
        },
    }


def _written(engine: Any, ids: list[int], new_tokens: int, exits: bool) -> tuple[list[int], Any]:
    from TIDE.calibration.prompts import continued

    with engine.using(engine.config, exits=exits):
        return continued(engine, [ids], new_tokens)[0], engine.last_stats


def _compared(engine: Any, asked: list[list[int]], options: argparse.Namespace, kept: Kept, name: str) -> Record:
    """Return speeds with exits off and in mode exact, and the ratio."""
    for exits in (False, True):
        _written(engine, asked[0], 8, exits)  # warm up
    own = [
        kept.once(f"{name} {place} {turn}", lambda ids=ids, turn=turn: _both(engine, ids, options.new_tokens, turn))
        for turn in range(options.rounds)
        for place, ids in enumerate(asked)
    ]
    sums = {key: sum(one[key] for one in own) for key in ("off_cpu", "exact_cpu", "off_wall", "exact_wall", "tokens")}
    return {
        "exits off, CPU s per 100 tokens": round(100 * sums["off_cpu"] / sums["tokens"], 2),
        "exact, CPU s per 100 tokens": round(100 * sums["exact_cpu"] / sums["tokens"], 2),
        "exact, × the speed of exits off, CPU": round(sums["off_cpu"] / sums["exact_cpu"], 3),
        "exact, × the speed of exits off, wall clock": round(sums["off_wall"] / sums["exact_wall"], 3),
        "accepted": round(sum(one["accepted"] for one in own) / max(1, sum(one["drafted"] for one in own)), 3),
        "drafts per token": round(sum(one["drafted"] for one in own) / sums["tokens"], 3),
    }


def _both(engine: Any, ids: list[int], new_tokens: int, turn: int) -> Record:
    found: Record = {}
    texts = {}
    for exits in (False, True) if turn % 2 else (True, False):
        wall, cpu = time.perf_counter(), time.process_time()
        texts[exits], stats = _written(engine, ids, new_tokens, exits)
        name = "exact" if exits else "off"
        found |= {f"{name}_wall": time.perf_counter() - wall, f"{name}_cpu": time.process_time() - cpu}
        found |= {"drafted": stats.drafted, "accepted": stats.accepted} if exits else {}
    return found | {"tokens": len(texts[True]), "same": texts[True] == texts[False]}


def _hopeless(router: Path, path: Path) -> Path:
    """Write a router file whose routers are always sure and whose heads are random."""
    import torch

    import TIDE

    file = TIDE.RouterFile.load(router)
    generator = torch.Generator().manual_seed(0)
    for at in file.exits.values():
        at.router.offset.fill_(SURE)
        for weight in at.head.parameters():
            weight.data = (0.02 * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
    file.save(path, compress=False)
    return path
