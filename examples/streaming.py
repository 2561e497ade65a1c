"""Tokens as they become final, and what each was decided after.

python examples/streaming.py
"""

from __future__ import annotations

from transformers import TextStreamer

import TIDE


def main() -> None:
    model, tokenizer = TIDE.load_model("default")
    inputs = tokenizer("Once upon a time", return_tensors="pt").to(model.device)
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        for number, token in enumerate(engine.stream(**inputs, max_new_tokens=24, do_sample=False)):
            depth = engine.last_decided[0][number].depth
            print(f"{depth:3} layers  {tokenizer.decode(token)!r}")
        engine.generate(**inputs, max_new_tokens=24, do_sample=False, streamer=TextStreamer(tokenizer))
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
