"""Routers: width, calibration size, and drift from prose to code and back.

The heads of the router file stay as they are; routers are trained anew on texts of one kind and measured on held-out texts of
each kind. Texts are the model's own greedy answers, as in calibration: to prompts that ask for prose, and to some for code.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from kept import Kept, Record, identity
from studies.sources import prompts, router_path, spread

KINDS = ("prose", "code")
WIDTHS = (8, 32, 128, 512)
WIDTH = 128
SHARES = (0.125, 0.25, 0.5, 1.0)  # of the texts to train on
HELD_OUT = 4  # one text of so many is held out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--texts", type=int, default=400, help="of each kind, at most")
    parser.add_argument("--answer", type=int, default=128, help="longest text, in tokens")


def run(options: argparse.Namespace) -> Record:
    import TIDE
    from TIDE.adapters.adapter import ModelAdapter

    model, tokenizer = TIDE.load_model(options.model)
    file = TIDE.RouterFile.load(path := router_path(options))
    asked = {kind: spread(prompts(options.data, kind), options.texts) for kind in KINDS}
    settings = dict(texts=options.texts, answer=options.answer, model=options.model)
    kept = Kept(options.work / "routers.jsonl", settings | {"router": identity(path), "asked": identity(asked)})
    written = {
        kind: kept.once(f"texts {kind}", lambda own=own: _texts(model, tokenizer, own, options.answer))
        for kind, own in asked.items()
    }
    jobs = [(f"prose, width {width}", "prose", width, 1.0) for width in WIDTHS]
    jobs += [(f"prose, {share:g} of the texts", "prose", WIDTH, share) for share in SHARES[:-1]]
    jobs += [("code", "code", WIDTH, 1.0)]
    adapter, depth = ModelAdapter(model), file.checkpoints[0]
    with _collected(adapter, file, depth, written) as data:
        for name, kind, width, share in jobs:
            kept.once(name, lambda how=(kind, width, share): _fitted(adapter, file, depth, data, *how))
    adapter.close()
    counts = " and ".join(f"{len(own)} {kind}" for kind, own in asked.items())
    return {
        "what": "Routers by width, number of texts, and kind of text (drift), with the heads of the shipped file",
        "settings": f"answers of up to {options.answer} tokens, {counts}, one of {HELD_OUT} held out; exit at depth {depth}",
        "table": {name: _row(kept.records[name]) for name, *_ in jobs},
        "figures": {
            **{f"agreement_{kind}": kept.records["code"][kind]["agreement"] for kind in KINDS},
            "auroc_by_width": _gained(kept, f"prose, width {WIDTHS[1]}", f"prose, width {WIDTHS[-1]}"),
            "auroc_by_texts": _gained(kept, f"prose, {SHARES[0]:g} of the texts", f"prose, width {WIDTH}"),
            "texts": [len(own) for own in asked.values()],
        },
    }


def _gained(kept: Kept, before: str, after: str) -> float:
    """Return by how much the AUROC on prose is higher."""
    return round(kept.records[after]["prose"]["auroc"] - kept.records[before]["prose"]["auroc"], 3)


def _row(found: Record) -> Record:
    columns = (("AUROC", "auroc"), ("calibration error", "calibration_error"), ("coverage at 0.95", "covered"))
    return {f"{column}, {kind}": found[kind][key] for kind in KINDS for column, key in columns}


def _texts(model: Any, tokenizer: Any, asked: list[str], longest: int) -> Record:
    from TIDE.calibration.self_texts import answer_prompts

    return {"texts": [list(text) for text in answer_prompts(model, tokenizer, asked, 0, longest)]}


class Data(NamedTuple):
    """States of the texts of one kind."""

    pieces: list[Any]  # to train on; the first few of them are SHARES of all
    valid: Any


@contextmanager
def _collected(adapter: Any, file: Any, depth: int, written: dict[str, Record]) -> Iterator[dict[str, Data]]:
    """Yield the states of all texts, by kind."""
    from TIDE.calibration.collect import Budget, collect, extended
    from TIDE.calibration.text import Text
    from TIDE.routing.heads import input_depths, memory_depths

    remembered, found = memory_depths(adapter.num_layers, 3), {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        budget = Budget(adapter.device, Path(folder))
        for kind, record in written.items():
            texts = [Text(*own) for own in record["texts"]]
            train, valid = [t for t in texts if t.group % HELD_OUT], [t for t in texts if not t.group % HELD_OUT]
            ends = [round(share * len(train)) for share in SHARES]
            parts = [train[start:stop] for start, stop in pairwise([0, *ends])]
            held = Data(
                [collect(adapter, part, remembered, budget, f"{kind}, to train on") for part in parts],
                collect(adapter, valid, remembered, budget, f"{kind}, held out"),
            )
            inputs = input_depths(depth, file.exits[depth].sizes.inputs)
            stack.enter_context(extended(adapter, [*held.pieces, held.valid], inputs, budget))
            found[kind] = held
        yield found


def _fitted(adapter: Any, file: Any, depth: int, data: dict[str, Data], kind: str, width: int, share: float) -> Record:
    """Train a router on one kind of text, and measure it on all."""
    import TIDE
    from TIDE.calibration.collect import Collection
    from TIDE.calibration.figures import router_figures
    from TIDE.calibration.fit import Exits, Split
    from TIDE.calibration.fit_router import _held_out, _Job, fit_router

    head = file.exits[depth].head.to(adapter.device).float()
    exits, config = Exits(depth, file.vocabulary), TIDE.TIDEConfig(router_bottleneck_dim=width)
    train = Collection([shard for piece in data[kind].pieces[: SHARES.index(share) + 1] for shard in piece.shards])
    router = fit_router(adapter, head, Split(train, data[kind].valid), exits, config, 1, 0, f"{kind}, {width}").router
    found = {}
    for other in KINDS:
        job = _Job(adapter, head, router.to(adapter.device), exits, config, 1)
        raw, _, agreed, _ = _held_out(job, data[other].valid)
        scores = (raw / router.temperature.cpu() + router.offset.cpu()).sigmoid()
        figures = router_figures(scores[:, 0], agreed[:, 0])
        found[other] = figures | {"covered": figures["coverage"]["0.95"]}
    return found
