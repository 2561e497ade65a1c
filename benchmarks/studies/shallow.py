"""Shallow attacks: how much can a prompt make mode fast lose, at a threshold that a certificate allows?

A certificate bounds the mean loss over prompts drawn as those it was found on. Here prompts are not drawn but searched, for the
largest loss (1 - ROUGE-L to the full model's text) and, where that is the same, for the most exits, without which nothing can
be lost. So nothing is promised; this is how far it can go.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import fmean
from typing import Any

from kept import Kept, Record, identity
from studies.attack import plain_words, search
from studies.sources import asked_ids, open_engine, router_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40, help="changes tried for each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threshold", type=float, default=0.99, help="that a certificate allows")
    parser.add_argument("--risk", type=float, default=0.05, help="of that certificate")
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt")


def run(options: argparse.Namespace) -> Record:
    engine, tokenizer = open_engine(options)
    starts = asked_ids(tokenizer, options)
    settings = dict(
        prompts=options.prompts, new_tokens=options.new_tokens, threshold=options.threshold, longest=options.longest
    )
    settings |= dict(model=options.model, router=identity(router_path(options)), asked=identity(starts))
    kept = Kept(options.work / "shallow.jsonl", settings)
    with engine:

        def harm(ids: list[int]) -> Record:
            return _loss(engine, ids, options)

        worst = search(kept, starts, harm, options.steps, plain_words(tokenizer, engine.adapter.vocab_size))
    before = [kept.records[f"{number} start"] for number in range(len(starts))]
    tried = list(kept.records.values())
    return {
        "what": "Shallow attacks on mode fast: loss on prompts that were searched for the largest one",
        "settings": f"threshold {options.threshold}, greedy, {options.new_tokens} new tokens, {len(starts)} prompts of up to "
        f"{options.longest} tokens, {options.steps} changes tried for each; loss 1 - ROUGE-L",
        "figures": {
            "prompts": len(starts),
            "steps": options.steps,
            "risk": options.risk,
            "loss_before": round(fmean(own["loss"] for own in before), 3),
            "loss_after": round(fmean(own["loss"] for own in worst), 3),
            "largest_loss": round(max(own["loss"] for own in tried), 3),
            "mean_of_all_tried": round(fmean(own["loss"] for own in tried), 3),
            "share_with_loss": round(fmean(own["loss"] > 0 for own in tried), 3),
            "exits_before": round(fmean(own["exit_rate"] for own in before), 3),
            "exits_after": round(fmean(own["exit_rate"] for own in worst), 3),
        },
    }


def _loss(engine: Any, ids: list[int], options: argparse.Namespace) -> Record:
    from TIDE.calibration.losses import rouge_l
    from TIDE.calibration.prompts import continued

    fast = replace(engine.config, mode="fast", exit_threshold=options.threshold)
    with engine.using(fast, exits=False):
        full = continued(engine, [ids], options.new_tokens)[0]
    with engine.using(fast):
        text = continued(engine, [ids], options.new_tokens)[0]
        rate = engine.last_stats.exit_rate
    loss = rouge_l(text, full)
    return {"harm": loss + rate / 100, "loss": loss, "exit_rate": rate, "new": len(text)}
