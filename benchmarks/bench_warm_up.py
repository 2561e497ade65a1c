"""What `engine.warm_up()` takes, and what it saves: seconds with an empty and with a filled cache of compiled kernels, then the
speed of prompts of new lengths the first time beside the second.

    python benchmarks/bench_warm_up.py                      the embedded default model, with its exits
    python benchmarks/bench_warm_up.py --model llama-8b     a random Llama of that size, for a GPU
    python benchmarks/bench_warm_up.py --model tiny --prompts 3

Two new processes share a fresh cache: the first finds it empty. Prints a line for each, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

SHORTEST = 17  # tokens of the first prompt
STEP = 13  # and how many more each other one has: no two are padded from the same length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="a shape of bench_decode, or what TIDE.load_model takes")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=992, help="of the longest text")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measured(args)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty", "filled"):
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--child"],
                env=dict(os.environ, TRITON_CACHE_DIR=folder),
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            found[name] = json.loads(done.stdout.splitlines()[-1])
            own = found[name]
            print(
                f"{name} cache: warm_up {own['warm_up']:.1f} s; {args.prompts} prompts of new lengths at {own['first']:.1f} "
                f"tok/s, again at {own['again']:.1f}, ratio {own['first'] / own['again']:.3f}"
            )
    del args.child
    print(json.dumps(dict(vars(args), **found)))


def measured(args: argparse.Namespace) -> dict[str, float | str]:
    """Return what a new process measures."""
    import torch

    import TIDE
    from bench_decode import SHAPES, on_gpu, random_model, timed
    from TIDE.engine.cache.prefix_tree import new_salt

    is_shape = args.model in SHAPES
    dtype = torch.bfloat16 if on_gpu() else torch.float32
    model = random_model(args.model) if is_shape else TIDE.load_model(args.model, dtype=dtype).model
    model.generation_config.eos_token_id = None
    router = TIDE.default_router() if args.model == "default" else None
    with TIDE.TIDE(model, router) as engine:
        began = time.perf_counter()
        engine.warm_up(rows=args.rows, tokens=args.tokens, progress=False)
        warm_up = time.perf_counter() - began
        generator = torch.Generator().manual_seed(0)
        lengths = [SHORTEST + STEP * number for number in range(args.prompts)]
        prompts = [torch.randint(10, model.config.vocab_size, (1, length), generator=generator) for length in lengths]

        def write(ids: torch.Tensor) -> torch.Tensor:
            options = dict(do_sample=False, pad_token_id=0, cache_salt=new_salt())
            return engine.generate(ids.to(model.device), max_new_tokens=args.new_tokens, **options)

        speeds = []
        for _ in range(2):
            seconds = sum(timed(lambda ids=ids: write(ids))[0] for ids in prompts)
            speeds.append(args.prompts * args.new_tokens / seconds)
        device = torch.cuda.get_device_name() if on_gpu() else "cpu"
        return dict(warm_up=warm_up, first=speeds[0], again=speeds[1], capture=engine.capture_seconds, device=device)


if __name__ == "__main__":
    main()
