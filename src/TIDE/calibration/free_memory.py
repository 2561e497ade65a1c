"""How much of a GPU's memory is free, with what PyTorch holds without using it."""

from __future__ import annotations

import torch


def free_memory(device: torch.device) -> int:
    """In bytes."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
