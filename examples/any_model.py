"""Another model: calibrate once, then use the router file it leaves.

    python examples/any_model.py MODEL [router.safetensors]

MODEL is a hub id or a local path. Calibration takes minutes on a GPU; here it is the quick kind.
"""

from __future__ import annotations

import sys
from pathlib import Path

import TIDE


def main() -> None:
    name, router = sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "router.safetensors")
    model, tokenizer = TIDE.load_model(name)
    if not router.exists():
        TIDE.calibrate(model, tokenizer, save_path=router, quick=True)
    inputs = tokenizer("The first thing to know is", return_tensors="pt").to(model.device)
    with TIDE.TIDE(model, router) as engine:
        ids = engine.generate(**inputs, max_new_tokens=32, do_sample=False)
        print(tokenizer.decode(ids[0], skip_special_tokens=True))
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
