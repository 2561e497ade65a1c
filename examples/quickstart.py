"""Three lines: load a model, make an engine, generate. The text is the full model's.

python examples/quickstart.py
python examples/quickstart.py --model MODEL --router FILE --prompt "Name three things to see in Rome."
"""

from __future__ import annotations

from argparse import ArgumentParser

import TIDE


def main() -> None:
    parser = ArgumentParser(description="Load a model, make an engine, generate.")
    parser.add_argument("--model", default="default", help="a hub id, a local path, or 'default'")
    parser.add_argument("--router", help="its router file; the shipped one for the default model, exits off for others")
    parser.add_argument("--prompt", default="Name three things to see in Rome.")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    asked = parser.parse_args()

    model, tokenizer = TIDE.load_model(asked.model)
    router = asked.router or (TIDE.default_router() if asked.model == "default" else None)
    if tokenizer.chat_template is None:
        inputs = tokenizer(asked.prompt, return_tensors="pt").to(model.device)
    else:
        told = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
        inputs = tokenizer.apply_chat_template([{"role": "user", "content": asked.prompt}], **told).to(model.device)
    with TIDE.TIDE(model, router) as engine:
        ids = engine.generate(inputs, max_new_tokens=asked.max_new_tokens, do_sample=False)
        print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
