"""The cost–performance curve: quality against seconds, layers and joules per token, for every way to save work.

    python benchmarks/curve.py --data DIR [--prompts 16] [--router lens=lens.safetensors] [--router identity=FILE]

    exits off, exact         the full model's text
    fast, NAME               exits of a router file by threshold; K/V of skipped layers caught up later
    fast, memory, STRATEGY   the same with K/V propagated from the exit's state, or zeros
    prefill exits, NAME      exits in the prompt only, by the share that settled in calibration; of router files that have them
    static                   layers left out for all tokens, evenly, from 1 in 8 to half of them

Quality is ROUGE-L to the full model's text. All ways are interleaved on every prompt. Layers are those of new tokens, as the
engine counts them (`tide bench` compares that with hooks). One figure, one table, one file of results; answers are kept one by
one, so a run that was broken off goes on. A way that cannot run is named, and the others go on.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from kept import Kept, Record, identity, results_file
from studies.sources import asked_ids

THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.6, 0.4)
DROPPED = (1 / 8, 1 / 4, 3 / 8, 1 / 2)  # of the layers
ENDS = 1  # layers at either end that stay


@dataclass(frozen=True)
class Way:
    """A way to save work: an engine and its settings."""

    series: str
    label: str
    engine: Any
    config: Any
    router: str | None = None  # identity of the file whose exits it uses; None: exits off
    settles: float | None = None  # score at which tokens of prompts settle

    @property
    def name(self) -> str:
        return f"{self.series}, {self.label}" if self.label else self.series

    def key(self, number: int) -> str:
        """Return the key of the answer to a prompt: of these exits, whatever they are called."""
        return f"{self.name}: {number}" if self.router is None else f"{self.name}, {self.router}: {number}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of data sets, as tide eval reads it")
    parser.add_argument("--model", default="default")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--router", action="append", default=[], metavar="NAME=FILE", help="further exits; may be repeated")
    parser.add_argument("--memory", default=None, help="router file of the memory exits; None: the shipped one")
    parser.add_argument("--threshold", type=float, nargs="+", default=list(THRESHOLDS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--longest", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--work", type=Path, default=Path("studies"), metavar="DIR", help="where answers are kept")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), metavar="DIR")
    parser.add_argument("--figure", type=Path, default=Path("curve.png"))
    options = parser.parse_args()

    import torch
    import transformers

    import TIDE
    from TIDE.bench.energy import EnergyMeter
    from TIDE.plots.curve import plot_curve
    from TIDE.plots.figure import check_figure

    options.figure.parent.mkdir(parents=True, exist_ok=True)
    check_figure(options.figure)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = TIDE.load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype))
    absent: dict[str, str] = {}
    ways = made(model, options, absent)
    settings = dict(model=options.model, dtype=str(model.dtype), new_tokens=options.new_tokens, longest=options.longest)
    asked = asked_ids(tokenizer, options)
    kept = Kept(options.work / "curve.jsonl", settings | {"prompts": options.prompts, "asked": identity(asked)})
    meter = EnergyMeter(model.device)
    measure(ways, asked, options.new_tokens, meter, kept, absent)
    points = [point(way, kept, len(asked)) for way in ways if way.name not in absent]
    report(points, absent)
    plot_curve(points, options.figure, f"{options.model}: {len(asked)} prompts, {options.new_tokens} new tokens")
    columns = ("quality", "agreement", "seconds", "CPU seconds", "layers", "joules", "exits", "settled")
    table = {own["name"]: {name: own[name] for name in columns if own.get(name) is not None} for own in points}
    note = {"note": "not measured: " + "; ".join(f"{name}: {why}" for name, why in absent.items())} if absent else {}
    results_file(
        options.out / "curve.json",
        {
            "what": "The cost-performance curve: ROUGE-L to the full model's text, and what a token costs",
            "settings": f"{len(asked)} Spec-Bench prompts of up to {options.longest} tokens, {options.new_tokens} new tokens, "
            f"batch 1, greedy, interleaved; seconds with the prompt, layers without it",
            "table": table,
            **note,
        },
    )
    print(f"written: {options.out / 'curve.json'}, {options.figure}")


def made(model: Any, options: argparse.Namespace, absent: dict[str, str]) -> list[Way]:
    """Return all ways; those that cannot be made go to `absent`."""
    import TIDE

    exact = TIDE.TIDEConfig(mode="exact")
    router = options.memory or (TIDE.default_router() if options.model == "default" else None)
    full = TIDE.TIDE(model, router)
    found = [Way("exits off", "", full, exact)]
    if router is None:
        absent["fast, memory"] = "expected exits: give --memory FILE"
    else:
        own = identity(Path(router))
        found += [Way("exact", "", full, exact, own), *exiting("memory", full, own, options.threshold)]
        for strategy in ("propagate", "zero_pad"):
            found += fast(f"memory, {strategy}", full, own, options.threshold, strategy)
    for given in options.router:
        name, _, path = given.partition("=")
        found += attempt(absent, f"fast, {name}", partial(of_file, model, name, Path(path), options.threshold))
    for share in DROPPED:
        found += attempt(absent, f"static, {share:.0%}", lambda share=share: [dropped(model, share)])
    return found


def attempt(absent: dict[str, str], name: str, make: Callable[[], list[Way]]) -> list[Way]:
    try:
        return make()
    except Exception as problem:  # a file of another model, a family with its layers elsewhere, memory: the others go on
        absent[name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"
        return []


def of_file(model: Any, name: str, path: Path, thresholds: list[float]) -> list[Way]:
    import TIDE

    return exiting(name, TIDE.TIDE(shared(model), path), identity(path), thresholds)


def exiting(name: str, engine: Any, router: str, thresholds: list[float]) -> list[Way]:
    """Return the ways of a router file: exits of new tokens, and exits in the prompt where it has them."""
    exit_ = engine.file.prompt_exit
    if exit_ is None:
        return fast(name, engine, router, thresholds)
    kind = "map" if exit_.maps else "plain"
    points = [own for own in exit_.figures.get("curve", ()) if own["kind"] == kind]
    config = replace(engine.config, mode="fast", prefill_exits=True, max_exit_share=0.0)
    series = f"prefill exits, {name}"
    settled = [Way(series, f"{own['share']:.0%}", engine, config, router, own["threshold"]) for own in points]
    return [*fast(name, engine, router, thresholds), *settled]


def fast(name: str, engine: Any, router: str, thresholds: list[float], strategy: str = "exact") -> list[Way]:
    settings = replace(engine.config, mode="fast", kv_cache_strategy=strategy)
    return [Way(f"fast, {name}", repr(one), engine, replace(settings, exit_threshold=one), router) for one in thresholds]


def shared(model: Any) -> Any:
    """Return a copy of a model with the same weights in memory: a model has one engine at a time."""
    weights = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(weight): weight for weight in weights})


def dropped(model: Any, share: float) -> Way:
    """Return the model without some of its layers, evenly spread; the first and last ones stay."""
    import TIDE

    smaller = shared(model)
    layers = smaller.get_decoder().layers
    inner = range(ENDS, len(layers) - ENDS)
    count = min(len(inner), round(share * len(layers)))
    if not count:
        raise ValueError(f"of {len(layers)} layers none can be left out")
    left_out = {inner[round((place + 0.5) * len(inner) / count - 0.5)] for place in range(count)}
    stays = [layer for place, layer in enumerate(layers) if place not in left_out]
    for place, layer in enumerate(stays):
        layer.self_attn.layer_idx = place
    smaller.get_decoder().layers = type(layers)(stays)
    config = smaller.config.get_text_config(decoder=True)
    config.num_hidden_layers = len(stays)
    if getattr(config, "layer_types", None):
        config.layer_types = [kind for place, kind in enumerate(config.layer_types) if place not in left_out]
    return Way("static", f"{len(stays)} layers", TIDE.TIDE(smaller), TIDE.TIDEConfig(mode="exact"))


def measure(ways: list[Way], asked: list[list[int]], new_tokens: int, meter: Any, kept: Kept, absent: dict[str, str]) -> None:
    """Answer every prompt in all ways, starting with another one each time."""
    from tqdm import tqdm

    warm: set[str] = set()
    for number, ids in enumerate(tqdm(asked, desc=f"{len(ways)} ways", unit="prompt")):
        for place in range(len(ways)):
            way = ways[(number + place) % len(ways)]
            if way.name in absent or way.key(number) in kept.records:
                continue
            try:
                if way.name not in warm:
                    answered(way, ids, min(8, new_tokens), meter)
                    warm.add(way.name)
                kept.once(way.key(number), lambda way=way, ids=ids: answered(way, ids, new_tokens, meter))
            except Exception as problem:  # what it had measured is kept; it is left out of the curve
                absent[way.name] = f"{type(problem).__name__}: {' '.join(str(problem).split())[:200]}"


def answered(way: Way, ids: list[int], new_tokens: int, meter: Any) -> Record:
    from TIDE.calibration.prompts import continued

    with way.engine.using(way.config, exits=way.router is not None):
        prompt_pass = way.engine.plan.prompt_pass
        if prompt_pass is not None:
            prompt_pass.exit.threshold = way.settles
        joules, wall, cpu = meter.joules(), time.perf_counter(), time.process_time()
        text = continued(way.engine, [ids], new_tokens)[0]
        took = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        after, stats = meter.joules(), way.engine.last_stats
    spared = 0 if prompt_pass is None else stats.settled_tokens * (stats.num_layers - prompt_pass.depth)
    layers = stats.layers_run - len(ids) * stats.num_layers + spared
    spent = None if joules is None or after is None else after - joules
    return (
        took
        | {"ids": text, "layers": layers, "joules": spent, "exited": stats.exited_tokens}
        | {"settled": stats.settled_tokens / len(ids)}
    )


def point(way: Way, kept: Kept, count: int) -> Record:
    """Return a way's place on the curve."""
    from TIDE.calibration.losses import mismatch, rouge_l

    own = [kept.records[way.key(number)] for number in range(count)]
    full = [kept.records[f"exits off: {number}"]["ids"] for number in range(count)]
    tokens = sum(len(one["ids"]) for one in own)
    joules = [one["joules"] for one in own if one["joules"] is not None]
    pairs = [(one["ids"], other) for one, other in zip(own, full, strict=True)]
    return {
        "name": way.name,
        "series": way.series,
        "label": way.label,
        "quality": round(1 - fmean(rouge_l(*pair) for pair in pairs), 3),
        "agreement": round(1 - fmean(mismatch(*pair) for pair in pairs), 3),
        "seconds": shortened(sum(one["seconds"] for one in own) / tokens),
        "CPU seconds": shortened(sum(one["cpu"] for one in own) / tokens),
        "layers": round(sum(one["layers"] for one in own) / max(1, tokens - count), 2),  # the first token comes with the prompt
        "joules": shortened(sum(joules) / tokens) if joules else None,
        "exits": round(sum(one["exited"] for one in own) / tokens, 3),
        "settled": round(fmean(one.get("settled", 0) for one in own), 3),
    }


def shortened(number: float) -> float:
    """Return a number with three digits that say something: a token takes 0.1 s on a CPU, 0.0004 on a GPU."""
    return float(f"{number:.3g}")


def report(points: list[Record], absent: dict[str, str]) -> None:
    print(f"{'':36}{'ROUGE-L':>9}{'agreement':>11}{'s/token':>10}{'CPU s':>9}{'layers':>8}{'J':>8}{'exits':>8}{'settled':>9}")
    for own in points:
        joules = "-" if own["joules"] is None else f"{own['joules']:.3f}"
        print(
            f"{own['name']:36}{own['quality']:9.3f}{own['agreement']:11.3f}{own['seconds']:10.5f}{own['CPU seconds']:9.5f}"
            f"{own['layers']:8.2f}{joules:>8}{own['exits']:8.1%}{own['settled']:9.1%}"
        )
    for name, why in absent.items():
        print(f"{name}: not measured: {why}")


if __name__ == "__main__":
    main()
