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
from TIDE.kernels.triton.tiles import card_of, why_not

NEEDS = {  # by kind of device: the compiler, and the dtypes there is code for
    "cpu": ("numba", (torch.float32,)),
    "cuda": ("triton", (torch.float32, torch.float16, torch.bfloat16)),
}


def compiled_ops(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module with compiled layers; None if there is none and models run their own modules."""
    products = _module(device, dtype, "cpu.products", None)
    if products is not None and not products.is_compiled():
        compile_ahead()
    return _module(device, dtype, "cpu.ops", "triton.ops")


def compiled_exits(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """Return the module with compiled exits for a CPU, or None."""
    return _module(device, dtype, "cpu.exits", None)


def compiled_screen() -> ModuleType:
    """Return the module that finds the best token of a large LM head on a CPU."""
    return importlib.import_module("TIDE.kernels.cpu.screen")


def compiled_sampling(device: torch.device) -> ModuleType:
    """Return the module that chooses tokens on the host: compiled on a CPU, in torch otherwise."""
    return _module(device, torch.float32, "cpu.sampling", None) or importlib.import_module("TIDE.kernels.reference.sampling")


def compiled_rounds() -> tuple[ModuleType, ModuleType]:
    """Return what a GPU has beside its layers: the modules with exits and acceptance, and with sampling."""
    return importlib.import_module("TIDE.kernels.triton.exits"), importlib.import_module("TIDE.kernels.triton.sampling")


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


def missing_compiler(device: torch.device) -> str | None:
    """Say which package the compiled layers of a device need and lack; None: nothing is missing."""
    package, _ = NEEDS.get(device.type, (None, ()))
    trouble = None if package is None else _trouble(package)
    if trouble is None:
        return None
    return f"{package} {trouble}, without which TIDE is about as fast as model.generate. Install it: pip install -U {package}"


def _module(device: torch.device, dtype: torch.dtype, cpu: str, gpu: str | None) -> ModuleType | None:
    """Import the module for a device: compilers take a second to import, so only those that are used are."""
    name = cpu if device.type == "cpu" else gpu
    if name is None or why_no_kernels(device, dtype) is not None:
        return None
    return importlib.import_module(f"TIDE.kernels.{name}")


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
