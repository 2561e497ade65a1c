"""Small tables on their way to a device and back, without the host waiting longer than it must.

A copy from ordinary memory begins when the device has done everything it was given before, and the host waits for that. From
pinned memory it is queued like any other work, so the host can go on launching.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table of the host on a device."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def write(target: torch.Tensor, table: torch.Tensor) -> None:
    """Write a table of the host to a tensor on a device."""
    table = table.to(target.dtype)  # a copy to another dtype would go through ordinary memory
    target.copy_(table.pin_memory() if target.is_cuda else table, non_blocking=True)


def read_later(found: torch.Tensor) -> Callable[[], np.ndarray]:
    """Copy numbers to the host; who asks for them waits for what was launched so far, and not for what comes next."""
    if not found.is_cuda:
        return found.numpy
    copy, event = torch.empty(found.shape, dtype=found.dtype, pin_memory=True), torch.cuda.Event()
    copy.copy_(found, non_blocking=True)
    event.record()

    def read() -> np.ndarray:
        event.synchronize()
        return copy.numpy()

    return read
