"""The choice of compiled code by device and dtype."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from TIDE.kernels.cpu.compile import compile_ahead
from TIDE.kernels.interfaces import ExitOps, LayerOps, SamplingOps
from TIDE.kernels.layer import Layer
from TIDE.kernels.triton.tiles import card_of, why_not
from TIDE.kernels.weights import Dense, Weight

NEEDS = {  # by kind of device: the compiler, and the dtypes there is code for
    "cpu": ("numba", (torch.float32,)),
    "cuda": ("triton", (torch.float32, torch.float16, torch.bfloat16)),
}


def cpu_layers() -> ModuleType:
    """Return the module with compiled layers for a CPU, and begin to compile it."""
    if not importlib.import_module("TIDE.kernels.cpu.products").is_compiled():
        compile_ahead()
    return importlib.import_module("TIDE.kernels.cpu.ops")


def gpu_ops() -> tuple[LayerOps, ExitOps, SamplingOps]:
    """Return the modules of a GPU: with layers, with exits and acceptance, and with the choice of tokens."""
    from TIDE.kernels.triton import exits, ops, sampling

    return ops, exits, sampling


def compiled_exits(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module with compiled exits for a CPU, or None."""
    return _on_cpu(device, dtype, "exits")


def compiled_screen() -> ModuleType:
    """Return the module that finds the best token of a large LM head on a CPU."""
    return importlib.import_module("TIDE.kernels.cpu.screen")


def compiled_sampling(device: torch.device) -> ModuleType:
    """Return the module that chooses tokens on the host: compiled on a CPU, in torch otherwise."""
    return _on_cpu(device, torch.float32, "sampling") or importlib.import_module("TIDE.kernels.reference.sampling")


def why_no_kernels(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no compiled code serves a device and dtype, and what would change that; None: some does."""
    if os.environ.get("TIDE_BACKEND") == "modules":
        return "TIDE_BACKEND=modules is set"
    if device.type == "cuda" and os.environ.get("TIDE_NO_CUDA") == "1":
        return "TIDE_NO_CUDA=1 is set"
    if device.type not in NEEDS:
        return f"there are no compiled layers for {device.type}"
    if (trouble := wrong_dtype(device, dtype)) is not None:
        return trouble
    if device.type == "cuda" and torch.cuda.is_available() and (trouble := why_not(card_of(device), dtype)) is not None:
        return trouble
    return missing_compiler(device)


def wrong_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return which dtypes the compiled layers of a device are for, if this is none of them."""
    _, dtypes = NEEDS.get(device.type, (None, (dtype,)))
    if dtype in dtypes:
        return None
    return f"compiled layers on {device.type} are for {_names(dtypes)}, and the model is {_names([dtype])}"


def why_no_product(layers: Iterable[Layer], device: torch.device) -> str | None:
    """Return which weights of layers the compiled code of a device has no products for; None: it has all."""
    known = {Dense} if device.type == "cuda" else set(importlib.import_module("TIDE.kernels.cpu.products").PRODUCTS)
    kinds = {frozenset(type(part) for part in (*own.attention, *own.mlp) if isinstance(part, Weight)) for own in layers}
    if missing := sorted(kind.__name__ for kind in frozenset().union(*kinds) - known):
        return f"there are no products on {device.type} for its weights ({', '.join(missing)})"
    return "there are several kinds of weights in one layer" if any(len(own) > 1 for own in kinds) else None


def missing_compiler(device: torch.device) -> str | None:
    """Say which package the compiled layers of a device need and lack; None: nothing is missing."""
    package, _ = NEEDS.get(device.type, (None, ()))
    trouble = None if package is None else _trouble(package)
    if trouble is None:
        return None
    return f"{package} {trouble}, without which TIDE is about as fast as model.generate. Install it: pip install -U {package}"


def _on_cpu(device: torch.device, dtype: torch.dtype, name: str) -> ModuleType | None:
    """Import a module for a CPU: compilers take a second to import, so only those that are used are."""
    if device.type != "cpu" or why_no_kernels(device, dtype) is not None:
        return None
    return importlib.import_module(f"TIDE.kernels.cpu.{name}")


def _names(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


@functools.cache
def _trouble(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return "is not installed"
    try:
        importlib.import_module(package)
    except ImportError as problem:  # numba refuses a numpy that is newer than itself
        return f"cannot be imported ({problem})"
    return None


def arrays(values: Any) -> Any:
    """Return a named tuple with its tensors, and those of its parts, as numpy arrays that share their memory."""
    if isinstance(values, torch.Tensor):
        return values.detach().numpy()
    return type(values)(*map(arrays, values)) if isinstance(values, tuple) else values
