"""Time to the first token, by the length of the prompt: `model.generate` and TIDE, interleaved in one run.

    python benchmarks/bench_prefill.py                        the embedded default model
    python benchmarks/bench_prefill.py --model llama-8b       a random Llama of that size in bf16, for a GPU
    python benchmarks/bench_prefill.py --model tiny --tokens 40 --tokens 90

A request takes its prompt through all layers and chooses one token. Medians over the rounds, after two that compile, capture
and warm up. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics

import torch
import transformers

import TIDE
from bench_decode import SHAPES, measure, random_model
from TIDE.engine.cache.prefixes import new_salt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="'tiny', 'llama-8b', or what TIDE.load_model takes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--tokens", type=int, action="append", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    dtype = args.dtype and getattr(torch, args.dtype)
    model = random_model(args.model) if args.model in SHAPES else TIDE.load_model(args.model, dtype=dtype).model
    print(f"{'prompt':>8}{'model.generate':>16}{'TIDE':>10}{'ratio':>8}   ms to the first token")
    rows = []
    with TIDE.TIDE(model) as engine:
        engine.generate(torch.full((1, 8), 11, device=model.device), max_new_tokens=4, do_sample=False)  # on a GPU: checks
        for tokens in args.tokens or (32, 128, 512, 1024):
            ids = torch.randint(10, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))
            ids = ids.to(model.device)
            runs = {
                "model.generate": lambda new, ids=ids: model.generate(ids, max_new_tokens=new, do_sample=False),
                "TIDE": lambda new, ids=ids: engine.generate(ids, max_new_tokens=new, do_sample=False, cache_salt=new_salt()),
            }
            measure(runs, 2, 1)
            seconds, _ = measure(runs, args.rounds, 1)
            plain, own = (1000 * statistics.median(seconds[name]) for name in runs)
            rows.append(dict(tokens=tokens, generate_ms=plain, tide_ms=own, ratio=plain / own))
            print(f"{tokens:8}{plain:16.1f}{own:10.1f}{plain / own:8.2f}")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    print(json.dumps(dict(vars(args), device=where, dtype=str(model.dtype), torch=torch.__version__, results=rows)))


if __name__ == "__main__":
    main()
