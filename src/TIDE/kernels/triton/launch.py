"""Launches of Triton kernels, which may begin before the kernel ahead of them has ended.

Between two kernels of a round a GPU would stand idle: until all programs of the first have ended and those of the second have
begun. Cards that can (`tiles.overlaps`) launch the second one early, and its programs wait where it matters:

    first     loads … products … │lets the next one begin│ stores, ends
    second                        begins, fetches weights, │waits for the first│ loads … products … stores

Every kernel with `@kernel` calls `begin(PDL)` in every program, before it loads or stores anything and before it can return. A
kernel ends after all of its programs have waited, so whoever has waited for one kernel has waited for all before it. Kernels of
torch and copies begin when everything before them has ended, and are waited for to their end.

    PDL         the kernel is launched early (programmatic dependent launch, as CUDA calls it)
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from TIDE.kernels.triton.tiles import NARROW, Card, card_of, overlaps

# When a kernel lets the next one begin, PDL: never, once it has waited itself, or after its loop, if it has a long one.
NEVER, AFTER, LATE = (tl.constexpr(value) for value in range(3))
AHEAD = tl.constexpr(2)  # tiles of its weights that a product fetches into the L2 cache before it waits
LINE = tl.constexpr(32)  # bytes that one instruction fetches at least

# One binary for any number of tokens, and for any place of a round's small buffers.
NUMBERS = [
    "tokens",
    "asking",
    "drafts",
    "all_rows",
    "stride_table",
    "stride_group",
    "stride_member",
    "chunks",
    "together",
    "each",
]
BUFFERS = [
    "places",
    "groups",
    "ring",
    "limits",
    "starts",
    "steps",
    "rows",
    "columns",
    "positions",
    "angles",
    "tables",
    "best",
    "token",
    "score",
    "scores",
]


class kernel:
    """A Triton kernel that begins with `begin(PDL)`. Its first parameter has a row for each token that runs; the last one, PDL,
    is set by their number and the card that it is launched on.

    Attributes:
        compiled: the kernel as Triton knows it.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.compiled: Any = triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=BUFFERS)(function)
        self._is_interpreted = not isinstance(self.compiled, JITFunction)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(first: torch.Tensor, *given: Any, **options: Any) -> None:
            when = NEVER if self._is_interpreted else early(card_of(first.device), len(first))
            if when is NEVER:
                self.compiled[grid](first, *given, PDL=NEVER.value, **options)
            else:
                self.compiled[grid](first, *given, PDL=when.value, launch_pdl=True, **options)

        return launch


def early(card: Card, tokens: int) -> tl.constexpr:
    """Return when a kernel for a number of tokens lets the next one begin. With many tokens programs that wait take room from
    those that work."""
    if not overlaps(card) or tokens > 2 * NARROW:
        return NEVER
    return LATE if tokens <= NARROW else AFTER


@triton.jit
def begin(PDL: tl.constexpr, LOOPS: tl.constexpr = False):
    """Wait until all kernels before have ended and their results can be read. A kernel that LOOPS calls `looped` later."""
    if PDL != NEVER:
        tl.extra.cuda.gdc_wait()
        if PDL == AFTER or not LOOPS:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def looped(PDL: tl.constexpr):
    """Let the next kernel begin: what is left takes little of the card."""
    if PDL == LATE:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch(weight, rows, inside, width, BK: tl.constexpr, PDL: tl.constexpr):
    """Fetch the first tiles of some rows of a weight into the L2 cache. Nothing is read, so this need not wait for anything."""
    if PDL != NEVER:
        STEP: tl.constexpr = LINE * 8 // weight.dtype.element_ty.primitive_bitwidth
        start = weight + rows.to(tl.int64)[:, None] * width
        for tile in tl.static_range(AHEAD):
            column = tile * BK + tl.arange(0, BK // STEP if BK > STEP else 1) * STEP
            there = (inside[:, None] & (column < width)[None, :]).to(tl.int32)
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r",
                [start + column[None, :], there],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
