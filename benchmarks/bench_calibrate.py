"""Time and memory of a whole calibration of a model with random weights: how it scales, not how good the exits are.

    python benchmarks/bench_calibrate.py --model llama-8b                   for a GPU
    python benchmarks/bench_calibrate.py --model tiny --minutes 0.05        a smoke test
    python benchmarks/bench_calibrate.py --model default --minutes 10       the embedded model, with its weights

Random models write with the embedded model's tokenizer. Prints one JSON line; what the stages took is in the progress bars.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch

import TIDE
from bench_decode import SHAPES, random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", choices=[*SHAPES, "default"])
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    model, tokenizer = TIDE.load_model("default", dtype=torch.bfloat16 if cuda else None)
    if args.model != "default":
        model = random_model(args.model, vocab_size=max(SHAPES[args.model]["vocab_size"], len(tokenizer)))
    before, start = host_gib(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "router.safetensors")
        config = TIDE.TIDEConfig(calibration_minutes=args.minutes)
        file = TIDE.calibrate(model, tokenizer, path, config, quick=args.quick)
        seconds = time.perf_counter() - start
        size = path.stat().st_size
    found = {
        "model": args.model,
        "minutes": args.minutes,
        "texts": file.facts["texts"],
        "seconds": round(seconds, 1),
        "host_gib_before": round(before, 2),
        "host_gib_peak": round(host_gib(), 2),
        "device_gib_peak": round(torch.cuda.max_memory_reserved() / 2**30, 1) if cuda else None,
        "file_mb": round(size / 1e6, 1),
        "agreement": {depth: at.figures.get("agreement_by_step") for depth, at in file.exits.items()},
    }
    print(json.dumps(found))


def host_gib() -> float:
    """The most memory this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()
