"""Speed beside other work: model.generate, exits off and exact while busy loops run on the same cores.

    python benchmarks/bench_busy.py [--loops 0 1 2] [--rounds 5] [--new-tokens 48] [-o FILE]

model.generate has a process of its own, with torch's usual threads, and so has TIDE. They take turns: one generates while the
other waits for its line. Ratios are made within a round, and the medians of rounds are reported. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

PROMPT = "Give me three short reasons to learn to cook."
CONTENDERS = {"generate": ("generate",), "tide": ("off", "exact")}  # by process


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loops", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--output", "-o", type=Path)
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        serve(options)
        return
    processes = {name: start(name, options) for name in CONTENDERS}
    found = {loops: measured(processes, loops, options.rounds) for loops in options.loops}
    for process in processes.values():
        process.stdin.close()
        process.wait()
    report(found, options)


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, "--child", name, "--prompt", options.prompt, "--new-tokens", str(options.new_tokens)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def serve(options: argparse.Namespace) -> None:
    """Generate once for every line on standard input, and answer with tokens per second."""
    import torch

    import TIDE
    from TIDE.engine.cache.prefix_tree import new_salt
    from TIDE.run import prepared

    model, tokenizer = TIDE.load_model("default")
    ids = prepared(tokenizer, options.prompt)["input_ids"]
    request = dict(max_new_tokens=options.new_tokens, min_new_tokens=options.new_tokens, do_sample=False)
    with TIDE.TIDE(model, TIDE.default_router()) as engine:

        def run(name: str) -> torch.Tensor:
            if name == "generate":
                return model.generate(ids, attention_mask=torch.ones_like(ids), **request)
            with engine.using(engine.config, exits=name == "exact"):
                return engine.generate(ids, cache_salt=new_salt(), **request)

        for name in CONTENDERS[options.child]:
            for _ in range(2):
                run(name)
        print("ready", flush=True)
        for line in sys.stdin:
            began = time.perf_counter()
            text = run(line.strip())
            print((text.shape[1] - ids.shape[1]) / (time.perf_counter() - began), flush=True)


@contextmanager
def busy(loops: int):
    """Keep `loops` other processes busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    time.sleep(0.5)
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(processes: dict[str, subprocess.Popen[str]], loops: int, rounds: int) -> dict[str, list[float]]:
    """Return tokens per second of each contender, a figure a round."""
    jobs = [(name, contender) for name, contenders in CONTENDERS.items() for contender in contenders]
    speeds: dict[str, list[float]] = {contender: [] for _, contender in jobs}
    with busy(loops):
        for number in range(rounds):
            for name, contender in jobs[number % len(jobs) :] + jobs[: number % len(jobs)]:
                process = processes[name]
                process.stdin.write(f"{contender}\n")
                process.stdin.flush()
                speeds[contender].append(float(process.stdout.readline()))
                print(f"{loops} loops, round {number}: {contender} {speeds[contender][-1]:.1f} tok/s", file=sys.stderr)
    return speeds


def report(found: dict[int, dict[str, list[float]]], options: argparse.Namespace) -> None:
    print(f"{os.cpu_count()} cores, {platform.machine()}, {options.new_tokens} new tokens, medians of {options.rounds} rounds")
    print("loops  model.generate  exits off            exact                exact / quiet exact")
    rows = []
    for loops, speeds in found.items():
        row: dict[str, float] = {"loops": loops}
        for name, values in speeds.items():
            row[name] = statistics.median(values)
            row[f"{name}_low"], row[f"{name}_high"] = min(values), max(values)
            ratios = [value / own for value, own in zip(values, speeds["generate"], strict=True)]
            row[f"{name}_over_generate"] = statistics.median(ratios)
        rows.append(row)
        kept = row["exact"] / rows[0]["exact"]
        print(
            f"{loops:5}  {row['generate']:14.1f}  {row['off']:6.1f} ({row['off_over_generate']:5.2f}x)      "
            f"{row['exact']:6.1f} ({row['exact_over_generate']:5.2f}x)      {kept:.2f}"
        )
    done = {"machine": platform.machine(), "cores": os.cpu_count(), "new_tokens": options.new_tokens, "rows": rows}
    print(json.dumps(done))
    if options.output is not None:
        options.output.write_text(json.dumps({**done, "speeds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
