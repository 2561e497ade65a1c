"""Which exit threshold? Measure a few on your own prompts: speed by the clock, and how much of the text stays the full model's.

    python examples/tune_threshold.py --model MODEL [--router FILE] [--threshold 0.9 --threshold 0.7] ["A prompt" ...]

`tide tune MODEL --prompts FILE.jsonl` does the same from the command line; `TIDE.certify` then finds a threshold that keeps a
promise about the text.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import TIDE

PROMPTS = ["Name three uses of copper.", "Write a short note to a neighbour about a lost cat."]


def main() -> None:
    parser = ArgumentParser(description="Measure speed and agreement at several exit thresholds.")
    parser.add_argument("prompts", nargs="*", default=PROMPTS)
    parser.add_argument("--model", default="default", help="a hub id, a local path, or 'default'")
    parser.add_argument("--router", help="its router file; unless given, router.safetensors, made by a quick calibration")
    parser.add_argument("--threshold", type=float, action="append", help="one to try; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    asked = parser.parse_args()

    model, tokenizer = TIDE.load_model(asked.model)
    router = Path(asked.router or (TIDE.default_router() if asked.model == "default" else "router.safetensors"))
    if not router.exists():
        TIDE.calibrate(model, tokenizer, save_path=router, quick=True)
    with TIDE.TIDE(model, router) as engine:
        options = dict(max_new_tokens=asked.max_new_tokens, thresholds=asked.threshold or (0.95, 0.85, 0.7, 0.5))
        print(TIDE.tune(engine, asked.prompts, tokenizer=tokenizer, **options).table())


if __name__ == "__main__":
    main()
