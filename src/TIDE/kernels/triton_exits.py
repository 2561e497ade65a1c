"""What exits and the choice of tokens need on a GPU, in Triton; namesakes in `reference.py` say what is computed."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from TIDE.kernels.triton_products import _gained, _product, _tile, counted


@counted
def _peaks(x, weight, peaks, tokens_at, tokens, height, width, blocks, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr):
    """The best of a block of tokens, for each state. NaN counts as infinity, which is how the host notices."""
    block, place = tl.program_id(0), tl.arange(0, 16)
    rows = block * BN + tl.arange(0, BN)
    inside = rows < height
    logits = _product(x, weight, rows, inside, tokens, width, BN, BK, EVEN).to(x.dtype.element_ty).to(tl.float32)
    logits = tl.where(logits == logits, logits, float("inf"))
    logits = tl.where(inside[:, None], logits, float("-inf"))
    best = tl.max(logits, 0)
    first = tl.min(tl.where(logits == best[None, :], rows[:, None], height), 0)
    tl.store(peaks + place * blocks + block, best, mask=place < tokens)
    tl.store(tokens_at + place * blocks + block, first, mask=place < tokens)


@triton.jit
def _best(peaks, tokens_at, best, token, blocks, BLOCK: tl.constexpr):
    state, block = tl.program_id(0), tl.arange(0, BLOCK)
    own = tl.load(peaks + state * blocks + block, mask=block < blocks, other=float("-inf"))
    highest = tl.max(own, 0)
    at = tl.load(tokens_at + state * blocks + block, mask=block < blocks, other=0)
    tl.store(best + state, highest)
    tl.store(token + state, tl.min(tl.where((own == highest) & (block < blocks), at, 2147483647), 0).to(tl.int64))


def best_tokens(x: torch.Tensor, weight: torch.Tensor, best: torch.Tensor, token: torch.Tensor) -> None:
    """Logits themselves are never written."""
    (height, width), tile = weight.shape, _tile(weight, 64, 256, 4)
    blocks = triton.cdiv(height, tile.rows)
    peaks, at = x.new_empty(len(x), blocks, dtype=torch.float32), x.new_empty(len(x), blocks, dtype=torch.int32)
    _peaks[(blocks,)](
        x, weight, peaks, at, len(x), height, width, blocks, tile.rows, tile.columns, tile.even,
        num_warps=4, num_stages=tile.stages,
    )  # fmt: skip
    _best[(len(x),)](peaks, at, best, token, blocks, triton.next_power_of_2(blocks), num_warps=4)


@triton.jit
def _centred(
    table, rows, center, spread, out, stride, out_stride, width, eps,
    HAS_ROWS: tl.constexpr, CENTRE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    row, known = token.to(tl.int64), column < width
    if HAS_ROWS:
        row = tl.load(rows + token).to(tl.int64)
    states = tl.load(table + row * stride + column, mask=known, other=0.0).to(tl.float32)
    states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    if CENTRE:
        states -= tl.load(center + column, mask=known, other=0.0).to(tl.float32)
        states /= tl.load(spread + column, mask=known, other=1.0).to(tl.float32)
    tl.store(out + token * out_stride + column, states.to(out.dtype.element_ty), mask=known)


def centred(
    table: torch.Tensor,
    rows: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    center: torch.Tensor | None = None,
    spread: torch.Tensor | None = None,
) -> None:
    width = table.shape[1]
    _centred[(len(out),)](
        table, table if rows is None else rows, table if center is None else center, table if spread is None else spread,
        out, table.stride(0), out.stride(0), width, eps,
        rows is not None, center is not None, triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@triton.jit
def _outward(x, center, spread, weight, start, table, out, width, eps, OFFSET: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    known = column < width
    states = tl.load(x + column, mask=known, other=0.0).to(tl.float32)
    states *= tl.load(spread + column, mask=known, other=0.0).to(tl.float32)
    states += tl.load(center + column, mask=known, other=0.0).to(tl.float32)
    guess = states.to(out.dtype.element_ty)
    tl.store(table + (tl.load(start).to(tl.int64) + 1) * width + column, guess, mask=known)
    states = guess.to(tl.float32)
    states *= tl.rsqrt(tl.sum(states * states, 0) / width + eps)
    factor = tl.load(weight + column, mask=known, other=0.0)
    tl.store(out + column, _gained(states, factor, OFFSET, out.dtype.element_ty), mask=known)


def outward(
    x: torch.Tensor,
    center: torch.Tensor,
    spread: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    start: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    out, width = torch.empty_like(x), x.shape[1]
    _outward[(1,)](x, center, spread, weight, start, table, out, width, eps, offset, triton.next_power_of_2(width), num_warps=4)
    return out


@triton.jit
def _accept(found, best, tokens, starts, out, drafts):
    place = tl.arange(0, 16)
    said = tl.load(found + place, mask=place <= drafts, other=0)
    drafted = tl.load(tokens + 1 + place, mask=place < drafts, other=0)
    stood = tl.min(tl.where((place < drafts) & (said != drafted), place, drafts), 0)
    worst = tl.max(tl.load(best + place, mask=place <= drafts, other=0.0), 0)
    tl.store(out, tl.where(worst == float("inf"), -1, stood).to(tl.int64))
    tl.store(out + 1 + place, said, mask=place <= drafts)
    newest = tl.sum(tl.where(place == stood, said, 0), 0)
    at = tl.load(starts + place)
    tl.debug_barrier()
    tl.store(tokens, newest)
    tl.store(starts + place, at + stood + 1)


def accept(
    found: torch.Tensor, best: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, out: torch.Tensor, drafts: int
) -> None:
    _accept[(1,)](found, best, tokens, starts, out, drafts, num_warps=1)
