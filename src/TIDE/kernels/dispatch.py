"""Which compiled code serves a device and dtype."""

from __future__ import annotations

import functools
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch


def compiled_ops(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module with compiled layers, or None: then everything runs as torch has it."""
    if device.type != "cpu" or dtype != torch.float32 or os.environ.get("TIDE_NO_KERNELS") == "1" or not has_numba():
        return None
    from TIDE.kernels import cpu_ops  # takes a second, so it is imported where it is used

    return cpu_ops


@functools.cache
def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def compiled_exits(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """The module with compiled exits, or None."""
    if compiled_ops(device, dtype) is None:
        return None
    from TIDE.kernels import cpu_exits

    return cpu_exits


def arrays(values: Any) -> Any:
    """A named tuple with its tensors as numpy arrays, in place."""
    return values._replace(**{name: x.detach().numpy() for name, x in values._asdict().items() if isinstance(x, torch.Tensor)})
