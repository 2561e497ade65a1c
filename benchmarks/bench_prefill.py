"""Time to the first token, by the length of the prompt: `model.generate` and TIDE, interleaved in one run.

    python benchmarks/bench_prefill.py                        the embedded default model
    python benchmarks/bench_prefill.py --model llama-8b       a random Llama of that size in bf16, for a GPU
    python benchmarks/bench_prefill.py --model tiny --tokens 40 --tokens 90
    python benchmarks/bench_prefill.py --model llama-8b --tokens 2048 --settle 0.3 --rounds 20

A request takes its prompt through all layers and chooses one token. Medians over the rounds, after two that compile, capture
and warm up. With --settle all of TIDE is in mode fast, and runs with exits in the prompt at half depth too, with maps and a
router of the usual sizes and random weights: once with none settling, once with this share of the tokens by force. Prints a
table, then one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import transformers

import TIDE
from bench_decode import SHAPES, random_model, timed
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.prompt_exits.maps import SIGNALS, FittedPromptExit, StateMap
from TIDE.routing.router import Router

RANK, BOTTLENECK = 64, 128  # of maps and routers, as calibration makes them


class Forced(FittedPromptExit):
    """Scores tokens as ever, and stops a share of them whatever the scores: every n-th, spread evenly."""

    share = 0.0

    def stops(self, states, positions):
        chosen = (positions * self.share).int() > ((positions - 1) * self.share).int()
        return chosen & (self.scores(states) >= 0)


class Settles(TIDE.ExitPolicy):
    """No exits but in the prompt."""

    def __init__(self, model: torch.nn.Module) -> None:
        config = model.config
        hidden, layers = config.hidden_size, config.num_hidden_layers

        def noise(*shape: int) -> torch.Tensor:
            return 0.01 * torch.randn(shape, generator=torch.Generator().manual_seed(0)) / hidden**0.5

        maps = {
            depth: StateMap(noise(RANK, hidden), noise(hidden, RANK), noise(hidden)).to(model.device, model.dtype)
            for depth in range(layers // 2 + 1, layers + 1)
        }
        router = Router(hidden, BOTTLENECK, SIGNALS).to(model.device).requires_grad_(False)
        self.prompt_exit = Forced(layers // 2, router, maps, 0.5)

    def score(self, candidates):
        raise AssertionError("there is no checkpoint")


Run = tuple[AbstractContextManager[object], Callable[[], torch.Tensor]]


def asked(ids: torch.Tensor) -> dict[str, object]:
    """Return the options of a request, as tokenizers and users give them."""
    return dict(attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False)


def full(engine: TIDE.TIDE, ids: torch.Tensor, mode: str) -> Run:
    """Choose a token without exits, and without finding the prompt in the cache; in settings that are made before."""
    run = functools.partial(engine.generate, ids, **asked(ids))
    return engine.using(TIDE.TIDEConfig(mode=mode)), lambda: run(cache_salt=new_salt())


def settled(engine: TIDE.TIDE, ids: torch.Tensor, share: float) -> Run:
    """Choose a token with exits in the prompt."""

    def run() -> torch.Tensor:
        engine.policy.prompt_exit.share = share
        found = engine.generate(ids, **asked(ids))
        expected = int((ids.shape[1] - 2) * share)
        assert abs(engine.last_stats.settled_tokens - expected) <= 1, (engine.last_stats.settled_tokens, expected)
        return found

    return engine.using(TIDE.TIDEConfig(mode="fast", prefill_exits=True)), run


def measure(runs: dict[str, Callable[[], Run]], rounds: int) -> dict[str, float]:
    """Milliseconds of every run, the order turned round each time: medians."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in sorted(runs, reverse=bool(number % 2)):
            settings, run = runs[name]()
            with settings:
                seconds[name].append(timed(run)[0])
    return {name: 1000 * statistics.median(own) for name, own in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="'tiny', 'llama-8b', or what TIDE.load_model takes")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--tokens", type=int, action="append", default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--settle", type=float, default=None, metavar="SHARE", help="of prompt tokens, at half depth, by force")
    args = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    dtype = args.dtype and getattr(torch, args.dtype)
    model = random_model(args.model) if args.model in SHAPES else TIDE.load_model(args.model, dtype=dtype).model
    extra = "" if args.settle is None else f"{'none settle':>14}{f'{args.settle:g} settle':>14}"
    print(f"{'prompt':>8}{'model.generate':>16}{'TIDE':>10}{'ratio':>8}{extra}   ms to the first token")
    rows = []
    with TIDE.TIDE(model, None if args.settle is None else Settles(model)) as engine:
        engine.generate(torch.full((1, 8), 11, device=model.device), max_new_tokens=4, do_sample=False)  # on a GPU: checks
        for tokens in args.tokens or (32, 128, 512, 1024):
            ids = torch.randint(10, model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(tokens))
            ids = ids.to(model.device)
            plainly = functools.partial(model.generate, ids, **asked(ids))
            mode = "exact" if args.settle is None else "fast"
            runs: dict[str, Callable[[], Run]] = {
                "model.generate": lambda run=plainly: (nullcontext(), run),
                "TIDE": functools.partial(full, engine, ids, mode),
            }
            if args.settle is not None:
                runs["none settle"] = functools.partial(settled, engine, ids, 0.0)
                runs["settle"] = functools.partial(settled, engine, ids, args.settle)
            measure(runs, 2)
            plain, own, *others = measure(runs, args.rounds).values()
            rows.append(dict(tokens=tokens, generate_ms=plain, tide_ms=own, ratio=plain / own))
            shown = ""
            if others:
                rows[-1] |= dict(none_settle_ms=others[0], settle_ms=others[1])
                rows[-1] |= dict(none_settle_more=others[0] / own - 1, settle_less=1 - others[1] / own)
                shown = "".join(f"{took:8.1f}{took / own - 1:+6.1%}" for took in others)
            print(f"{tokens:8}{plain:16.1f}{own:10.1f}{plain / own:8.2f}{shown}")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {torch.get_num_threads()} threads"
    print(json.dumps(dict(vars(args), device=where, dtype=str(model.dtype), torch=torch.__version__, results=rows)))


if __name__ == "__main__":
    main()
