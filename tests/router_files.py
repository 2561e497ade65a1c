"""Router files with random weights and something of everything."""

from __future__ import annotations

import functools
from collections import OrderedDict
from contextlib import closing

import torch

from families import build
from TIDE.adapters.adapter import ModelAdapter
from TIDE.routing.calibrated import CalibratedPolicy
from TIDE.routing.exits import Exit
from TIDE.routing.fingerprint import Fingerprint, fingerprint
from TIDE.routing.heads import HeadSizes, build_head, head_sizes
from TIDE.routing.policies import policy_for
from TIDE.routing.router import SIGNALS, Router
from TIDE.routing.router_file import RouterFile

SIZES = {
    "identity": HeadSizes(64),
    "lens": HeadSizes(64, 48),
    "memory": HeadSizes(64, 96, heads=4, kv_heads=2, head_dim=16, rope_theta=5e5),
}


@functools.cache
def of_llama() -> Fingerprint:
    return fingerprint(build("llama"))


def made(strategy: str = "memory", model=None, dtype: torch.dtype = torch.float32) -> RouterFile:
    """For the tiny llama, or another model."""
    generator = torch.Generator().manual_seed(0)
    exits = {}
    for depth in (0, 1, 2, 3):
        head, router = build_head(strategy, SIZES[strategy]).to(dtype), Router(64, 8, SIGNALS)
        for parameter in (*head.parameters(), *router.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        router.temperature.fill_(1.5)
        exits[depth] = Exit(head, router, 0.5 + depth / 10, {"auroc": 0.9, "agreement": 0.8 + depth / 100})
    return RouterFile(
        strategy=strategy,
        exits=exits,
        checkpoints=(0, 2),
        max_pending=5,
        vocabulary=torch.arange(3, 103),
        fingerprint=fingerprint(model) if model else of_llama(),
        config={"exit_strategy": strategy, "exit_threshold": None},
        facts={"tokens": 4000, "texts": "self", "seconds": {"collect": 1.5}},
        figures={"tokens_per_second": 30.5, "placement": [{"checkpoints": [0, 2], "tok/s": 30.5, "kept": True}]},
    )


def tensors_of(file: RouterFile) -> dict[str, torch.Tensor]:
    found = {"vocabulary": file.vocabulary}
    for depth, at in file.exits.items():
        found |= at.head_tensors(depth) | at.router_tensors(depth)
    return found


def original_file(path, layers=(0, 2), hidden: int = 64, bottleneck: int = 8):
    """A file as tide-inference 0.2.1 saves it, with routers that say yes to about every second state."""
    torch.manual_seed(0)
    shapes = {"down.weight": (bottleneck, hidden), "up.weight": (1, bottleneck)}
    weights = {layer: OrderedDict((name, torch.randn(shape)) for name, shape in shapes.items()) for layer in layers}
    torch.save({"hidden_dim": hidden, "bottleneck_dim": bottleneck, "router_layers": weights}, path)
    return path


def a_file(model, strategy: str, checkpoints: tuple[int, ...], threshold: float, vocabulary=None, seed: int = 0) -> RouterFile:
    """Random heads and routers."""
    torch.manual_seed(seed)
    config = model.config.get_text_config(decoder=True)
    hidden = config.hidden_size
    exits = {}
    for depth in checkpoints:
        head = build_head(strategy, head_sizes(strategy, config, hidden, depth)).eval().requires_grad_(False)
        if strategy == "lens":
            head.up.weight.normal_(std=0.2)  # it begins as the identity
        exits[depth] = Exit(head, Router(hidden, 8, SIGNALS).requires_grad_(False), threshold)
    return RouterFile(strategy, exits, checkpoints, 3, vocabulary, fingerprint(model))


def exits_of(model, strategy: str, *depths: int, **more) -> CalibratedPolicy:
    """Exits with random heads that always leave, as torch has them."""
    with closing(ModelAdapter(model)) as adapter:
        return policy_for(a_file(model, strategy, depths, 0.0, **more), adapter)
