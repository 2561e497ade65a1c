"""Placement and number of exits: what calibration expects of every place it tries, by kind of exit.

Calibration times layers, heads and passes on the machine it runs on, and computes tokens per second for every exit point alone
and for several together. These are expectations; `benchmarks/curve.py` measures files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kept import Kept, Record

STRATEGIES = ("identity", "lens", "memory")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", choices=STRATEGIES, nargs="+", default=list(STRATEGIES))
    parser.add_argument("--interval", type=int, default=4, help="layers between candidates")
    parser.add_argument("--minutes", type=float, default=3.0, help="of calibration")
    parser.add_argument("--quick", action="store_true", help="few, short texts")


def run(options: argparse.Namespace) -> Record:
    settings = dict(interval=options.interval, minutes=options.minutes, quick=options.quick, model=options.model)
    kept = Kept(options.work / "placement.jsonl", settings)
    for strategy in options.strategy:
        kept.once(strategy, lambda strategy=strategy: _calibrated(options, strategy))
    table = {}
    for strategy in options.strategy:
        for row in kept.records[strategy]["placement"]:
            points = ", ".join(map(str, row["checkpoints"])) or "none"
            table[f"{strategy}, exits at {points}"] = {
                key: value for key, value in row.items() if isinstance(value, int | float)
            }
    return {
        "what": "Expected tokens per second by kind, place and number of exits",
        "settings": f"calibration of {options.minutes:g} minutes{', quick' if options.quick else ''}, candidates every "
        f"{options.interval} layers",
        "table": table,
        "figures": {f"{name}_seconds": round(kept.records[name]["seconds"], 1) for name in options.strategy},
    }


def _calibrated(options: argparse.Namespace, strategy: str) -> Record:
    import time

    import TIDE

    model, tokenizer = TIDE.load_model(options.model)
    config = TIDE.TIDEConfig(exit_strategy=strategy, checkpoint_interval=options.interval, calibration_minutes=options.minutes)
    began = time.perf_counter()
    path = Path(options.work, f"placement-{strategy}.safetensors")
    file = TIDE.calibrate(model, tokenizer, path, config, quick=options.quick, resume=True)
    return {"placement": file.figures["placement"], "seconds": time.perf_counter() - began}
