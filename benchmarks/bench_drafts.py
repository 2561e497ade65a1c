"""What a draft costs: rounds of k drafts before the first layer beside a step, on random weights of a shape.

    python benchmarks/bench_drafts.py --model llama-8b qwen2-0.5b      for a GPU
    python benchmarks/bench_drafts.py --model tiny --drafts 1 2        a smoke test

Mode exact, and every round has all its drafts; random weights accept none. A draft's cost is (round - step) / k, as a share of
a step: what it adds to the deep pass is in it. Both are decoding, without the prompt. With --vocabulary drafts are chosen from
so many tokens as well. On a GPU the microseconds of kernels are added up by name too. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from typing import Any

import torch

import TIDE
from bench_decode import SHAPES, copy_bandwidth, on_gpu, random_model, timed, untrained
from bench_trees import Fixed
from TIDE.config import TIDEConfig
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.routing.calibrated import CalibratedPolicy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["llama-8b"], choices=[*SHAPES])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 2, 4, 7])
    parser.add_argument("--vocabulary", type=int, nargs="*", default=[], help="of drafts, beside the whole one")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found = {}
    for name in options.model:
        found[name] = of_shape(name, options)
        torch.cuda.empty_cache()
    print(json.dumps(dict(vars(options), device=torch.cuda.get_device_name() if on_gpu() else "cpu", results=found)))


def of_shape(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of steps and rounds of a shape, and what a draft costs."""
    model = random_model(name)
    model.generation_config.eos_token_id = None
    ids = torch.randint(10, model.config.vocab_size, (1, options.prompt_tokens), device=model.device)
    step, parts = round_ms(model, ids, None, 0, options)
    found: dict[str, Any] = dict(step_ms=step, step_parts_us=parts)
    print(f"{name}: a step takes {step:.3f} ms")
    for size in (None, *options.vocabulary):
        policy = untrained(model, "memory", 0, None if size is None else torch.arange(size))
        assert isinstance(policy, CalibratedPolicy)
        head = policy.exits[0].head
        rows = size or model.config.vocab_size
        bytes_ = sum(own.numel() for own in head.parameters()) + rows * model.config.hidden_size
        costs: dict[str, Any] = {}
        if on_gpu():
            costs["bytes"] = 1e3 * bytes_ * model.dtype.itemsize / copy_bandwidth() / step
        for drafts in options.drafts:
            whole, parts = round_ms(model, ids, policy, drafts, options)
            costs[str(drafts)] = dict(round_ms=whole, of_a_step=(whole - step) / drafts / step, parts_us=parts)
        found[f"{rows} tokens"] = costs
        shares = ", ".join(f"{drafts}: {costs[str(drafts)]['of_a_step']:.3f}" for drafts in options.drafts)
        print(f"  a draft out of {rows:,} tokens, of a step, by drafts of a round: {shares}", flush=True)
    return found


def round_ms(
    model: Any, ids: torch.Tensor, policy: Any, drafts: int, options: argparse.Namespace
) -> tuple[float, dict[str, float]]:
    """Return the milliseconds of a round with so many drafts, and the microseconds of its kernels by name."""
    with TIDE.TIDE(model, policy, TIDEConfig(draft_tree=0, max_pending=max(1, drafts))) as engine:
        engine.scheduler = Fixed(drafts)

        def run(new: int) -> torch.Tensor:
            answer: torch.Tensor = engine.generate(ids, max_new_tokens=new, do_sample=False, cache_salt=new_salt())
            return answer

        for _ in range(3):
            run(options.new_tokens)
            run(1)
        seconds = {
            new: statistics.median(timed(lambda new=new: run(new))[0] for _ in range(options.rounds))
            for new in (1, options.new_tokens)  # the counts of the longer one are read below
        }
        rounds = engine.last_stats.remaining_tokens - 1
        parts = Counter[str]()
        if on_gpu():
            for new, sign in ((options.new_tokens, 1), (1, -1)):
                for name, own in kernels(run, new).items():
                    parts[name] += sign * own
    return 1e3 * (seconds[options.new_tokens] - seconds[1]) / rounds, {
        name: round(own / rounds, 2) for name, own in parts.most_common() if own / rounds > 0.05
    }


def kernels(run: Any, new: int) -> Counter[str]:
    """Return the microseconds that kernels take, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(new)
        torch.cuda.synchronize()
    found = Counter[str]()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found[event.name.split("(")[0][:60]] += event.time_range.elapsed_us()
    return found


if __name__ == "__main__":
    main()
