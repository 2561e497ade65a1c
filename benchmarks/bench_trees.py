"""Trees of drafts against drafts in a row, one greedy row: tokens a round and wall clock, in one table.

    python benchmarks/bench_trees.py --prompts PROMPTS.jsonl                     the embedded default model
    python benchmarks/bench_trees.py --prompts PROMPTS.jsonl --model llama-8b    a random Llama of that size, by replay
    python benchmarks/bench_trees.py --model tiny                                a random tiny Llama, as a smoke test

PROMPTS.jsonl has "turns" on each line; the first is asked. All ways answer every prompt, in turn. Tokens a round are new tokens
over rounds, those without drafts included: how often there are drafts is decided as ever.

By replay: random weights accept nothing, so the embedded model answers first, in rounds of 7 drafts in a row and with every
tree, and how many were accepted in each round is kept. Rounds of the random model then run as they are, but for the number of
drafts that accept takes, which is the one that was kept. There are drafts in every round; 2, 4 and 7 in a row are tried, of
several rows (--rows) 1, 2 and 3. Decoding is what is left without the time of the first tokens.

Without a GPU rounds run in plain torch: tokens a round are what they are on one, seconds say nothing. Prints a table, then one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import TIDE
from bench_decode import SHAPES, on_gpu, random_model, timed, untrained
from TIDE.config import TIDEConfig
from TIDE.engine.cache.prefix_tree import new_salt
from TIDE.engine.runners.triton import TritonRunner
from TIDE.engine.schedule.draft_planner import DraftPlanner, most_drafts
from TIDE.engine.schedule.scheduler import Scheduler
from TIDE.engine.select import described_layers
from TIDE.engine.slots.round import SlotRound
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import sampling

TREES = (7, 15, 31, 63)
IN_A_ROW = (2, 4, 7)
LONGEST = 7
TOGETHER = (1, 2, 3)
APART = 977


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="default", help=f"a model, or a random one: {', '.join(SHAPES)}")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--prompts", default=None, help="None: a few random tokens")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128, help="of random prompts")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="times that every prompt is answered")
    parser.add_argument("--rows", type=int, nargs="+", default=[1], help="together, by replay; more than one: without trees")
    parser.add_argument("--draft-vocabulary", type=int, default=None, help="tokens of drafts, by replay; None: all")
    parser.add_argument("--trees", type=int, nargs="*", default=TREES)
    parser.add_argument("--levels", type=int, default=None, help="of trees, at most; None: as their size has them")
    options = parser.parse_args()
    if max(options.rows) > 1:
        if options.model not in SHAPES:
            parser.error("--rows is for random models, by replay. bench_batch.py times rows of a model with exits.")
        options.trees = []
    transformers.utils.logging.disable_progress_bar()
    if options.model not in SHAPES:
        report(options, 1, measured(options))
        return
    kept = recorded(options) if options.model != "tiny" else {drafts: [1, 3, 0, 2] for drafts in (0, *options.trees)}
    model = random_model(options.model)
    model.generation_config.eos_token_id = None
    vocabulary = None if options.draft_vocabulary is None else torch.arange(options.draft_vocabulary, device=model.device)
    replay = Replay(model.device)
    replay.patch()
    with an_engine(model, untrained(model, "memory", 0, vocabulary)) as engine:
        for rows in options.rows:
            report(options, rows, replayed(engine, replay, kept, rows, options))


# ---- the embedded model, or another with exits -------------------------------------------------------------------------------


def measured(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return what every way of drafting gave."""
    model, tokenizer = TIDE.load_model(options.model, dtype=options.dtype and getattr(torch, options.dtype))
    prompts = texts(tokenizer, options, model)
    configs: dict[str, TIDEConfig | None] = {"exits off": None, "in a row": TIDEConfig(draft_tree=0)}
    configs |= {f"tree of {own}": TIDEConfig(draft_tree=own, max_pending=options.levels) for own in options.trees}
    with an_engine(model, TIDE.default_router()) as engine:
        return compared(engine, configs, prompts, options)


def compared(
    engine: Any, configs: dict[str, TIDEConfig | None], prompts: list[Any], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Answer every prompt in every way; texts are compared with those of the first."""
    kept: dict[str, dict[str, Any]] = {name: dict(seconds=[], tokens=0, rounds=0, same=0) for name in configs}
    stats: dict[str, Any] = {}

    def answer(name: str, ids: torch.Tensor) -> torch.Tensor:
        with engine.using(configs[name] or engine.config, exits=configs[name] is not None):
            found: torch.Tensor = engine.generate(
                ids, max_new_tokens=options.new_tokens, do_sample=False, cache_salt=new_salt()
            )
        return found

    for name in configs if on_gpu() else ():
        with engine.using(configs[name] or engine.config, exits=configs[name] is not None):
            engine.warm_up(tokens=max(ids.shape[1] for ids in prompts) + options.new_tokens, progress=False)
        answer(name, prompts[0])
    for number in range(options.rounds):
        for at, ids in enumerate(prompts):
            wanted = None
            names = list(configs)
            for name in sorted(names, key=lambda own: (names.index(own) + at + number) % len(names)):
                seconds, found = timed(lambda name=name, ids=ids: answer(name, ids))
                own, counts = kept[name], engine.last_stats
                own["seconds"].append(seconds)
                own["tokens"] += counts.total_tokens
                own["rounds"] += counts.remaining_tokens
                stats[name] = counts if name not in stats else stats[name] + counts
                wanted = found if wanted is None else wanted
                own["same"] += bool(found.shape == wanted.shape and torch.equal(found, wanted))
    for name, own in kept.items():
        counts = stats[name]
        own |= dict(drafted=counts.drafted, accepted=counts.accepted, trees=counts.trees)
        own |= dict(tree_width=counts.tree_width, tree_depth=counts.tree_depth, answers=len(own["seconds"]))
    return kept


def an_engine(model: Any, router: Any, config: TIDEConfig | None = None) -> Any:
    engine = TIDE.TIDE(model, router, config)
    if not on_gpu():
        layers = described_layers(engine.adapter)
        assert isinstance(layers, list), layers
        engine.runner = TritonRunner(engine.adapter, layers, reference, reference, sampling)
        engine.runner.is_checked = True
    return engine


def texts(tokenizer: Any, options: argparse.Namespace, model: Any) -> list[torch.Tensor]:
    """Return (1, tokens) prompts."""
    if options.prompts is None:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(10, model.config.vocab_size, (3, 1, options.prompt_tokens), generator=generator)
        return list(ids.to(model.device))
    lines = [json.loads(line) for line in Path(options.prompts).read_text("utf-8").splitlines() if line.strip()]
    asked = [[{"role": "user", "content": line["turns"][0]}] for line in lines[:: options.every]]
    kind: dict[str, Any] = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return [tokenizer.apply_chat_template(own, **kind)["input_ids"].to(model.device) for own in asked]


# ---- random weights, by replay -----------------------------------------------------------------------------------------------


class Fixed(Scheduler):
    """Gives every round the same number of drafts, or levels of a tree."""

    def __init__(self, drafts: int = LONGEST) -> None:
        super().__init__()
        self.fixed = drafts
        self.accepted: list[int] = []  # round by round
        self.made: list[int] = []  # drafts, or levels of a tree

    def planner(self, plan: Any) -> DraftPlanner:
        return _Fixed(self, plan)


class _Fixed(DraftPlanner):
    def __init__(self, scheduler: Fixed, plan: Any) -> None:
        super().__init__(scheduler.experience, plan)
        self.scheduler = scheduler

    def drafts(self, row: Any, is_planned: bool) -> int | None:
        return min(self.scheduler.fixed, most_drafts(row, self.plan))

    def saw(self, row: Any, result: Any, round_: Any, seconds: float | None) -> None:
        if result.drafted:
            self.scheduler.accepted.append(result.accepted)
            self.scheduler.made.append(result.made)


def recorded(options: argparse.Namespace) -> dict[int, list[int]]:
    """Return how many drafts were accepted, round by round, by the drafts of a tree; 0: seven in a row."""
    model, tokenizer = TIDE.load_model("default", dtype=options.dtype and getattr(torch, options.dtype))
    found: dict[int, list[int]] = {}
    prompts = texts(tokenizer, options, model)
    with an_engine(model, TIDE.default_router()) as engine:
        for drafts in (0, *options.trees):
            engine.scheduler = Fixed()
            for ids in prompts:
                with engine.using(TIDEConfig(draft_tree=drafts, max_pending=(drafts and options.levels) or LONGEST)):
                    engine.generate(ids, max_new_tokens=options.new_tokens, do_sample=False, cache_salt=new_salt())
            found[drafts] = engine.scheduler.accepted
    return found


class Replay:
    """Lets accept take the number of drafts that was kept; the kernels of a round are the same, and one more."""

    def __init__(self, device: torch.device) -> None:
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.kept = torch.zeros(1 << 16, dtype=torch.long, device=device)
        self.steps = torch.arange(64, device=device)[:, None]
        self.apart = APART * torch.arange(64, device=device)  # rows are in different places of what was kept

    def use(self, accepted: Sequence[int]) -> None:
        numbers = torch.tensor(accepted or [0], device=self.kept.device)
        self.kept.copy_(numbers.repeat(-(-len(self.kept) // len(numbers)))[: len(self.kept)])
        self.at.zero_()

    def patch(self) -> None:
        accept, own = SlotRound.accept, self

        def accept_so_many(stage: SlotRound, drafted: int) -> None:
            slots = stage.slots
            drafts = slots.chain.tokens[1 : drafted + 1]
            places = (own.at + own.apart[: drafts.shape[1]]) % len(own.kept)
            holds = own.steps[:drafted] < own.kept[places]
            slots.chain.found[:drafted].copy_(torch.where(holds, drafts, (drafts + 1) % 3 + 4 * (drafts < 4)))
            own.at.add_(1)
            accept(stage, drafted)

        SlotRound.accept = accept_so_many  # type: ignore[method-assign]


def replayed(
    engine: Any, replay: Replay, kept: dict[int, list[int]], rows: int, options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Return what every way gives `rows` rows of random weights."""
    device, size = engine.model.device, engine.model.config.vocab_size
    ids = torch.randint(10, size, (rows, options.prompt_tokens), device=device)
    found: dict[str, dict[str, Any]] = {}
    ways = [("exits off", 0, 0), *((f"{own} in a row", 0, own) for own in (IN_A_ROW if rows == 1 else TOGETHER))]
    ways += [(f"tree of {drafts}", drafts, LONGEST) for drafts in options.trees]

    def seconds_of(new: int) -> float:
        return timed(lambda: engine.generate(ids, max_new_tokens=new, do_sample=False, cache_salt=new_salt()))[0]

    for name, tree, drafts in ways:
        engine.scheduler = Fixed(drafts)
        own: dict[str, Any] = dict(seconds=[], first=[], tokens=0, rounds=0)
        for number in range(2 + max(3, options.rounds)):
            replay.use(kept[tree])
            config = TIDEConfig(draft_tree=tree, max_pending=(tree and options.levels) or LONGEST)
            with engine.using(config, exits=drafts > 0):
                first, seconds = seconds_of(1), seconds_of(options.new_tokens)
            counts = engine.last_stats
            if number >= 2:  # before it compiles and captures
                own["seconds"].append(seconds)
                own["first"].append(first)
                own["tokens"] += counts.total_tokens
                own["rounds"] += counts.remaining_tokens
        own |= dict(drafted=counts.drafted, accepted=counts.accepted, trees=counts.trees, answers=len(own["seconds"]))
        found[name] = own | dict(tree_width=counts.tree_width, tree_depth=counts.tree_depth)
    return found


# ---- the table ---------------------------------------------------------------------------------------------------------------


def report(options: argparse.Namespace, together: int, found: dict[str, dict[str, Any]]) -> None:
    plain = found["exits off"]
    base = plain["tokens"] / sum(plain["seconds"])
    titles = (
        "tokens a round",
        "tok/s",
        "by exits off",
        "decoding",
        "by exits off",
        "accepted of",
        "width",
        "depth",
        "same text",
    )
    print(f"{'':14}" + "".join(f"{title:>16}" for title in titles))
    rows = {}
    for name, own in found.items():
        speed = own["tokens"] / sum(own["seconds"])
        tokens = own["tokens"] / max(1, own["rounds"])
        same = f"{own['same']} of {own['answers']}" if "same" in own else "–"
        decoding, by_off = decoded(options, together, own), None
        if decoding is not None:
            by_off = decoding / (decoded(options, together, plain) or decoding)
        values = [
            f"{tokens:.2f}",
            f"{speed:.1f}",
            f"{speed / base:.2f}",
            *(f"{own:.2f}" if own else "–" for own in (decoding, by_off)),
        ]
        values += [f"{own['accepted']} / {own['drafted']}"]
        values += [f"{own['tree_width']:.1f}", f"{own['tree_depth']:.1f}", same]
        print(f"{name:14}" + "".join(f"{value:>16}" for value in values))
        medians = {name: statistics.median(own[name]) for name in ("seconds", "first") if name in own}
        facts = {name: value for name, value in own.items() if name not in medians}
        rows[name] = facts | dict(tokens_a_round=tokens, tok_s=speed, by_exits_off=speed / base, medians=medians)
        rows[name] |= dict(decoding=decoding, decoding_by_exits_off=by_off)
    where = torch.cuda.get_device_name() if on_gpu() else f"{platform.machine()}, in torch"
    versions = dict(torch=torch.__version__, transformers=transformers.__version__)
    print(json.dumps(dict(vars(options), rows=together, device=where, **versions, results=rows)))


def decoded(options: argparse.Namespace, rows: int, own: dict[str, Any]) -> float | None:
    """Return tokens per second behind the first ones; None where those were not timed."""
    if "first" not in own:
        return None
    seconds = statistics.median(own["seconds"]) - statistics.median(own["first"])
    return rows * (options.new_tokens - 1) / max(seconds, 1e-9)


if __name__ == "__main__":
    main()
