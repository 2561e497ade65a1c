"""Decoder layers with random weights, and tokens for them."""

from __future__ import annotations

import torch

from TIDE.kernels.layer import GELU, GELU_TANH, Layer, Pass

HIDDEN, HEADS, KV_HEADS, DIM, INNER, COLUMNS, ROWS = 24, 4, 2, 10, 38, 40, 3

FEATURES = [
    dict(),
    dict(bias=True),
    dict(norms=True),
    dict(norms=True, norm_offset=1.0),
    dict(scaling=0.7, residual=0.2),
    dict(window=3),
    dict(activation=GELU_TANH),
    dict(activation=GELU),
    dict(rotary=False),
    dict(eps=1e-2),
    dict(centred=True),
    dict(centred=True, shifted=True, bias=True),
]


def a_layer(generator, *, bias=False, norms=False, shifted=False, **features):
    def some(*shape, around=0.0):
        return around + 0.3 * torch.randn(*shape, generator=generator)

    def maybe(wanted, size):
        return some(size) if wanted else torch.zeros(0)

    q, kv = HEADS * DIM, KV_HEADS * DIM
    return Layer(
        *[some(HIDDEN, around=1.0) for _ in range(2)],
        *[some(size, HIDDEN) for size in (q, kv, kv)],
        some(HIDDEN, q),
        some(INNER, HIDDEN),
        some(INNER, HIDDEN),
        some(HIDDEN, INNER),
        *[maybe(bias, size) for size in (q, kv, kv, HIDDEN)],
        *[maybe(norms, DIM) for _ in range(2)],
        *[maybe(shifted, HIDDEN) for _ in range(2)],
        head_dim=DIM,
        **{"eps": 1e-5, "scaling": DIM**-0.5, **features},
    )


def a_pass(generator, rows, width, start, rotary_dim=DIM):
    angles = 6 * torch.rand(len(rows) * width, rotary_dim // 2, generator=generator).repeat(1, 2)
    states = torch.randn(len(rows) * width, HIDDEN, generator=generator)
    origins = torch.randint(0, start + 1, (len(rows),), generator=generator)
    return Pass(states, angles.cos(), angles.sin(), torch.tensor(rows), origins, start, width)


def in_dtype(values, dtype, device="cpu"):
    """A layer or pass with its numbers in a dtype, and what a GPU wants as tensors; nothing shared."""
    found = {
        name: x.clone().to(device, dtype if x.is_floating_point() else torch.int32)
        for name, x in values._asdict().items()
        if isinstance(x, torch.Tensor)
    }
    if "start" in values._fields:
        found["start"] = torch.tensor([values.start], dtype=torch.int32, device=device)
    return values._replace(**found)
