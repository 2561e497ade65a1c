"""Tokens a round by the shape of a tree, on texts that the full model writes: what a shape can give, before any clock runs.

    python benchmarks/tree_shapes.py --prompts PROMPTS.jsonl [--every N] [--new-tokens 64] [--shapes DRAFTS:WIDTH:LEVELS …]

PROMPTS.jsonl has "turns" on each line; the first is asked. The model writes each answer once, greedily. Rounds then draft trees
in every round as an engine does, in plain torch on any machine; in place of the deep pass stand the model's states and tokens
of the answer, which are known. A tree of width 1 is drafts in a row. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from typing import Any
from unittest import mock

import torch

import TIDE
from bench_trees import Fixed, an_engine, texts
from TIDE.config import TIDEConfig
from TIDE.engine.slots import tree_round
from TIDE.engine.slots.tree_round import TreeRound
from TIDE.kernels.reference.trees import TreeShape, tree_shape
from TIDE.routing.heads import memory_depths, normed

SHAPES = [TreeShape(length, 1, length) for length in (2, 4, 7)] + [tree_shape(drafts) for drafts in (7, 15, 31, 63)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument(
        "--shapes", nargs="*", default=[], help="drafts:width:levels; none: drafts in a row, and trees as they are"
    )
    options = parser.parse_args()
    shapes = [TreeShape(*map(int, own.split(":"))) for own in options.shapes] or SHAPES
    model, tokenizer = TIDE.load_model("default")
    found: dict[TreeShape, list[int]] = {shape: [] for shape in shapes}
    with TIDE.TIDE(model) as engine:
        answers = [(ids, engine.generate(ids, max_new_tokens=options.new_tokens)) for ids in texts(tokenizer, options, model)]
    known = [(ids, text, states_of(model, text)) for ids, text in answers]
    with an_engine(model, TIDE.default_router()) as engine:
        for shape, accepted in found.items():
            for ids, text, states in known:
                accepted += rounds_of(engine, shape, ids, text, states)
    print(f"{'drafts':>8}{'width':>8}{'levels':>8}{'rounds':>8}{'tokens a round':>18}")
    for shape, accepted in found.items():
        print("".join(f"{own:8}" for own in shape) + f"{len(accepted):8}{1 + sum(accepted) / max(1, len(accepted)):18.2f}")
    rows = [
        dict(shape._asdict(), rounds=len(own), tokens_a_round=1 + sum(own) / max(1, len(own))) for shape, own in found.items()
    ]
    print(json.dumps(dict(vars(options), torch=torch.__version__, results=rows)))


@torch.no_grad()
def states_of(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Return (tokens, memories) what the exit head remembers of a text, as rounds note it."""
    depths, held = memory_depths(model.config.num_hidden_layers, 3), {}
    layers = model.get_decoder().layers

    def keep(depth: int, out: Any) -> None:
        held[depth] = normed((out[0] if isinstance(out, tuple) else out)[0])

    hooks = [layers[depth - 1].register_forward_hook(lambda _, __, out, depth=depth: keep(depth, out)) for depth in depths]
    model(text, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([held[depth] for depth in depths], -1)


def rounds_of(engine: Any, shape: TreeShape, ids: torch.Tensor, text: torch.Tensor, states: torch.Tensor) -> list[int]:
    """Return how many drafts of a tree of a shape are accepted, round by round."""
    tokens, last = text[0], text.shape[1] - 1

    def deep_pass(self: TreeRound, drafted: int) -> None:
        tree, slots, own = self.tree, self.slots, self.tree.verifying
        self.runner.exits.choose_nodes(tree.candidates, tree.shape, slots.chain.tokens[0], slots.grid.starts[0], own.nodes)
        positions = own.nodes.positions.flatten().long()
        own.captured.copy_(states[positions.clamp(max=last)])
        own.chosen.copy_(tokens[(positions + 1).clamp(max=last)])
        own.best.zero_()

    asked = dict(do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(ids))
    engine.scheduler = Fixed(shape.levels)
    with (
        mock.patch.object(tree_round, "tree_shape", return_value=shape),
        mock.patch.object(TreeRound, "deep_pass", deep_pass),
        mock.patch.object(TreeRound, "sample"),
        engine.using(TIDEConfig(draft_tree=shape.drafts, max_pending=shape.levels)),
    ):
        engine.generate(ids, max_new_tokens=text.shape[1] - ids.shape[1], **asked)
    pairs = zip(engine.scheduler.accepted, engine.scheduler.made, strict=True)
    return [accepted for accepted, made in pairs if made == shape.levels]  # towards the end rounds are cut short


if __name__ == "__main__":
    main()
