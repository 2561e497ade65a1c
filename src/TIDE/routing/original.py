"""Router files of the original system (tide-inference 0.2.1): their format and their exit policy.

    {"hidden_dim": 576, "bottleneck_dim": 128, "router_layers": {3: {"down.weight": ..., "up.weight": ...}, ...}}

A key is the last layer run before the exit, so the router of layer 3 is at depth 4. The prediction is the identity
exit's.
"""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from TIDE.routing.policy import Candidates, ExitPolicy
from TIDE.routing.router import Router
from TIDE.routing.storage import are_whole, shown

if TYPE_CHECKING:
    from TIDE.adapters.adapter import ModelAdapter

logger = logging.getLogger(__name__)
ORIGIN = "tide-inference 0.2.1"
ORIGINAL_KEYS = ("hidden_dim", "bottleneck_dim", "router_layers")
THRESHOLD = 0.85  # of the original system


class RouterPolicy(ExitPolicy):
    """The exit policy of an original file: exits above a router score, with the identity prediction.

    Scores were trained for another target than agreement, but measured acceptance corrects them, so mode "exact" weighs these
    drafts like any others.
    """

    weighs = True
    exit_threshold = THRESHOLD
    min_layers = 8

    def __init__(self, routers: dict[int, Router]) -> None:
        self.routers = routers
        self.checkpoints = tuple(routers)

    def score(self, candidates: Candidates) -> torch.Tensor:
        return self.routers[candidates.depth](candidates.states)


def is_original(content: Any) -> bool:
    return isinstance(content, dict) and all(key in content for key in ORIGINAL_KEYS)


def read_original(content: dict[str, Any], path: object) -> dict[int, Router]:
    """Return the routers of a file by depth, in rising order."""
    try:
        sizes = int(content["hidden_dim"]), int(content["bottleneck_dim"])
        if not are_whole([weight for weights in content["router_layers"].values() for weight in weights.values()]):
            raise ValueError("expected weights that have each a number of their own in the file, found others")
        routers = {int(layer) + 1: _router(*sizes, weights) for layer, weights in content["router_layers"].items()}
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, OverflowError) as problem:
        raise ValueError(f"{path} is damaged: its routers do not fit its sizes ({shown(problem)}). Make it again.") from problem
    if not routers:
        raise ValueError(f"{path} holds no routers. Make it again.")
    return dict(sorted(routers.items()))


def original_policy(routers: dict[int, Router], adapter: ModelAdapter, path: object) -> RouterPolicy:
    """Return the exit policy of copies of routers, given by depth, for an adapter's model."""
    hidden_dim, num_layers, device = adapter.hidden_dim, adapter.num_layers, adapter.device
    made_for = next(iter(routers.values())).down.in_features
    if made_for != hidden_dim or max(routers) > num_layers:
        raise ValueError(
            f"{path} was made for another model: it has states of {made_for} and routers at layers "
            f"{[depth - 1 for depth in routers]}; this model has states of {hidden_dim} and {num_layers} layers. "
            f"Use its own file."
        )
    if num_layers in routers:
        logger.warning("%s has a router after the last layer, where nothing is left to skip; it is not used.", path)
    return RouterPolicy({depth: copy.deepcopy(router).to(device) for depth, router in routers.items() if depth < num_layers})


def _router(hidden_dim: int, bottleneck_dim: int, weights: dict[str, torch.Tensor]) -> Router:
    expected = {"down.weight": (bottleneck_dim, hidden_dim), "up.weight": (1, bottleneck_dim)}
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != expected:
        raise ValueError(f"expected {expected}, found {found}")
    if not all(weight.isfinite().all() for weight in weights.values()):
        raise ValueError("a weight is not a finite number")
    router = Router(hidden_dim, bottleneck_dim)
    router.load_state_dict(weights, strict=False)  # temperature and offset stay at 1 and 0
    return router.requires_grad_(False)
