"""Decoding speed at batch 1: `model.generate` and TIDE, by turns in one run.

    python benchmarks/bench_decode.py                     the embedded default model
    python benchmarks/bench_decode.py --model llama-8b    a random Llama of that size in bf16, for a GPU
    python benchmarks/bench_decode.py --model tiny        a random tiny Llama, as a smoke test

Prints a table, then one JSON line. Speeds are medians over the rounds; the ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
import transformers

import TIDE

SHAPES = {
    "tiny": dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4),
    "llama-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="'tiny', 'llama-8b', or what TIDE.load_model takes")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    model = random_llama(SHAPES[args.model]) if args.model in SHAPES else TIDE.load_model(args.model).model
    torch.manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (1, args.prompt_tokens), device=model.device)
    options = dict(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, do_sample=False)
    with TIDE.TIDE(model) as engine:
        runs = {
            "model.generate": lambda: model.generate(ids, **options),
            "TIDE, exits off": lambda: engine.generate(ids, **options),
        }
        measure(runs, rounds=1)  # warm-up
        seconds, texts = measure(runs, args.rounds)
    report(args, model, seconds, same_text=len(texts) == 1)


def random_llama(shape: dict) -> transformers.PreTrainedModel:
    """A Llama with random weights, made where it will run."""
    torch.manual_seed(0)
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16 if place.type == "cuda" else torch.float32)
    with place:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, bos_token_id=1, eos_token_id=2, pad_token_id=0))
    torch.set_default_dtype(torch.float32)
    return model.eval()


def measure(runs: dict, rounds: int) -> tuple[dict[str, list[float]], set[tuple[int, ...]]]:
    """Seconds of every run, the order turned round each time, and the texts that came out."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    texts = set()
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            start = time.perf_counter()
            ids = runs[name]()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
            texts.add(tuple(ids[0].tolist()))
    return seconds, texts


def report(
    args: argparse.Namespace, model: transformers.PreTrainedModel, seconds: dict[str, list[float]], same_text: bool
) -> None:
    plain = seconds["model.generate"]
    print(f"{'':18}{'tok/s':>8}{'lowest':>9}{'highest':>9}{'ratio':>8}")
    rows = {}
    for name, own in seconds.items():
        speeds = [args.new_tokens / second for second in own]
        ratio = statistics.median(base / second for base, second in zip(plain, own, strict=True))
        rows[name] = dict(tok_s=statistics.median(speeds), lowest=min(speeds), highest=max(speeds), ratio=ratio)
        print(f"{name:18}{rows[name]['tok_s']:8.1f}{min(speeds):9.1f}{max(speeds):9.1f}{ratio:8.3f}")
    print(f"same text: {'yes' if same_text else 'NO'}")
    where = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    facts = dict(
        vars(args), device=where, dtype=str(model.dtype), torch=torch.__version__, transformers=transformers.__version__
    )
    print(json.dumps(dict(facts, same_text=same_text, results=rows)))


if __name__ == "__main__":
    main()
