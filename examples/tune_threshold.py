"""Which exit threshold? Measure a few on your own prompts: speed by the clock, and how much of the text stays the full model's.

    python examples/tune_threshold.py

`tide tune default --prompts FILE.jsonl` does the same from the command line; `TIDE.certify` then finds a threshold that keeps a
promise about the text.
"""

from __future__ import annotations

import TIDE

PROMPTS = ["Name three uses of copper.", "Write a short note to a neighbour about a lost cat."]


def main() -> None:
    model, tokenizer = TIDE.load_model("default")
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        found = TIDE.tune(
            engine, PROMPTS, tokenizer=tokenizer, new_tokens=16, thresholds=(0.9,), strategies=("exact", "propagate")
        )
    print(found.table())


if __name__ == "__main__":
    main()
