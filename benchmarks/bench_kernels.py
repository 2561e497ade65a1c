"""What the kernels of a fused layer take for 1 to 128 tokens, and the share of copy bandwidth at which they read.

    python benchmarks/bench_kernels.py                            the layers of a Llama-3.1-8B, bf16, for a GPU
    python benchmarks/bench_kernels.py --rows 32 --tokens 32 64   tokens of 32 rows, one or two each
    python benchmarks/bench_kernels.py --context 8192 --tokens 1 8
    python benchmarks/bench_kernels.py --model tiny               a smoke test; on a CPU the references are timed

Each kernel runs once for every layer, replayed as one graph, so that weights come from memory and not from a cache. Prints a
table of microseconds a layer, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch

from bench_decode import SHAPES, copy_bandwidth, on_gpu, random_model, timed
from TIDE.adapters.layer_parts import layer_parts
from TIDE.kernels.dispatch import gpu_ops
from TIDE.kernels.layer import Layer, Pass, no_norm
from TIDE.kernels.reference import layers as reference

BLOCK = 64
WEIGHTS = {
    "project": ("q", "k", "v"),
    "o": ("o",),
    "inner": ("gate", "up"),
    "down": ("down",),
    "layer": ("q", "k", "v", "o", "gate", "up", "down"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=[*SHAPES])
    parser.add_argument("--layers", type=int, default=8, help="number of layers, more than caches hold")
    parser.add_argument("--context", type=int, default=200, help="tokens of a row before")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 16, 32, 64, 128], help="of all rows")
    args = parser.parse_args()
    model = random_model(args.model, num_hidden_layers=args.layers)
    layers = [layer_parts(layer, model.config) for layer in model.model.layers]
    ops = gpu_ops()[0] if on_gpu() else reference
    bandwidth, rows = copy_bandwidth() if on_gpu() else None, {}
    with torch.inference_mode():
        for tokens in args.tokens:
            rows[tokens] = measure(ops, layers, tokens, args, bandwidth)
            print(
                f"{tokens:3} tokens  " + "  ".join(f"{name} {took:.1f} {share}" for name, (took, share) in rows[tokens].items())
            )
    print(json.dumps(dict(vars(args), bandwidth=bandwidth, dtype=str(model.dtype), microseconds_and_share=rows)))


def measure(ops, layers: list[Layer], tokens: int, args: argparse.Namespace, bandwidth: float | None) -> dict:
    first, mlp = layers[0].attention, layers[0].mlp
    none = torch.zeros(0)
    device, dtype, hidden = first.q.values.device, first.q.dtype, first.q.columns

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    def numbers(values: torch.Tensor) -> torch.Tensor:
        return values.to(device, torch.int32)

    blocks = -(-(args.context + tokens) // BLOCK) + 1
    most = blocks * BLOCK
    h, q, inner = some(tokens, hidden), some(tokens, first.q.rows), some(tokens, mlp.gate.rows)
    kept = torch.zeros(2, len(layers), args.rows * blocks, first.kv_heads, BLOCK, first.head_dim, device=device, dtype=dtype)
    order = torch.arange(tokens)  # step by step, as in a round
    positions = numbers(args.context + order // args.rows)
    paged = numbers(torch.arange(args.rows * blocks).view(args.rows, blocks))
    places = numbers(order % args.rows), positions, positions, positions, paged, args.rows
    going = Pass(h.clone(), *some(2, most, first.head_dim), *places)
    each: dict[str, Callable[[Layer, torch.Tensor, torch.Tensor], object]] = {
        "norm": lambda layer, keys, values: ops.norm(h, layer.attention_norm),
        "project": lambda layer, keys, values: ops.project(layer.attention, going, h, keys, values),
        "attend": lambda layer, keys, values: ops.attend(layer.attention, going, q, keys, values, most),
        "o": lambda layer, keys, values: ops.add_linear(going.x, q, layer.attention.o, none, no_norm(none), 1.0),
        "inner": lambda layer, keys, values: ops.mlp_inner(h, layer.mlp),
        "down": lambda layer, keys, values: ops.add_linear(going.x, inner, layer.mlp.down, none, no_norm(none), 1.0),
        "layer": lambda layer, keys, values: ops.decoder_layer(layer, going, keys, values, most),
    }
    found = {}
    for name, kernel in each.items():
        run = replayed(lambda kernel=kernel: [kernel(layer, *kept[:, index]) for index, layer in enumerate(layers)])
        seconds = statistics.median(timed(run)[0] for _ in range(9))
        size = sum(weight_of(layer, part).nbytes for layer in layers for part in WEIGHTS.get(name, ()))
        if name in ("attend", "layer"):
            size += kept[:, :, :, :, 0].nbytes // blocks * args.context
        found[name] = 1e6 * seconds / len(layers), f"({size / seconds / bandwidth:.2f})" if bandwidth and size else ""
    return found


def weight_of(layer: Layer, name: str) -> torch.Tensor:
    return getattr(layer.attention if name in layer.attention._fields else layer.mlp, name).values


def replayed(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a graph, where there are graphs."""
    work()
    if not on_gpu():
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


if __name__ == "__main__":
    main()
