"""Weights of models that others have changed: quantized, offloaded, or with adapters beside them (PEFT)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

FROM_OUTSIDE = "XLORA", "SHADOW", "POLY"  # kinds of adapters that PEFT's own `forward` feeds
SWITCHES = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"  # of PEFT's modules, beside their weights


def holds_numbers(weight: Any) -> bool:
    """Whether a weight is a plain tensor of numbers that are there: not quantized, not offloaded."""
    return type(weight.data) is torch.Tensor and weight.is_floating_point() and not weight.is_meta


def version(weight: torch.Tensor) -> int | None:
    """Counts changes of a tensor in place, though not those through `.data`; None where torch does not count them."""
    return None if weight.is_inference() else weight._version


def is_quantized(model: nn.Module) -> bool:
    """Whether transformers quantized it, or any weight is something else than numbers of two bytes or more."""
    if getattr(model, "hf_quantizer", None) is not None:
        return True
    return any(
        type(weight.data) is not torch.Tensor or not weight.is_floating_point() or weight.element_size() == 1
        for weight in model.parameters()
    )


def is_stock(*modules: nn.Module) -> bool:
    """Whether these are modules of torch or transformers, and nobody's wrappers around some."""
    return all(type(module).__module__.split(".")[0] in ("torch", "transformers") for module in modules)


def unwrapped(model: Any) -> Any:
    """The Hugging Face model inside a `PeftModel`, its adapters in place; any other model is itself."""
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
    """What decides, beside weights, how a module of PEFT's computes; nothing for other modules."""
    if not type(module).__module__.startswith("peft."):
        return ()
    return tuple(_copy(getattr(module, name, None)) for name in SWITCHES)


def _copy(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else list(value) if isinstance(value, list) else value
