"""Probing a model: facts that the table lacks are read off the model and off one token run through it.

`known_family` returns the table's entry, `probe_family` derives one; `layer_stores` returns what each layer stores for later
tokens. Models whose layers cannot be skipped and caught up exactly are refused, with the reason.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from TIDE.adapters.table import FAMILIES, Family


class Store(Enum):
    """The kind of storage a layer has for the tokens it has seen."""

    KV = "K/V per position"
    STATE = "one running state"
    SHARED = "nothing: it reads another layer's K/V"


def known_family(model: PreTrainedModel) -> Family | None:
    """Return the table's entry for this model; None if there is none that fits."""
    config = model.config.get_text_config(decoder=True)
    family = FAMILIES.get(config.model_type)
    fits = family is not None and _is_layer_list(_submodule(model, family.layers), config.num_hidden_layers)
    return family if fits else None


def probe_family(model: PreTrainedModel) -> Family:
    """Derive the table's entry for a model from its modules and from running one token."""
    config = model.config.get_text_config(decoder=True)
    path = _find_layers(model, config.num_hidden_layers)
    return Family(path, _tuple_size(model, model.get_submodule(path)))


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of a model's inputs. Weights that accelerate keeps on disk have no device until they are used."""
    own = model.device
    if own.type != "meta":
        return own
    hooks = (getattr(module, "_hf_hook", None) for module in model.modules())
    places = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((place for place in places if place is not None), "cpu"))


def layer_stores(model: PreTrainedModel) -> tuple[Store, ...]:
    """Return the storage of each decoder layer, read off the cache that transformers would build for the model."""
    config = model.config.get_text_config(decoder=True)
    count, modes = config.num_hidden_layers, getattr(config, "kv_sharing_modes", None) or []
    found: list[Store] = []
    for index, layer in enumerate(DynamicCache(config=model.config).layers[:count]):
        if modes[index : index + 1] == ["reuse"]:  # from 5.23 on; before, the cache had no such layers
            break
        kind = _store_of(layer)
        if kind is None:
            raise ValueError(
                f"layer {index} of {type(model).__name__} keeps a {type(layer).__name__}, which TIDE cannot write by "
                f"position. Expected K/V per position or a linear-attention state. Run this model with "
                f"model.generate, or add the store to TIDE/engine/cache/cache_layers.py."
            )
        found.append(kind)
    return tuple(found) + (Store.SHARED,) * (count - len(found))


def shared_sources(model: PreTrainedModel, stores: tuple[Store, ...]) -> dict[str, int]:
    """Map each layer type to the layer whose K/V the sharing layers of that type read."""
    if Store.SHARED not in stores:
        return {}
    types = model.config.get_text_config(decoder=True).layer_types
    first_shared = stores.index(Store.SHARED)
    return {kind: index for index, kind in enumerate(types[:first_shared])}  # the last one of a type wins


def _store_of(layer: Any) -> Store | None:
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return Store.KV
    if type(layer) is LinearAttentionLayer and layer.number_of_states == 1:
        return Store.STATE
    return None


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _is_layer_list(module: nn.Module | None, count: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == count


def _find_layers(model: PreTrainedModel, count: int) -> str:
    """Return the path of the decoder's layer list: the outermost ModuleList with one entry per layer."""
    decoder = model.get_decoder()
    name_of = {id(module): name for name, module in model.named_modules()}
    inside = [name for name, module in decoder.named_modules() if _is_layer_list(module, count)]
    anywhere = [name for name, module in model.named_modules() if _is_layer_list(module, count)]
    if inside and id(decoder) in name_of:
        return f"{name_of[id(decoder)]}.{_outermost(inside)}".strip(".")
    if anywhere:
        return _outermost(anywhere)
    raise ValueError(
        f"no list of {count} decoder layers found in {type(model).__name__}: TIDE needs a ModuleList with one module for each "
        f"of the config's num_hidden_layers. Run this model with model.generate."
    )


def _outermost(paths: list[str]) -> str:
    return min(paths, key=lambda name: name.count("."))


@torch.no_grad()
def _tuple_size(model: PreTrainedModel, layers: nn.Module) -> int:
    """Return the size of the tuple that the first layer returns, seen on one token; 0 if it returns no tuple."""
    seen: list[int] = []
    first = layers.get_submodule("0")
    hook = first.register_forward_hook(lambda _, args, out: seen.append(len(out) if isinstance(out, tuple) else 0))
    try:
        model(input_ids=torch.zeros(1, 1, dtype=torch.long, device=input_device(model)), use_cache=False)
    finally:
        hook.remove()
    if not seen:
        raise ValueError(f"{type(model).__name__} did not run its first decoder layer when called. Run it with model.generate.")
    return seen[0]
