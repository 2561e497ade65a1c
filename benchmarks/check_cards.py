"""Shared memory of the Triton kernels on several cards, compiled ahead of time: no GPU of the kind is needed.

    PYTHONPATH=src python benchmarks/check_cards.py [--dtype bf16] [--dim 128] [--tokens 16] [--cards 75,80,90]

Compiles the products, projection and attention of a layer of Llama-3.1-8B's size (and with --dim 256 of Gemma's) for each
compute capability that the installed Triton knows, with the tiles of `TIDE.kernels.triton.tiles`. Prints the shared memory each
kernel uses against the card's limit, and fails if one is above it. bf16 is left out below 8.0.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # the interpreter does not compile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from TIDE.kernels.triton import attention as triton_attention
from TIDE.kernels.triton import exits as triton_exits
from TIDE.kernels.triton import ops as triton_ops
from TIDE.kernels.triton import products as triton_products
from TIDE.kernels.triton import prompt_attention as triton_prompt_attention
from TIDE.kernels.triton import tiles as cards
from TIDE.kernels.triton.launch import NUMBERS as ANY_NUMBERS
from TIDE.kernels.triton.launch import early, kernel
from TIDE.kernels.triton.tiles import Card

LIMITS = {  # compute capability -> KB of shared memory for a block, multiprocessors
    70: (96, 80),
    75: (64, 40),
    80: (163, 108),
    86: (99, 82),
    89: (99, 128),
    90: (227, 132),
    100: (227, 148),
    120: (99, 170),
}
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEIGHT = WIDTH = 4096
WHOLE = {
    "rows",
    "columns",
    "angles",
    "positions",
    "tables",
    "groups",
    "roots",
    "ancestors",
    "arrived",
    "vocabulary",
}  # arrays of int32
FLOATS = {"parts", "peaks", "sums"}  # arrays of fp32
NUMBERS = {"scale", "factor", "eps", "head_eps"}
SIZES = {
    *ANY_NUMBERS,  # kernels are compiled for any of these
    "height",
    "width",
    "heads",
    "kv_heads",
    "blocks",
    "stride_ancestors",
    "stride_block",
    "stride_head",
    "stride_column",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=[*BYTES])
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--tokens", type=int, default=16, help="of a pass")
    parser.add_argument("--cards", default=",".join(map(str, LIMITS)))
    args = parser.parse_args()
    print(f"triton {triton.__version__}, {args.dtype}, heads of {args.dim}, {args.tokens} tokens")
    fits = True
    for number in map(int, args.cards.split(",")):
        kilobytes, processors = LIMITS[number]
        card = Card((number // 10, number % 10), 1024 * kilobytes, processors)
        reason = cards.why_not(card, TORCH[args.dtype])
        fits &= check(number, card, args) if reason is None else not print(f"sm{number}  {reason}")
    sys.exit(not fits)


def check(number: int, card: Card, args: argparse.Namespace) -> bool:
    """Compile all kernels for a card and print a line of what they use; return if all compile and fit."""
    found, fits = [], True
    for name, (own, constants, tile) in launches(card, args.dtype, args.dim, args.tokens).items():
        try:
            constants["PDL"] = early(card, args.tokens).value
            used = int(compiled(own.compiled, constants, tile, args.dtype, number).metadata.shared)
        except Exception as problem:  # compilers refuse cards in many ways
            found.append(f"{name}: {type(problem).__name__} {str(problem).splitlines()[0][:60] if str(problem) else ''}")
            fits = False
            continue
        fits &= used <= card.shared_memory
        found.append(f"{name} {used / 1024:.0f}{'' if used <= card.shared_memory else ' TOO MUCH'}")
    print(f"sm{number}  {card.shared_memory // 1024:3} KB   " + "   ".join(found), flush=True)
    return fits


def launches(card: Card, dtype: str, dim: int, tokens: int) -> dict[str, tuple[kernel, dict[str, object], Any]]:
    """Return kernel, constants and tile by name, as `triton_ops` and its neighbours launch them."""
    size = BYTES[dtype]
    queries = max(16, min(4 * tokens, cards.most_queries(card, dim, size)))
    linear = cards.linear_tile(card, HEIGHT, WIDTH, size, tokens)
    tall = cards.linear_tile(card, 28672, WIDTH, size, tokens)
    gated, head = cards.gated_tile(card, 14336, WIDTH, size, tokens), cards.head_tile(card, 128256, WIDTH, size, tokens)
    project = cards.project_tile(card, HEIGHT, WIDTH, dim, size, tokens)
    seen = cards.attention_tile(card, dim, queries, size)
    long = cards.prompt_tile(card, dim)
    no_bias = {"HAS_BIAS": False}
    plain = {**no_bias, "HAS_BASE": True, "HAS_PLACES": False, "ACTIVATION": -1}
    whole = {"CHOSEN": False, "GATHERS": False}
    rotated = dict(SIZE=0, DIM=dim, ROTARY=dim)
    products, ops = triton_products, triton_ops
    return {
        "linear": (products._linear, {**plain, **tile_constants(linear)}, linear),
        "tall linear": (products._linear, {**plain, **tile_constants(tall)}, tall),
        "gated": (products._gated, {**no_bias, "ACTIVATION": 0, **tile_constants(gated)}, gated),
        "head": (triton_exits._peaks, {**whole, "SIGNALS": True, "STORE": True, **tile_constants(head)}, head),
        "project": (ops._project, {**no_bias, **rotated, **tile_constants(project, "HALF")}, project),
        "attend": (
            triton_attention._attend,
            dict(
                SIZE=0, WINDOW=0, BEGIN=0, CAP=0.0, DIM=dim, BLOCK=dim, SHARED=4, HEADS=4, COLUMNS=min(4 * tokens, queries),
                N=queries, TILE=seen.keys,
                CHUNK=triton_attention.CHUNK, MERGED=triton_attention.MERGED, IN_TURN=True, WHOLE=False, TREE=False,
            ),
            seen,
        ),
        "attend prompts": (
            triton_prompt_attention._attend_prompts,
            dict(
                SIZE=64, WINDOW=0, CAP=0.0, DIM=dim, BLOCK=dim, SHARED=4, HEADS=4, M=long.queries, TILE=long.keys,
                CHUNK=triton_attention.CHUNK,
            ),
            long,
        ),
    }  # fmt: skip


def tile_constants(tile: cards.Tile, rows: str = "BN") -> dict[str, object]:
    return dict(zip((rows, "BK", "TN", "EVEN", "ONCE"), tile.constants, strict=True))


def compiled(function: Any, constants: dict[str, object], tile: Any, dtype: str, number: int) -> Any:
    """Compile a kernel for a compute capability."""
    signature, attributes = {}, {}
    for index, name in enumerate(function.arg_names):
        signature[name] = "constexpr" if name in constants else type_of(name, dtype)
        if signature[name] != "constexpr" and name not in {*NUMBERS, *WHOLE, *ANY_NUMBERS}:
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": getattr(tile, "warps", 4), "num_stages": tile.stages}
    return triton.compile(ASTSource(function, signature, constants, attributes), GPUTarget("cuda", number, 32), options)


def type_of(name: str, dtype: str) -> str:
    if name in NUMBERS:
        return "fp32"
    if name in SIZES:
        return "i32"
    if name == "facts":
        return "*i64"
    return "*i32" if name in WHOLE else "*fp32" if name in FLOATS else f"*{dtype}"


if __name__ == "__main__":
    main()
