"""Convergence: at which depth is the full model's token already the best one, by kind of token and by task?

identity    the model's own norm and LM head on the state of a depth name the full model's token
settled     the same, and at all deeper depths that were looked at too
cosine      the state has a cosine similarity above 0.98 to the final one: the original's criterion

The kind is that of the token which is predicted by the full model. Texts are read, not written.
"""

from __future__ import annotations

import argparse
import unicodedata
from collections import defaultdict
from typing import Any

from kept import Kept, Record, identity
from studies.sources import FILES, texts

COSINE = 0.98
PIECE = 512  # tokens read at once
KINDS = ("word", "continuation", "number", "punctuation", "space", "special")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--depths", type=int, nargs="+", default=None, help="None: every fifth layer")


def run(options: argparse.Namespace) -> Record:
    import TIDE
    from TIDE.adapters.adapter import ModelAdapter

    model, tokenizer = TIDE.load_model(options.model)
    adapter = ModelAdapter(model)
    depths = options.depths or [*range(5, adapter.num_layers, 5), adapter.num_layers - 1]
    found = {task: texts(options.data, task) for task in FILES}
    kept = Kept(options.work / "convergence.jsonl", {"model": options.model, "depths": depths, "texts": identity(found)})
    kinds = [kind(tokenizer, token) for token in range(adapter.vocab_size)]
    share = -(-options.tokens // len(FILES))
    for task, own in found.items():
        _read(adapter, tokenizer, own, task, depths, kinds, share, kept)
    adapter.close()
    return _summary(kept, depths, adapter.num_layers)


def kind(tokenizer: Any, token: int) -> str:
    """Return the kind of a token."""
    if token in tokenizer.all_special_ids:
        return "special"
    text = tokenizer.decode([token])
    bare = text.strip()
    if not bare:
        return "space"
    if bare[0].isdigit():
        return "number"
    if unicodedata.category(bare[0])[0] != "L":
        return "punctuation"
    return "word" if text != bare else "continuation"


def _read(
    adapter: Any, tokenizer: Any, found: list[str], task: str, depths: list[int], kinds: list[str], share: int, kept: Kept
) -> None:
    from tqdm import tqdm

    tokens = 0
    with tqdm(total=share, desc=task, unit="token") as bar:
        for number, text in enumerate(found):
            ids = tokenizer(text)["input_ids"][:PIECE]
            if tokens >= share or len(ids) < 2:
                continue
            kept.once(f"{task} {number}", lambda ids=ids: {"task": task, "counts": _counts(adapter, ids, depths, kinds)})
            tokens += len(ids)
            bar.update(len(ids))


def _counts(adapter: Any, ids: list[int], depths: list[int], kinds: list[str]) -> dict[str, Any]:
    """Return, by kind, tokens and for each depth how many are right, settled and near."""
    import torch

    from TIDE.adapters.adapter import PassInputs

    with torch.inference_mode():
        given = torch.tensor([ids], device=adapter.device)
        positions = torch.arange(len(ids), device=adapter.device)[None]
        passed = adapter.run(0, adapter.num_layers, PassInputs(given, positions, None, None), taps=tuple(depths))
        full = passed.states[0]
        best = adapter.head(full).argmax(-1)
        right = torch.stack([adapter.head(passed.taps[depth][0]).argmax(-1) == best for depth in depths])
        settled = right.flip(0).long().cumprod(0).flip(0).bool()
        near = torch.stack([torch.cosine_similarity(passed.taps[depth][0], full, -1) > COSINE for depth in depths])
    counts: dict[str, Any] = {}
    found = {"right": right.tolist(), "settled": settled.tolist(), "near": near.tolist()}
    for place, token in enumerate(best.tolist()):
        own = counts.setdefault(
            kinds[token], {"tokens": 0, **{name: [0] * len(depths) for name in ("right", "settled", "near")}}
        )
        own["tokens"] += 1
        for name, values in found.items():
            for index in range(len(depths)):
                own[name][index] += values[index][place]
    return counts


def _summary(kept: Kept, depths: list[int], layers: int) -> Record:
    sums: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"tokens": 0, **{name: [0] * len(depths) for name in ("right", "settled", "near")}}
    )
    for record in kept.records.values():
        for name, counts in record["counts"].items():
            for row in ("all", f"kind: {name}", f"task: {record['task']}"):
                sums[row]["tokens"] += counts["tokens"]
                for key in ("right", "settled", "near"):
                    sums[row][key] = [a + b for a, b in zip(sums[row][key], counts[key], strict=True)]
    order = ["all", *(f"kind: {name}" for name in KINDS), *(f"task: {name}" for name in FILES)]
    table = {}
    for row in (name for name in order if name in sums):
        own, tokens = sums[row], sums[row]["tokens"]
        table[row] = {"tokens": tokens}
        table[row] |= {f"depth {depth}": round(own["settled"][at] / tokens, 3) for at, depth in enumerate(depths)}
        table[row]["mean depth needed"] = round(_needed(own, tokens, depths, layers), 1)
        table[row]["cosine, depth before the last"] = round(own["near"][-1] / tokens, 3)
    return {
        "what": "Share of tokens that are settled at a depth: the full model's token there and at all deeper depths looked at",
        "settings": f"texts read in pieces of up to {PIECE} tokens, as many tokens of each task; identity exits; "
        f"cosine above {COSINE}",
        "table": table,
        "figures": {
            "tokens": sums["all"]["tokens"],
            "near_tokens": sums["all"]["near"],
        },
    }


def _needed(own: dict[str, Any], tokens: int, depths: list[int], layers: int) -> float:
    """Return the mean of the first depth looked at from which tokens are settled; all layers where there is none."""
    total, before = 0.0, 0
    for depth, settled in zip(depths, own["settled"], strict=True):
        total += depth * (settled - before)
        before = settled
    return (total + layers * (tokens - before)) / tokens
