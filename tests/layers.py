"""Decoder layers with random weights, and tokens for them."""

from __future__ import annotations

import torch

from TIDE.kernels.layer import GELU, GELU_TANH, MLP, SILU, Attention, Layer, Norm, Pass
from TIDE.kernels.weights import Dense

HIDDEN, HEADS, KV_HEADS, DIM, INNER, COLUMNS, ROWS = 24, 4, 2, 10, 38, 40, 3

FEATURES = [
    dict(),
    dict(bias=True),
    dict(head_norms=True),
    dict(head_norms=True, offset=1.0),
    dict(head_norms="all"),
    dict(scaling=0.7, residual=0.2),
    dict(window=3),
    dict(cap=0.8),
    dict(cap=0.8, window=3, scaling=0.7),
    dict(activation=GELU_TANH),
    dict(activation=GELU),
    dict(rotary=False),
    dict(eps=1e-2),
    dict(layer_norm=True),
    dict(layer_norm=True, shifted=True, bias=True),
    dict(mlp_bias=True),
    dict(gated=False),
    dict(gated=False, mlp_bias=True, activation=GELU_TANH),
    dict(gated=False, activation=GELU),
    dict(out_norms=True),
    dict(out_norms=True, offset=1.0, residual=0.4),  # Gemma 2 and 3
    dict(out_norms=True, in_norms=False, head_norms="all"),  # OLMo 2 and 3
    dict(parallel="one norm"),
    dict(parallel="one norm", layer_norm=True, shifted=True, gated=False, mlp_bias=True, bias=True),  # Phi
    dict(parallel="two norms", out_norms=True),
]


def a_layer(
    generator, *, heads=HEADS, bias=False, head_norms=False, shifted=False, offset=0.0, eps=1e-5, layer_norm=False,
    in_norms=True, out_norms=False, gated=True, mlp_bias=False, activation=SILU, parallel="", residual=1.0, **options,
):  # fmt: skip
    """A layer with random weights; its options are those of `FEATURES`."""

    def some(*shape, around=0.0):
        return around + 0.3 * torch.randn(*shape, generator=generator)

    def weight(rows, columns):
        return Dense(some(rows, columns))

    def maybe(wanted, *shape):
        return some(*shape) if wanted else torch.zeros(0)

    def a_norm(wanted, size, of_heads=False):
        weight = some(size, around=1.0) if wanted else torch.zeros(0)
        return Norm(weight, eps, offset, layer_norm and not of_heads, maybe(wanted and shifted and not of_heads, size))

    q, kv = heads * DIM, KV_HEADS * DIM
    attention = Attention(
        *[weight(size, HIDDEN) for size in (q, kv, kv)],
        weight(HIDDEN, q),
        *[maybe(bias, size) for size in (q, kv, kv, HIDDEN)],
        *[a_norm(head_norms, size if head_norms == "all" else DIM, of_heads=True) for size in (q, kv)],
        head_dim=DIM,
        **{"scaling": DIM**-0.5, **options},
    )
    mlp = MLP(
        *[weight(INNER if gated else 0, HIDDEN), weight(INNER, HIDDEN), weight(HIDDEN, INNER)],
        *[maybe(mlp_bias and gated, INNER), maybe(mlp_bias, INNER), maybe(mlp_bias, HIDDEN)],
        activation,
    )
    before, behind = a_norm(in_norms, HIDDEN), a_norm(out_norms, HIDDEN)
    mlp_norms = a_norm(in_norms and parallel != "one norm", HIDDEN), a_norm(out_norms, HIDDEN)
    return Layer(before, attention, behind, mlp_norms[0], mlp, mlp_norms[1], residual, bool(parallel))


def a_pass(generator, counts, starts, origins=None, rotary_dim=DIM):
    """Tokens of several rows: counts[row] of them from column starts[row] on; rows begin at random columns or at origins."""
    rows, columns, positions = [], [], []
    for row, count in counts.items():
        start = starts[row] if isinstance(starts, dict) else starts
        origin = int(torch.randint(0, start + 1, (1,), generator=generator)) if origins is None else origins[row]
        rows += [row] * count
        columns += range(start, start + count)
        positions += range(start - origin, start - origin + count)
    table = 6 * torch.rand(COLUMNS, rotary_dim // 2, generator=generator).repeat(1, 2)
    states = torch.randn(len(rows), HIDDEN, generator=generator)
    angles = torch.randperm(COLUMNS, generator=generator)[torch.arange(len(rows)) % COLUMNS]
    places, tables = map(torch.tensor, (rows, columns, positions)), torch.arange(ROWS, dtype=torch.int32)[:, None]
    return Pass(states, table.cos(), table.sin(), *places, angles, tables)


def in_blocks(cache, lengths, generator, size=64):
    """Tables and (2, blocks, heads, size, dim) K/V of a dense (2, rows, heads, columns, dim) cache, up to the lengths of its
    rows. Blocks are in no order, and what no row has is NaN."""
    rows, most = cache.shape[1], -(-cache.shape[3] // size)
    needed = [-(-length // size) for length in lengths]
    blocks = torch.randperm(sum(needed) + 2, generator=generator)
    paged = cache.new_full((2, len(blocks), cache.shape[2], size, cache.shape[4]), float("nan"))
    tables, taken = torch.zeros(rows, max(2, most), dtype=torch.int32), 0
    for row, count in enumerate(needed):
        for number in range(count):
            part = cache[:, row, :, number * size : min(lengths[row], (number + 1) * size)]
            tables[row, number] = blocks[taken]
            paged[:, blocks[taken], :, : part.shape[2]] = part
            taken += 1
    return tables, paged


def out_of_blocks(tables, paged, columns):
    """The dense cache of K/V in blocks."""
    whole = paged[:, tables.long()].transpose(2, 3).flatten(3, 4)  # (2, rows, heads, columns, dim)
    return whole[:, :, :, :columns]


def some_of(tokens, which):
    """The tokens of a pass that a mask or slice selects, alone; states are copied."""
    found = {name: getattr(tokens, name)[which] for name in ("rows", "columns", "positions", "angles")}
    return tokens._replace(x=tokens.x[which].clone(), groups=None, **found)


def grouped(tokens, most):
    """The same tokens, up to `most` of one row in a group."""
    found = []
    for row in tokens.rows.unique().tolist():
        own = (tokens.rows == row).nonzero()[:, 0].tolist()
        found += [own[first : first + most] for first in range(0, len(own), most)]
    table = torch.tensor([own + [-1] * (most - len(own)) for own in found], dtype=torch.int32)
    return tokens._replace(groups=table.to(tokens.rows.device))


def in_dtype(values, dtype, device="cpu"):
    """A layer or pass with its numbers in a dtype; nothing is shared."""
    if isinstance(values, torch.Tensor):
        return values.clone().to(device, dtype if values.is_floating_point() else torch.int32)
    return type(values)(*[in_dtype(own, dtype, device) for own in values]) if isinstance(values, tuple) else values
