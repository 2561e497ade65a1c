"""Is mode exact really exact? Compare it with `model.generate`, token by token, on prompts of your own.

python examples/lossless_check.py "First prompt" "Second prompt"
"""

from __future__ import annotations

import sys

import torch

import TIDE

PROMPTS = ["List the first five prime numbers.", "Write one sentence about rain."]


def main() -> None:
    model, tokenizer = TIDE.load_model("default")
    options = dict(max_new_tokens=32, do_sample=False)
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        for prompt in sys.argv[1:] or PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            same = torch.equal(engine.generate(**inputs, **options), model.generate(**inputs, **options))
            stats = engine.last_stats
            print(f"{'same' if same else 'DIFFERENT'}  {stats.accepted} of {stats.drafted} drafts stood  {prompt}")
            assert same, "in fp32 on one device this is a bug: please report it"


if __name__ == "__main__":
    main()
