"""Parts: what a model is made of at a moment, so that one can see later whether it still is.

Compiled layers and graphs know weights only where they are, and of adapters what was done when a graph was captured. Before
each request the engine looks whether modules, weights, hooks and adapters are as they were.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from TIDE.adapters.weights import adapter_state, version


class ModelSnapshot:
    """Those of a model as it is now.

    Args:
        values: whether weights that change in place count.
    """

    def __init__(self, model: nn.Module, values: bool = False) -> None:
        self._values = values
        self._held = [*model.modules(), *model.parameters()]  # nothing else is put where they are
        self._facts = self._look(model)

    def matches(self, model: nn.Module) -> bool:
        """Whether a model is made of them still."""
        return self._facts == self._look(model)

    def _look(self, model: nn.Module) -> list[tuple[Any, ...]]:
        return [(id(module), *self._look_at(module)) for module in model.modules()]

    def _look_at(self, module: nn.Module) -> tuple[Any, ...]:
        weights = [(name, self._weight(x)) for name, x in module._parameters.items() if x is not None]
        return [(name, id(child)) for name, child in module._modules.items()], weights, has_hooks(module), adapter_state(module)

    def _weight(self, weight: torch.Tensor) -> tuple[Any, ...]:
        place = weight.data_ptr() if type(weight.data) is torch.Tensor else None
        return id(weight), place, weight.dtype, version(weight) if self._values else None


def has_hooks(module: nn.Module) -> bool:
    """Those of torch, or of accelerate, which moves states and weights between devices."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "_hf_hook" in module.__dict__
