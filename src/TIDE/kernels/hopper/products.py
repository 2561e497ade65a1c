"""Products of long passes on GPUs of compute capability 9.0, in Gluon, Triton's lower layer: the same bits as
`triton/products.py`, with loads and products under way at once, by programs that stay.

    loader      one warp; it brings tiles of two weights and of the tokens into shared memory as soon as there is room
    part        four warps with 64 tokens; a program has two or three of them, which share the tiles of weights
    ready       barriers: tiles are in shared memory
    free        barriers: all parts have multiplied them

A program takes one tile of the result after the other, and the next one's weights load while the last one is written.
The two weights are gate and up, or two blocks of rows of one weight.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from TIDE.kernels.hopper.tiles import barrier, load_tile, tiles_of
from TIDE.kernels.layer import MLP
from TIDE.kernels.triton import tiles as cards
from TIDE.kernels.triton.tiles import PartsTile

PART = gl.constexpr(cards.PART)  # tokens of four warps
STEP = gl.constexpr(64)  # columns of a tile


def gated_in_parts(x: torch.Tensor, mlp: MLP, tile: PartsTile) -> torch.Tensor:
    """Return what `mlp_inner` does."""
    out = x.new_empty(len(x), mlp.gate.rows)
    _launch(x, (mlp.gate.values, mlp.up.values), (mlp.gate_bias, mlp.up_bias), out, tile, 1.0, True, False, mlp.activation)
    return out


def linear_in_parts(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor, tile: PartsTile,
    scale: float, has_base: bool, activation: int | None,
) -> None:  # fmt: skip
    """Write products to `out`: in place of what is there, or added to it."""
    activation = -1 if activation is None else activation
    _launch(x, (weight, weight), (bias, bias), out, tile, scale, False, has_base, activation)


def _launch(x, weights, biases, out, tile, scale, is_gated, has_base, activation) -> None:
    has_bias = len(biases[0]) > 0
    of_weights = (tiles_of(weight, tile.rows, STEP.value) for weight in weights)
    first_bias, second_bias = biases if has_bias else (x, x)
    _products[(tile.programs,)](
        tiles_of(x, PART.value, STEP.value), *of_weights, first_bias, second_bias, out, len(x), *weights[0].shape, scale,
        is_gated, has_bias, has_base, activation, tile.parts, tile.rows, tile.stages, num_warps=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def _products(
    x_tiles, first_tiles, second_tiles, first_bias, second_bias, out, tokens, height, width, scale,
    GATED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_BASE: gl.constexpr, ACTIVATION: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply tokens with two sets of rows: of two weights, or of one weight."""
    dtype: gl.constexpr = out.dtype.element_ty
    states = gl.allocate_shared_memory(dtype, [STAGES * PARTS, PART, STEP], x_tiles.layout)
    weights = gl.allocate_shared_memory(dtype, [STAGES * 2, ROWS, STEP], first_tiles.layout)
    ready, free = stage_barriers(PARTS, STAGES)
    given = (first_bias, second_bias, out, tokens, height, width, scale, states, weights, ready, free)
    tiles = (x_tiles, first_tiles, second_tiles, tokens, height, width, states, weights, ready, free)
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_part, (given, 0, GATED, HAS_BIAS, HAS_BASE, ACTIVATION, PARTS, ROWS, STAGES)),
                (_part, (given, 1, GATED, HAS_BIAS, HAS_BASE, ACTIVATION, PARTS, ROWS, STAGES)),
                (_load, (tiles, GATED, PARTS, ROWS, STAGES)),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_part, (given, 0, GATED, HAS_BIAS, HAS_BASE, ACTIVATION, PARTS, ROWS, STAGES)),
                (_part, (given, 1, GATED, HAS_BIAS, HAS_BASE, ACTIVATION, PARTS, ROWS, STAGES)),
                (_part, (given, 2, GATED, HAS_BIAS, HAS_BASE, ACTIVATION, PARTS, ROWS, STAGES)),
                (_load, (tiles, GATED, PARTS, ROWS, STAGES)),
            ],
            [4, 4, 1], [160, 160, 24],
        )  # fmt: skip


@gluon.jit
def stage_barriers(PARTS: gl.constexpr, STAGES: gl.constexpr):
    """Return the barriers of all stages."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=PARTS)
    fence_async_shared()
    barrier()
    return ready, free


@gluon.jit
def _places(tile, tokens, height, GATED: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr):
    """Return a tile's first token, and the first row of both sets. The last tokens, which may be few, come last."""
    sets: gl.constexpr = ROWS if GATED else 2 * ROWS
    whole, blocks = tokens // (PARTS * PART), gl.cdiv(height, sets)
    group, block = whole, tile - whole * blocks
    if block < 0:
        group, block = tile % whole, tile // whole
    return group * (PARTS * PART), block * sets, block * sets if GATED else block * sets + ROWS


@gluon.jit
def _count(tokens, height, GATED: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr):
    """Return how many tiles the result has."""
    return gl.cdiv(tokens, PARTS * PART) * gl.cdiv(height, ROWS if GATED else 2 * ROWS)


@gluon.jit
def _load(given, GATED: gl.constexpr, PARTS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Load tiles, each when all parts have multiplied the one that was in its place. Behind an array's end there are zeros."""
    x_tiles, first_tiles, second_tiles, tokens, height, width, states, weights, ready, free = given
    at = 0
    for tile in range(gl.program_id(0), _count(tokens, height, GATED, PARTS, ROWS), gl.num_programs(0)):
        token, first, second = _places(tile, tokens, height, GATED, PARTS, ROWS)
        load_tiles(
            x_tiles, first_tiles, second_tiles, token, first, second, width, states, weights, ready, free, at,
            PARTS, ROWS, STAGES,
        )  # fmt: skip
        at += gl.cdiv(width, STEP)


@gluon.jit
def load_tiles(
    x_tiles, first_tiles, second_tiles, token, first, second, width, states, weights, ready, free, at,
    PARTS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load what one tile of the result is made of; the steps before it were `at`."""
    for column in range(0, width, STEP):
        stage = at % STAGES
        bar = ready.index(stage)
        mbarrier.wait(free.index(stage), at // STAGES & 1 ^ 1)
        mbarrier.expect(bar, 2 * STEP * (2 * ROWS + PARTS * PART))
        load_tile(first_tiles, [first, column], bar, weights.index(2 * stage))
        for part in gl.static_range(PARTS):
            load_tile(x_tiles, [token + part * PART, column], bar, states.index(stage * PARTS + part))
        load_tile(second_tiles, [second, column], bar, weights.index(2 * stage + 1))
        at += 1


@gluon.jit
def products_of(
    states, weights, ready, free, at, width, none, OWN: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Return the products of 64 tokens with both sets of rows, summed from `none` in the order of columns."""
    one, two = none, none
    for column in range(0, width, STEP):
        stage = at % STAGES
        mbarrier.wait(ready.index(stage), at // STAGES & 1)
        own = states.index(stage * PARTS + OWN)
        one_to_be = warpgroup_mma(own, weights.index(2 * stage).permute((1, 0)), one, is_async=True)
        two_to_be = warpgroup_mma(own, weights.index(2 * stage + 1).permute((1, 0)), two, is_async=True)
        one, two = warpgroup_mma_wait(2, deps=(one_to_be, two_to_be))
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=column > 0)
        at += 1
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    return one, two


@gluon.jit
def let_pass(ready, free, at, width, STAGES: gl.constexpr):
    """Take no part in a tile."""
    for _column in range(0, width, STEP):
        mbarrier.wait(ready.index(at % STAGES), at // STAGES & 1)
        mbarrier.arrive(free.index(at % STAGES), count=1)
        at += 1


@gluon.jit
def _part(
    given,
    OWN: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_BASE: gl.constexpr, ACTIVATION: gl.constexpr,
    PARTS: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply 64 tokens of each tile with both sets of rows."""
    first_bias, second_bias, out, tokens, height, width, scale, states, weights, ready, free = given
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    none = gl.zeros((PART, ROWS), gl.float32, layout=SUMS)
    at = 0
    for tile in range(gl.program_id(0), _count(tokens, height, GATED, PARTS, ROWS), gl.num_programs(0)):
        token, first, second = _places(tile, tokens, height, GATED, PARTS, ROWS)
        token += OWN * PART
        if token < tokens:
            one, two = products_of(states, weights, ready, free, at, width, none, OWN, PARTS, STAGES)
            if GATED:
                _write_gated(one, two, first_bias, second_bias, out, token, first, tokens, height, HAS_BIAS, ACTIVATION)
            else:
                _write(one, first_bias, out, token, first, tokens, height, scale, HAS_BIAS, HAS_BASE, ACTIVATION)
                _write(two, first_bias, out, token, second, tokens, height, scale, HAS_BIAS, HAS_BASE, ACTIVATION)
        else:
            let_pass(ready, free, at, width, STAGES)
        at += gl.cdiv(width, STEP)


@gluon.jit
def _write(
    total, bias, out, token, first, tokens, height, scale,
    HAS_BIAS: gl.constexpr, HAS_BASE: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Write a tile of products, or add it to what is there."""
    kind: gl.constexpr = out.dtype.element_ty
    at, known, rows = _spots(total, token, first, tokens, height)
    if HAS_BIAS:
        total += gl.load(bias + rows, mask=rows < height, other=0.0).to(gl.float32)[None, :]
    if ACTIVATION >= 0:
        total = _activated(total.to(kind).to(gl.float32), ACTIVATION)
    if HAS_BASE:
        added = (total.to(kind).to(gl.float32) * scale).to(kind).to(gl.float32)
        total = gl.load(out + at, mask=known, other=0.0).to(gl.float32) + added
    gl.store(out + at, total.to(kind), mask=known)


@gluon.jit
def _write_gated(
    opened, raised, gate_bias, up_bias, out, token, first, tokens, height,
    HAS_BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """Write a tile of what gate lets through of up."""
    kind: gl.constexpr = out.dtype.element_ty
    at, known, rows = _spots(opened, token, first, tokens, height)
    if HAS_BIAS:
        opened += gl.load(gate_bias + rows, mask=rows < height, other=0.0).to(gl.float32)[None, :]
        raised += gl.load(up_bias + rows, mask=rows < height, other=0.0).to(gl.float32)[None, :]
    opened = _activated(opened.to(kind).to(gl.float32), ACTIVATION).to(kind).to(gl.float32)
    raised = raised.to(kind).to(gl.float32)
    gl.store(out + at, (opened * raised).to(kind), mask=known)


@gluon.jit
def _spots(total, token, first, tokens, height):
    """Return where a tile's results are, which of them are there, and their rows."""
    place = token + gl.arange(0, PART, layout=gl.SliceLayout(1, total.type.layout))
    rows = first + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, total.type.layout))
    at = place.to(gl.int64)[:, None] * height + rows[None, :]
    return at, (place < tokens)[:, None] & (rows < height)[None, :], rows


@gluon.jit
def _activated(x, ACTIVATION: gl.constexpr):
    """The same as in `triton/products.py`."""
    if ACTIVATION == 0:
        return x * (1 / (1 + gl.exp(-x)))
    if ACTIVATION == 1:
        return x * (1 / (1 + gl.exp(-(1.5957691216057308 * (x + 0.044715 * x * x * x)))))
    return 0.5 * x * (1 + gl.erf(x * 0.7071067811865476))
