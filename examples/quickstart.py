"""Three lines: load a model, make an engine, generate. The text is the full model's.

python examples/quickstart.py
"""

from __future__ import annotations

import TIDE


def main() -> None:
    model, tokenizer = TIDE.load_model("default")
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three things to see in Rome."}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    ).to(model.device)
    with TIDE.TIDE(model, TIDE.default_router()) as engine:
        ids = engine.generate(**inputs, max_new_tokens=48)
        print(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(engine.last_stats.summary())


if __name__ == "__main__":
    main()
