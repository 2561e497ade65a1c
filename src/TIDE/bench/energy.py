"""Energy of an NVIDIA card, by NVML: the library of its driver counts millijoules (compute capability 7.0 and later)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

LIBRARY = "libnvidia-ml.so.1"


class EnergyMeter:
    """Reads the joules that a device has taken so far.

    Attributes:
        why_not: why there is nothing to read; None: there is.
    """

    def __init__(self, device: torch.device) -> None:
        self._handle = ctypes.c_void_p()
        self._library: Any = None
        self.why_not = self._open(device)

    def joules(self) -> float | None:
        """Return the joules since the driver was loaded; None where nothing counts them."""
        if self.why_not is not None:
            return None
        found = ctypes.c_ulonglong()
        error = self._library.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(found))
        if error:
            self.why_not = f"NVML does not count this card's energy (error {error})"
            return None
        return found.value / 1000

    def _open(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"joules are counted on NVIDIA cards, found a model on {device.type}"
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as problem:
            return f"NVML cannot be loaded: {problem}"
        name = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        error = self._library.nvmlInit_v2() or self._library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle))
        return f"NVML refuses the card {name.decode()} (error {error})" if error else None
