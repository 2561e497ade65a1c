"""The size of router files, by arithmetic: heads of large models are built without memory, on the meta device."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from families import build
from router_files import a_file
from TIDE.routing.exits import Exit
from TIDE.routing.heads import build_head, head_sizes
from TIDE.routing.router import SIGNALS, Router
from TIDE.routing.storage import compress

# the sizes of Qwen2.5-1.5B
SHAPES = {
    "1.5 B": LlamaConfig(
        hidden_size=1536, intermediate_size=8960, num_attention_heads=12, num_key_value_heads=2, vocab_size=151936
    ),
}


def stored_bytes(exits: dict[int, Exit], vocabulary: int) -> int:
    """Return the bytes of all tensors of a file whose heads are in 8 bits."""
    heads = compress({name: one for depth, own in exits.items() for name, one in own.head_tensors(depth).items()})
    routers = {name: one for depth, own in exits.items() for name, one in own.router_tensors(depth).items()}
    return sum(tensor.nbytes for tensor in (heads | routers).values()) + 4 * vocabulary


def an_exit(config: LlamaConfig, depth: int) -> Exit:
    with torch.device("meta"):
        head = build_head("memory", head_sizes("memory", config, config.hidden_size, depth)).bfloat16()
        return Exit(head, Router(config.hidden_size, 128, SIGNALS), 0.5)


def test_the_bytes_of_a_file_are_those_of_its_tensors(tmp_path):
    file, path = a_file(build("llama"), "memory", (0, 2), 0.5, torch.arange(64)), tmp_path / "router.safetensors"
    for own in file.exits.values():
        own.head.bfloat16()
    file.save(path, compress=True)
    described = path.stat().st_size - stored_bytes(file.exits, 64)
    assert 0 < described < 10_000, "names, sizes and figures"


@pytest.mark.parametrize("depth", [0, 4])
def test_an_exit_of_a_model_of_one_and_a_half_billion_weights_takes_at_most_40_mb(depth):
    found = stored_bytes({depth: an_exit(SHAPES["1.5 B"], depth)}, 65536)
    assert 30e6 < found <= 40e6, found
