"""An exit of a router file: head, router and threshold of one checkpoint, split for storage and rebuilt when read.

    described   sizes, threshold, figures: plain values             -> the file's document
    tensors     "exits.{depth}.head.{parameter}", "….router.{…}"    -> the file's tensors

Rebuilding allocates nothing until the tensors are checked against the sizes: a file may claim any size.
"""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from TIDE.routing.eagle3.head import EagleHead, EagleSizes
from TIDE.routing.heads import HEADS, HeadSizes
from TIDE.routing.router import OwnProbability, Router

EAGLE3 = "eagle3"
DIVISORS = ("router.temperature", "_spread")  # tensors that others are divided by
KINDS: dict[str, Any] = HEADS | {EAGLE3: EagleHead}  # exit heads by strategy: those of calibration, and an imported one


@dataclass
class Exit:
    """The exit head, router and threshold of one checkpoint."""

    head: nn.Module  # one of `KINDS`
    router: Router | OwnProbability
    threshold: float  # score needed to exit here
    figures: dict[str, Any] = field(default_factory=dict)  # measured, plain values

    @property
    def sizes(self) -> HeadSizes:
        sizes: Any = self.head.sizes
        return sizes

    def copied(self, device: torch.device, dtype: torch.dtype) -> Exit:
        """Return a copy where a model is: the head in its dtype, the router in fp32."""
        head, router = copy.deepcopy((self.head, self.router))
        return replace(self, head=head.to(device, dtype), router=router.to(device, torch.float32))

    def describe(self) -> dict[str, Any]:
        """Return everything except the tensors."""
        own = self.router
        router = {} if isinstance(own, OwnProbability) else {"bottleneck_dim": own.down.out_features, "signals": own.signals}
        return {"threshold": self.threshold, "sizes": asdict(self.sizes), "router": router, "figures": self.figures}

    def head_tensors(self, depth: int) -> dict[str, torch.Tensor]:
        return {f"exits.{depth}.head.{name}": tensor for name, tensor in self.head.state_dict().items()}

    def router_tensors(self, depth: int) -> dict[str, torch.Tensor]:
        return {f"exits.{depth}.router.{name}": tensor for name, tensor in self.router.state_dict().items()}

    def wrong(self, strategy: str) -> str | None:
        """Return what makes it unusable; None if nothing does."""
        sizes = self.sizes
        if type(self.head) is not KINDS[strategy]:
            return f"expected a head of strategy {strategy!r}, found {type(self.head).__name__}"
        if strategy in ("memory", EAGLE3) and not _block_fits(sizes):
            return f"the sizes of the head do not fit each other: {sizes}"
        if isinstance(sizes, EagleSizes) and (
            list(sizes.depths) != sorted(set(sizes.depths)) or len(sizes.depths) != sizes.memories
        ):
            return f"expected {sizes.memories} rising depths, found {list(sizes.depths)}"
        numbers = {"eps": sizes.eps, "rope_theta": sizes.rope_theta} if isinstance(sizes, EagleSizes) else {}
        for name, value in numbers.items():
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                return f"expected a number above 0 as {name}, found {value!r}"
        if not isinstance(self.threshold, int | float) or not math.isfinite(self.threshold):
            return f"expected a number as threshold, found {self.threshold!r}"
        if not isinstance(self.figures, dict):
            return f"expected names and values as figures, found {type(self.figures).__name__}"
        for name, tensor in (self.head_tensors(0) | self.router_tensors(0)).items():
            if not tensor.isfinite().all():
                return f"{name.split('.', 2)[-1]} holds weights that are not finite numbers"
            if name.endswith(DIVISORS) and not (tensor.float() > 0).all():
                return f"{name.split('.', 2)[-1]} holds numbers that are not above 0"
        return None


def build_exit(strategy: str, depth: str, described: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Exit:
    """Build an exit. Its tensors are removed from the dictionary."""
    sizes = (EagleSizes if strategy == EAGLE3 else HeadSizes)(**described["sizes"])
    with torch.device("meta"):
        head = KINDS[strategy](sizes)
        router = Router(sizes.hidden_dim, **described["router"]) if described["router"] else OwnProbability()
    _fill(head, f"exits.{depth}.head.", tensors)
    _fill(router, f"exits.{depth}.router.", tensors)
    return Exit(head, router, described["threshold"], described["figures"])


def _fill(module: nn.Module, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
    state = {}
    for name, wanted in module.state_dict().items():
        found = tensors.pop(prefix + name, None)
        if found is None or found.shape != wanted.shape or not found.is_floating_point():
            what = "nothing" if found is None else f"{found.dtype} of {tuple(found.shape)}"
            raise ValueError(f"expected {prefix}{name} with numbers of {tuple(wanted.shape)}, found {what}")
        state[name] = found
    module.load_state_dict(state, assign=True)
    module.requires_grad_(False)


def _block_fits(sizes: HeadSizes) -> bool:
    return min(sizes.heads, sizes.kv_heads, sizes.head_dim) > 0 and sizes.heads % sizes.kv_heads == sizes.head_dim % 2 == 0
