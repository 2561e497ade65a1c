"""Which tokens of a prompt stop at a checkpoint, and the states they are taken to have at deeper layers.

    depth            c        c+1      …      L
    stays            x   →   layer  →  …  →  layer
    stops            x   ·   K/V of x, of predict(c+1, x), …, and no more of the layers

A token that stops is never run again: tokens after it read the K/V made of its predicted states. `predict` of `PromptExit` is
plain state propagation; `FittedPromptExit` has a map for each deeper depth, fitted by calibration:

    predict(d, x) = x + up_d · down_d · x + shift_d                  ridge regression of low rank
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from TIDE.routing.heads import EPS, normed
from TIDE.routing.router import Router

SIGNALS = 1  # of a state that a router takes beside the normed state: the logarithm of its size
KEY = "settling"  # of a router file, from before exits in the prompt had their name


class PromptExit(ABC):
    """The interface that decides which tokens of a prompt stop; the last one always runs all layers.

    Attributes:
        depth: the checkpoint, from 1 on.
    """

    depth: int

    @abstractmethod
    def stops(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Map (n, hidden) states at the checkpoint, of tokens at (n,) positions of their texts, to (n,) booleans."""

    def predict(self, depth: int, states: torch.Tensor) -> torch.Tensor:
        """Map (n, hidden) states at the checkpoint to predicted ones at a depth, up to full; the identity at the checkpoint."""
        return states

    def predictions(self, depths: Sequence[int], states: torch.Tensor, out: torch.Tensor) -> Iterator[int]:
        """Yield depths, each when `out` holds what `predict` returns for it."""
        for depth in depths:
            out.copy_(self.predict(depth, states))
            yield depth


@dataclass
class StateMap:
    """The map to one depth."""

    down: torch.Tensor  # (rank, hidden)
    up: torch.Tensor  # (hidden, rank)
    shift: torch.Tensor  # (hidden,)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        return states + nn.functional.linear(nn.functional.linear(states, self.down), self.up, self.shift)

    def to(self, *where: Any) -> StateMap:
        return StateMap(*(part.to(*where) for part in (self.down, self.up, self.shift)))


@dataclass(eq=False)
class FittedPromptExit(PromptExit):
    """An exit that calibration has fitted.

    Attributes:
        maps: by depth, from `depth` + 1 to full depth; none: plain state propagation.
        threshold: score needed to stop; None: no score is known to be high enough, so no token stops.
        figures: measured, plain values.
    """

    title = "exits in the prompt"

    depth: int
    router: Router
    maps: dict[int, StateMap]
    threshold: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)

    def stops(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.threshold is None:
            return torch.zeros(len(states), dtype=torch.bool, device=states.device)
        # the first token is the one that most attention falls back on
        return (self.scores(states) >= self.threshold) & (positions > 0)

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """Map (n, hidden) states to (n,) scores in [0, 1]: how likely it is that stopping changes little of what follows."""
        router, down = self.router, self.router.down
        # the same as router.raw(features(states)), which writes states of a long prompt out in fp32 three times
        size = torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=torch.float32).square() / states.shape[1]
        inner = nn.functional.linear(states.float(), down.weight[:, :-SIGNALS]) * (size + EPS).rsqrt()
        inner = torch.addcmul(inner + down.bias, _logarithm(size), down.weight[:, -1])
        return torch.sigmoid(router.up(nn.functional.silu(inner))[:, 0] / router.temperature + router.offset)

    def predict(self, depth: int, states: torch.Tensor) -> torch.Tensor:
        return self.maps[depth](states) if depth in self.maps else states

    def predictions(self, depths: Sequence[int], states: torch.Tensor, out: torch.Tensor) -> Iterator[int]:
        """Like the base's, with one product for all of the maps' first halves."""
        if not depths or not self.maps.keys() >= set(depths):
            yield from super().predictions(depths, states, out)
            return
        maps = [self.maps[depth] for depth in depths]
        lows = nn.functional.linear(states, torch.cat([one.down for one in maps]))
        for depth, one, low in zip(depths, maps, lows.split([len(one.down) for one in maps], dim=1), strict=True):
            torch.add(states, nn.functional.linear(low, one.up, one.shift), out=out)
            yield depth

    def to(self, device: torch.device, dtype: torch.dtype) -> FittedPromptExit:
        """Return a copy where a model is: maps in its dtype, the router in fp32."""
        maps = {depth: one.to(device, dtype) for depth, one in self.maps.items()}
        router = copy.deepcopy(self.router).to(device, torch.float32)
        return FittedPromptExit(self.depth, router, maps, self.threshold, self.figures)

    # ---- in a router file ----------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """Return everything except the tensors."""
        sizes = {
            "hidden_dim": self.router.down.in_features - SIGNALS,
            "bottleneck_dim": self.router.down.out_features,
            "ranks": {depth: len(one.down) for depth, one in self.maps.items()},
        }
        return {"depth": self.depth, "threshold": self.threshold, "figures": self.figures, **sizes}

    def shown(self) -> dict[str, Any]:
        """Return the values for a file's summary and card."""
        return {"depth": self.depth, "threshold": self.threshold, **self.figures}

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"{KEY}.router.{name}": tensor for name, tensor in self.router.state_dict().items()}
        for depth, one in self.maps.items():
            named |= {f"{KEY}.maps.{depth}.{name}": tensor.bfloat16() for name, tensor in vars(one).items()}
        return named

    def wrong(self) -> str | None:
        """Return what makes it unusable; None if nothing does."""
        depths = sorted(self.maps)
        if depths and depths != list(range(self.depth + 1, depths[-1] + 1)):
            return f"expected maps of prompts to every depth behind {self.depth}, found {depths}"
        if self.depth < 1:
            return f"expected prompts to settle from depth 1 on, found {self.depth}"
        if self.threshold is not None and not (_is_number(self.threshold) and 0 <= self.threshold <= 1):
            return f"expected a threshold of prompts from 0 to 1, found {self.threshold!r}"
        if not isinstance(self.figures, dict):
            return f"expected names and values as figures of prompts, found {type(self.figures).__name__}"
        for name, tensor in self.tensors().items():
            if not tensor.isfinite().all():
                return f"{name} holds weights that are not finite numbers"
        if not self.router.temperature.float() > 0:
            return f"{KEY}.router.temperature is not above 0"
        return None


def features(states: torch.Tensor) -> torch.Tensor:
    """Return what a router takes of (n, hidden) states: them normed, and the logarithm of their size."""
    return torch.cat([normed(states), _logarithm(states.float().square().mean(-1, keepdim=True))], -1)


def _logarithm(size: torch.Tensor) -> torch.Tensor:
    return size.add(1e-12).log()


def build_prompt_exit(described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> FittedPromptExit:
    """Build what a file holds. Its tensors are removed from the dictionary."""
    hidden, maps = described["hidden_dim"], {}
    with torch.device("meta"):
        router = Router(hidden, described["bottleneck_dim"], SIGNALS)
    state = {name: _taken(f"router.{name}", tensor.shape, tensors) for name, tensor in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    router.requires_grad_(False)
    for depth, rank in described["ranks"].items():
        shapes = {"down": (rank, hidden), "up": (hidden, rank), "shift": (hidden,)}
        maps[int(depth)] = StateMap(*(_taken(f"maps.{depth}.{name}", shape, tensors) for name, shape in shapes.items()))
    return FittedPromptExit(described["depth"], router, maps, described["threshold"], described["figures"])


def _taken(name: str, shape: Sequence[int], tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    found = tensors.pop(f"{KEY}.{name}", None)
    if found is None or found.shape != torch.Size(shape) or not found.is_floating_point():
        what = "nothing" if found is None else f"{found.dtype} of {tuple(found.shape)}"
        raise ValueError(f"expected {KEY}.{name} with numbers of {tuple(shape)}, found {what}")
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
