"""The free memory of a GPU, including memory that PyTorch has reserved and does not use."""

from __future__ import annotations

import torch


def free_memory(device: torch.device) -> int:
    """Return the free memory in bytes."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused
