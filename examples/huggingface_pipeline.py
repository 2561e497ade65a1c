"""In code that is written for Hugging Face: `model.generate` with TIDE's decoding, and a pipeline.

python examples/huggingface_pipeline.py
"""

from __future__ import annotations

import TIDE


def main() -> None:
    model, tokenizer = TIDE.load_model("default")
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
        ids = model.generate(**inputs, max_new_tokens=16, custom_generate=TIDE.custom_generate, tide=engine)
        print(tokenizer.decode(ids[0], skip_special_tokens=True))

        pipe = TIDE.pipeline(engine, tokenizer)
        found = pipe([{"role": "user", "content": "What is a tide?"}], max_new_tokens=32, do_sample=False)
        print(found[0]["generated_text"][-1]["content"])
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
