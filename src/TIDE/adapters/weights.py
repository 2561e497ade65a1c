"""Weights of models, as products take them; and those that other libraries have changed: quantized, offloaded, or with PEFT
adapters.

`READERS` has a function for each class of linear modules whose weights have a kind in `kernels/weights.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from TIDE.kernels.weights import Dense, Weight

FROM_OUTSIDE = "XLORA", "SHADOW", "POLY"  # kinds of adapters that need PEFT's own `forward`
SWITCHES = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"  # attributes of PEFT modules, besides weights


def read_linear(module: nn.Linear) -> Weight | None:
    """Return the weight of a linear module, in place; None if it is no contiguous tensor in memory."""
    return Dense(module.weight) if holds_numbers(module.weight) and module.weight.is_contiguous() else None


READERS: dict[type[nn.Module], Callable[[Any], Weight | None]] = {nn.Linear: read_linear}


def holds_numbers(weight: Any) -> bool:
    """Return True if a weight is a plain tensor in memory: not quantized, not offloaded."""
    return type(weight.data) is torch.Tensor and weight.is_floating_point() and not weight.is_meta


def has_no_weights(model: nn.Module) -> bool:
    """Return True if weights were never loaded. Those that accelerate has offloaded are on the device meta, too."""
    is_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    return not is_offloaded and all(weight.is_meta for weight in model.parameters())


def version(weight: torch.Tensor) -> int | None:
    """Return the count of in-place changes of a tensor, without those through `.data`; None if torch keeps no count."""
    return None if weight.is_inference() else weight._version


def state_of(weight: Weight) -> tuple[Any, ...]:
    """Return what differs if a weight is another one, or has changed in place."""
    return tuple((id(own), own.data_ptr(), version(own)) for own in weight if isinstance(own, torch.Tensor))


def is_quantized(model: nn.Module) -> bool:
    """Return True if transformers quantized the model, or any weight is not a float of two bytes or more."""
    if getattr(model, "hf_quantizer", None) is not None:
        return True
    return any(
        type(weight.data) is not torch.Tensor or not weight.is_floating_point() or weight.element_size() == 1
        for weight in model.parameters()
    )


def is_stock(*modules: nn.Module) -> bool:
    """Return True if all modules are classes of torch or transformers, not wrappers of other libraries."""
    return all(type(module).__module__.split(".")[0] in ("torch", "transformers") for module in modules)


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside a `PeftModel`, with its adapters; any other model as it is."""
    if not any(kind.__module__.startswith("peft.") for kind in type(model).__mro__):
        return model
    for name, config in model.peft_config.items():
        from_outside = getattr(config, "is_prompt_learning", False) or config.peft_type in FROM_OUTSIDE
        if from_outside or getattr(config, "alora_invocation_tokens", None) is not None:
            raise ValueError(
                f"adapter {name!r} is {config.peft_type}: it works from outside the model's layers, which TIDE does not see. "
                f"Expected adapters inside them, such as LoRA. Run this one with model.generate."
            )
    return model.get_base_model()


def adapter_state(module: nn.Module) -> tuple[Any, ...]:
    """Return the switches that, besides weights, decide what a PEFT module computes; empty for other modules."""
    if not type(module).__module__.startswith("peft."):
        return ()
    return tuple(_copy(getattr(module, name, None)) for name in SWITCHES)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
