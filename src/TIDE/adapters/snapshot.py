"""A snapshot of a model: its modules, weights, hooks and adapters at a moment, to compare with later.

Compiled layers and graphs hold raw weight addresses, and graphs hold what adapters did when they were captured. Before each
request the engine checks that the model is as it was; that takes a millisecond, so it looks at no more than it must.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from TIDE.adapters.weights import adapter_state, version


class ModelSnapshot:
    """A model as it is now.

    Args:
        values: weights that change in place count as changes.
    """

    def __init__(self, model: nn.Module, values: bool = False) -> None:
        self._values = values
        self._model = model
        modules = list(model.modules())
        self._attributes = [vars(module) for module in modules]
        self._switched = [module for module in modules if adapter_state(module)]
        self._held = modules  # so that nothing else is put where they are
        self._weights = list(model.parameters())
        self._plain = {id(weight) for weight in self._weights if type(weight.data) is torch.Tensor}
        self._facts = self._look()

    def matches(self, model: nn.Module) -> bool:
        """Return True if a model is as it was."""
        return model is self._model and self._facts == self._look()

    def versions(self) -> list[int | None]:
        """Return how often each weight of a model that matches was changed in place, as far as torch counts that."""
        return [version(weight) for weight in self._weights]

    def _look(self) -> list[Any]:
        """Return what can change: a module that takes another's place shows in the module that holds it."""
        facts: list[Any] = [adapter_state(module) for module in self._switched]
        for own in self._attributes:
            facts.append((*own["_modules"].values(), _has_hooks(own)))
            for weight in own["_parameters"].values():
                if weight is not None:
                    place = weight.data_ptr() if id(weight) in self._plain else None
                    facts.append((id(weight), place, weight.dtype, version(weight) if self._values else None))
        return facts


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks of torch, or of accelerate, which moves states and weights between devices."""
    return _has_hooks(vars(module))


def _has_hooks(own: dict[str, Any]) -> bool:
    return bool(own["_forward_hooks"] or own["_forward_pre_hooks"] or "_hf_hook" in own)
