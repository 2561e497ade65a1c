"""Exits in the prompt: perplexity of the text that follows, against the time of the prefill, for several scores.

    python benchmarks/bench_settling.py --learn train.txt --measure test.txt
    python benchmarks/bench_settling.py --model tiny --learn a.txt --measure b.txt --texts 2 --prompt 24 --follow 8 --windows 12

Maps and router are fitted on windows of the first file (`TIDE.prompt_exits.fit`); the last sixth of them is held out.
Then the engine's own prefill takes prompts of the second file, with nobody settling, by score, and at random; what follows runs
all layers. Runs of a text are interleaved. Time is that of the prompt alone: wall clock, and the CPU time of this process, to
which other work on the machine does not add. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import torch

import TIDE
from bench_decode import SHAPES, random_model
from TIDE.calibration.collect import Collection, laid_out
from TIDE.calibration.fit import Split
from TIDE.calibration.text import Text
from TIDE.engine.host.segments import Segments
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.prompt_exits.fit import fit_at
from TIDE.prompt_exits.maps import FittedPromptExit, PromptExit
from TIDE.prompt_exits.prefill import PromptExitPass


class Chosen(PromptExit):
    """Stops tokens above a score, or at random, with or without maps."""

    def __init__(self, fitted: FittedPromptExit, threshold: float, maps: bool, random_share: float | None = None) -> None:
        self.fitted, self.threshold, self.maps, self.random_share = fitted, threshold, maps, random_share
        self.depth = fitted.depth

    def stops(self, states, positions):
        if self.random_share is not None:
            chance = torch.rand(len(states), generator=torch.Generator().manual_seed(len(states)))
            found = (chance < self.random_share).to(states.device)
        else:
            found = self.fitted.scores(states) >= self.threshold
        found[0] &= positions[0] != 0
        return found

    def predict(self, depth, states):
        return self.fitted.predict(depth, states) if self.maps else states


@torch.no_grad()
def run(engine: TIDE.TIDE, tokens: list[int], prompt: int, exit_: PromptExit | None) -> dict[str, float]:
    """Prefill a prompt, then run what follows; return seconds of the first and logits of the second."""
    row = Row(tokens, StopRule(), engine.adapter.num_layers)
    row.prompt = prompt
    spans = [range(engine.adapter.num_layers)]
    prompt_pass = None if exit_ is None else PromptExitPass(exit_, None)
    segments = Segments(engine.runner, spans, [row], len(tokens), prompt_pass=prompt_pass)
    with engine.runner.grad_off():
        began, worked = time.perf_counter(), time.process_time()
        segments.run_prompts({row: prompt}, {row: prompt - 1})
        wall, cpu = time.perf_counter() - began, time.process_time() - worked
        last = segments.run(0, {row: len(tokens) - 1 - prompt}, {row: prompt})[row]
    return dict(wall=wall, cpu=cpu, logs=last.float().log_softmax(-1), share=row.stats.settled_tokens / (prompt - 1))


def windows(tokenizer, path: str, size: int, count: int) -> list[list[int]]:
    ids = tokenizer(Path(path).read_text(encoding="utf-8"))["input_ids"] if tokenizer else list(Path(path).read_bytes())
    found = [ids[start : start + size] for start in range(0, len(ids) - size + 1, size)]
    step = max(1, len(found) // count)
    return found[::step][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="'tiny', or what TIDE.load_model takes")
    parser.add_argument("--learn", required=True, help="a text file to fit on")
    parser.add_argument("--measure", required=True, help="a text file to measure on")
    parser.add_argument("--depth", type=int, action="append", default=None, help="checkpoints; half depth unless given")
    parser.add_argument("--windows", type=int, default=60, help="texts to fit on")
    parser.add_argument("--window", type=int, default=192, help="their tokens")
    parser.add_argument("--texts", type=int, default=8, help="texts to measure on")
    parser.add_argument("--prompt", type=int, default=320)
    parser.add_argument("--follow", type=int, default=192)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = (random_model("tiny"), None) if args.model in SHAPES else TIDE.load_model(args.model)
    learn = windows(tokenizer, args.learn, args.window, args.windows)
    measure = windows(tokenizer, args.measure, args.prompt + args.follow, args.texts)
    texts = [Text(ids, 0, number) for number, ids in enumerate(learn)]
    held = len(texts) // 6
    results = []
    for depth in args.depth or [model.config.num_hidden_layers // 2]:
        results.append(measured(model, texts, held, measure, depth, args))
        print(json.dumps(results[-1]), flush=True)
    print(json.dumps(dict(vars(args), threads=torch.get_num_threads(), torch=torch.__version__, results=results)))


def measured(model, texts, held: int, measure: list[list[int]], depth: int, args) -> dict:
    with TIDE.TIDE(model) as engine:
        shards = [[laid_out(some, engine.adapter.device)] for some in (texts[:-held], texts[-held:])]
        split = Split(*map(Collection, shards))
        fitted, curve = fit_at(engine.adapter, split, depth, 128, 0)
        print(json.dumps(dict(depth=depth, **fitted.figures)), flush=True)
        by_share = {round(point.share, 1): point.threshold for point in curve}
        settings: dict[str, PromptExit | None] = {"full": None, "none settle": Chosen(fitted, 2.0, True)}
        for share, threshold in by_share.items():
            settings[f"map, {share:g}"] = Chosen(fitted, threshold, True)
            if share in (0.1, 0.3):
                settings[f"plain, {share:g}"] = Chosen(fitted, threshold, False)
        settings["map, random 0.3"] = Chosen(fitted, 2.0, True, 0.3)
        run(engine, measure[0], args.prompt, None)  # warms up
        sums = {name: dict(wall=[], cpu=[], share=[], loss=[], kl=[]) for name in settings}
        for number, ids in enumerate(measure):
            names, first = list(settings), number % len(settings)
            found = {name: run(engine, ids, args.prompt, settings[name]) for name in names[first:] + names[:first]}
            truth = torch.tensor(ids[args.prompt + 1 :])[:, None]
            full = found["full"]["logs"]
            for name, own in found.items():
                sums[name]["loss"].append(float(-own["logs"].gather(1, truth).mean()))
                sums[name]["kl"].append(float((full.exp() * (full - own["logs"])).sum(-1).mean()))
                for key in ("wall", "cpu", "share"):
                    sums[name][key].append(own[key])
    rows = []
    base = sums["full"]
    print(f"{'depth ' + str(depth):18}{'settled':>9}{'perplexity':>12}{'rise':>9}{'KL':>9}{'CPU s':>9}{'saved':>8}{'wall':>8}")
    for name, own in sums.items():
        mean = {key: statistics.fmean(values) for key, values in own.items()}
        rises = [a - b for a, b in zip(own["loss"], base["loss"], strict=True)]
        error = statistics.stdev(rises) / math.sqrt(len(rises)) if len(rises) > 1 else 0.0
        ratios = {key: statistics.median(a / b for a, b in zip(own[key], base[key], strict=True)) for key in ("cpu", "wall")}
        row = dict(
            name=name,
            settled=mean["share"],
            perplexity=math.exp(mean["loss"]),
            rise=math.expm1(statistics.fmean(rises)),
            rise_error=error,
            kl=mean["kl"],
            cpu_seconds=statistics.median(own["cpu"]),
            cpu_saved=1 - ratios["cpu"],
            wall_saved=1 - ratios["wall"],
        )
        rows.append(row)
        print(
            f"{name:18}{row['settled']:9.3f}{row['perplexity']:12.3f}{row['rise']:9.2%}{row['kl']:9.4f}{row['cpu_seconds']:9.2f}"
            f"{row['cpu_saved']:8.1%}{row['wall_saved']:8.1%}",
            flush=True,
        )
    return dict(depth=depth, fitted=fitted.figures, rows=rows)


if __name__ == "__main__":
    main()
