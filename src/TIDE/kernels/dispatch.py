"""Which compiled code serves a device and dtype."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch

HALVES = torch.float16, torch.bfloat16


def compiled_ops(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module with compiled layers, or None: then everything runs as torch has it."""
    return _module(device, dtype, "cpu_ops", "triton_ops")


def compiled_exits(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module with compiled exits for a CPU, or None."""
    return _module(device, dtype, "cpu_exits", None)


def compiled_rounds() -> tuple[ModuleType, Any]:
    """What there is on a GPU beside its layers: the module with what rounds need, and `propagate`."""
    exits, propagation = (importlib.import_module(f"TIDE.kernels.triton_{name}") for name in ("exits", "propagate"))
    return exits, propagation.propagate


def _module(device: torch.device, dtype: torch.dtype, cpu: str, gpu: str | None) -> ModuleType | None:
    """Compilers take a second to import, so they are imported where they are used."""
    if os.environ.get("TIDE_NO_KERNELS") == "1":
        return None
    if device.type == "cpu" and dtype == torch.float32 and _has("numba"):
        return importlib.import_module(f"TIDE.kernels.{cpu}")
    if gpu and device.type == "cuda" and dtype in (torch.float32, *HALVES) and _has("triton"):
        return importlib.import_module(f"TIDE.kernels.{gpu}")
    return None


@functools.cache
def _has(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def arrays(values: Any) -> Any:
    """A named tuple with its tensors as numpy arrays, in place."""
    return values._replace(**{name: x.detach().numpy() for name, x in values._asdict().items() if isinstance(x, torch.Tensor)})
