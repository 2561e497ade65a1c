"""In code that is written for Hugging Face: `model.generate` with TIDE's decoding, and a pipeline.

python examples/huggingface_pipeline.py [--model MODEL --router FILE]
"""

from __future__ import annotations

from argparse import ArgumentParser

import TIDE


def main() -> None:
    parser = ArgumentParser(description="model.generate and a transformers pipeline with TIDE's decoding.")
    parser.add_argument("--model", default="default", help="a hub id, a local path, or 'default'")
    parser.add_argument("--router", help="its router file; the shipped one for the default model, exits off for others")
    parser.add_argument("--prompt", default="What is a tide?")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    asked = parser.parse_args()

    model, tokenizer = TIDE.load_model(asked.model)
    router = asked.router or (TIDE.default_router() if asked.model == "default" else None)
    options = dict(max_new_tokens=asked.max_new_tokens, do_sample=False)
    with TIDE.TIDE(model, router) as engine:
        inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
        ids = model.generate(**inputs, **options, custom_generate=TIDE.custom_generate, tide=engine)
        print(tokenizer.decode(ids[0], skip_special_tokens=True))

        pipe = TIDE.pipeline(engine, tokenizer)
        chat = [{"role": "user", "content": asked.prompt}] if tokenizer.chat_template else asked.prompt
        print(pipe(chat, **options)[0]["generated_text"])
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
