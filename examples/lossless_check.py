"""Is mode exact really exact? Compare it with `model.generate`, token by token, on prompts of your own.

python examples/lossless_check.py "First prompt" "Second prompt" [--model MODEL --router FILE]
"""

from __future__ import annotations

from argparse import ArgumentParser

import torch

import TIDE


def main() -> None:
    parser = ArgumentParser(description="Compare mode exact with model.generate, token by token.")
    parser.add_argument("prompts", nargs="*", default=["List the first five prime numbers.", "Write one sentence about rain."])
    parser.add_argument("--model", default="default", help="a hub id, a local path, or 'default'")
    parser.add_argument("--router", help="its router file; the shipped one for the default model, exits off for others")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    asked = parser.parse_args()

    model, tokenizer = TIDE.load_model(asked.model)
    router = asked.router or (TIDE.default_router() if asked.model == "default" else None)
    options = dict(max_new_tokens=asked.max_new_tokens, do_sample=False)
    with TIDE.TIDE(model, router) as engine:
        for prompt in asked.prompts:
            inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
            same = torch.equal(engine.generate(inputs, **options), model.generate(**inputs, **options))
            stats = engine.last_stats
            print(f"{'same' if same else 'DIFFERENT'}  {stats.accepted} of {stats.drafted} drafts accepted  {prompt}")
            assert same, "in fp32 on one device this is a bug: please report it"


if __name__ == "__main__":
    main()
