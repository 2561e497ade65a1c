"""Tokens as they become final, and the depth at which each was decided.

python examples/streaming.py [--model MODEL --router FILE --prompt "Once upon a time"]
"""

from __future__ import annotations

from argparse import ArgumentParser

from transformers import TextStreamer

import TIDE


def main() -> None:
    parser = ArgumentParser(description="Print tokens as they become final, with the depth at which each was decided.")
    parser.add_argument("--model", default="default", help="a hub id, a local path, or 'default'")
    parser.add_argument("--router", help="its router file; the shipped one for the default model, exits off for others")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    asked = parser.parse_args()

    model, tokenizer = TIDE.load_model(asked.model)
    router = asked.router or (TIDE.default_router() if asked.model == "default" else None)
    inputs = tokenizer(asked.prompt, return_tensors="pt").to(model.device)
    options = dict(max_new_tokens=asked.max_new_tokens, do_sample=False)
    with TIDE.TIDE(model, router) as engine:
        for number, token in enumerate(engine.stream(inputs, **options)):
            depth = engine.last_rows[0].decided[number].depth
            print(f"{depth:3} layers  {tokenizer.decode(token)!r}")
        engine.generate(inputs, **options, streamer=TextStreamer(tokenizer))
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
