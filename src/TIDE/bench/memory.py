"""Peak memory while something runs: of the card, or of this process."""

from __future__ import annotations

import re
from pathlib import Path

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> None:
    """Begin anew: the peak is what is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif RESET.exists():
        RESET.write_text("5")  # proc(5): resets the peak resident set size


def peak_gib(device: torch.device) -> float | None:
    """Return the highest use since, in GiB: on a card what torch has allocated, otherwise the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    found = re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text("utf-8")) if STATUS.exists() else None
    return int(found[1]) / 2**20 if found else None
