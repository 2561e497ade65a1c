"""Another model: calibrate once, then use the router file it leaves.

    python examples/any_model.py --model MODEL [--router router.safetensors]

Calibration takes minutes on a GPU; here it is the quick kind.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path

import TIDE


def main() -> None:
    parser = ArgumentParser(description="Calibrate a model once, then generate with its router file.")
    parser.add_argument("--model", required=True, help="a hub id or a local path")
    parser.add_argument("--router", type=Path, default=Path("router.safetensors"), help="made if it is not there")
    parser.add_argument("--prompt", default="The first thing to know is")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    asked = parser.parse_args()

    model, tokenizer = TIDE.load_model(asked.model)
    if not asked.router.exists():
        TIDE.calibrate(model, tokenizer, save_path=asked.router, quick=True)
    inputs = tokenizer(asked.prompt, return_tensors="pt").to(model.device)
    with TIDE.TIDE(model, asked.router) as engine:
        ids = engine.generate(inputs, max_new_tokens=asked.max_new_tokens, do_sample=False)
        print(tokenizer.decode(ids[0], skip_special_tokens=True))
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
