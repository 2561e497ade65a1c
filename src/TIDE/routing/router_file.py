"""Router files: routers by layer, read from disk and put to work as an exit policy.

Read so far: the files of the original system (tide-inference 0.2.1, `.pt` with hidden_dim, bottleneck_dim and
router_layers). They hold tensors and plain values only and are loaded as such: a file that holds code is refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from TIDE.routing.policy import Candidates, ExitPolicy
from TIDE.routing.router import Router

logger = logging.getLogger(__name__)
ORIGINAL_KEYS = ("hidden_dim", "bottleneck_dim", "router_layers")


@dataclass(frozen=True)
class RouterFile:
    """What a file holds."""

    path: Path
    hidden_dim: int
    routers: dict[int, Router]  # by the last layer run before the exit

    @classmethod
    def load(cls, path: str | Path) -> RouterFile:
        """Read a file, or say what is wrong with it."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no router file {path}. Give the path of a .pt file, or None for no exits.")
        if path.suffix != ".pt":
            raise ValueError(f"a router file ends in .pt, found {path.name!r}. Give the file that calibration saved.")
        content = _read(path)
        if not isinstance(content, dict) or any(key not in content for key in ORIGINAL_KEYS):
            found = sorted(map(str, content)) if isinstance(content, dict) else type(content).__name__
            raise ValueError(
                f"{path} is not a router file: expected the entries {list(ORIGINAL_KEYS)}, found {found}. Give the file that "
                f"calibration saved."
            )
        try:
            sizes = int(content["hidden_dim"]), int(content["bottleneck_dim"])
            routers = {int(layer): _router(*sizes, weights) for layer, weights in content["router_layers"].items()}
        except (RuntimeError, TypeError, ValueError, AttributeError, KeyError) as problem:
            raise ValueError(f"{path} is damaged: its routers do not fit its sizes ({problem}). Make it again.") from problem
        if not routers:
            raise ValueError(f"{path} holds no routers. Make it again.")
        return cls(path, sizes[0], dict(sorted(routers.items())))

    def policy(self, hidden_dim: int, num_layers: int) -> RouterPolicy:
        """The routers as an exit policy for a model of these sizes."""
        too_deep = [layer for layer in self.routers if layer >= num_layers]
        if self.hidden_dim != hidden_dim or too_deep:
            raise ValueError(
                f"{self.path} was made for another model: it has states of {self.hidden_dim} and routers at layers "
                f"{list(self.routers)}; this model has states of {hidden_dim} and {num_layers} layers. Use its own file."
            )
        usable = {layer + 1: router for layer, router in self.routers.items() if layer + 1 < num_layers}
        if len(usable) < len(self.routers):
            logger.warning("%s has a router after the last layer, where nothing is left to skip; it is not used.", self.path)
        return RouterPolicy(usable)


class RouterPolicy(ExitPolicy):
    """Exits where a router's score says so, with the identity prediction."""

    exit_threshold = 0.85  # as the original system had it
    min_layers = 8

    def __init__(self, routers: dict[int, Router]) -> None:
        self.routers = routers
        self.checkpoints = tuple(routers)

    def score(self, candidates: Candidates) -> torch.Tensor:
        router = self.routers[candidates.depth].to(candidates.states.device)
        return router(candidates.states)


def _read(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # a damaged pickle can fail in any way
        raise ValueError(
            f"{path} was not loaded: it is truncated, damaged, or holds more than tensors and plain values "
            f"({type(problem).__name__}). Make it again, or get it again from where it came."
        ) from problem


def _router(hidden_dim: int, bottleneck_dim: int, weights: dict[str, torch.Tensor]) -> Router:
    expected = {"down.weight": (bottleneck_dim, hidden_dim), "up.weight": (1, bottleneck_dim)}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        raise ValueError(f"expected {expected}, found {found}")
    router = Router(hidden_dim, bottleneck_dim)
    router.load_state_dict(weights)
    return router.requires_grad_(False)
