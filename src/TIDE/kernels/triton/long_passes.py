"""The door to `hopper/`: long passes that its kernels take in place of Triton's. Nothing else imports them.

They are in Gluon, and have names of some versions of Triton: they are imported where they run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from TIDE.kernels.layer import MLP, Attention, Pass
from TIDE.kernels.triton.tiles import Card, PartsTile, card_of, parts_tile, project_parts_tile
from TIDE.kernels.weights import Weight

GLUON = ((3, 6), (3, 9))  # the first and the last version of Triton that kernels in Gluon were compiled with
HALF = 64  # queries of four warps, and keys of a tile


@functools.cache
def knows_gluon(version: str = triton.__version__) -> bool:
    """Return True if kernels in Gluon compile with a version of Triton: names differ between them."""
    return GLUON[0] <= tuple(int(part) for part in version.split(".")[:2]) <= GLUON[1]


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor, out: torch.Tensor, scale: float, has_base: bool, activation: int | None
) -> bool:
    """Write products to `out`, in place of what is there or added to it; False: this is no pass for it."""
    tile = _parts_tile(x, weight, is_gated=False)
    if tile is None:
        return False
    from TIDE.kernels.hopper.products import linear_in_parts

    linear_in_parts(x, weight.values, bias, out, tile, scale, has_base, activation)
    return True


def gated(x: torch.Tensor, mlp: MLP) -> torch.Tensor | None:
    """Return what `mlp_inner` does; None: this is no pass for it."""
    tile = _parts_tile(x, mlp.gate, is_gated=True)
    if tile is None:
        return None
    from TIDE.kernels.hopper.products import gated_in_parts

    return gated_in_parts(x, mlp, tile)


def project(
    attention: Attention, tokens: Pass, h: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    strides: tuple[int, ...], rotary: int,
) -> bool:  # fmt: skip
    """Write queries of the tokens that ask, and K/V of all, in place; False: this is no pass for it.

    Args:
        rotary: how many numbers of a head are rotated.
    """
    dim, weights = attention.head_dim, (attention.q.values, attention.k.values, attention.v.values)
    if not (_takes(h, *weights) and rotary in (0, dim)):
        return False
    sizes = attention.heads, attention.kv_heads, dim, h.element_size(), len(h), len(queries)
    tile = project_parts_tile(card_of(h.device), *sizes)
    if tile is None:
        return False
    from TIDE.kernels.hopper.project import project_in_parts

    project_in_parts(attention, tokens, h, queries, keys, values, strides, rotary, tile)
    return True


def attend(
    attention: Attention, tokens: Pass, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, factor: float,
    padded: int, chunk: int,
) -> torch.Tensor | None:  # fmt: skip
    """Return what `attend_prompts` does; None: this is no pass for it."""
    together = tokens.groups.shape[1]
    if not (queries.is_cuda and suits_halves(card_of(queries.device), attention, together, padded, keys.shape)):
        return None
    from TIDE.kernels.hopper.prompt_attention import attend_in_halves

    return attend_in_halves(tokens, queries, keys, values, factor, padded, chunk)


def suits_halves(card: Card, attention: Attention, together: int, padded: int, shape: Sequence[int]) -> bool:
    """Return True if `hopper/prompt_attention.py` takes groups of `together` tokens and blocks of K/V of a shape."""
    is_there = card.capability == (9, 0) and knows_gluon()
    is_plain = attention.window == 0 and attention.cap == 0 and attention.head_dim in (64, 128)
    return is_there and is_plain and shape[2] == HALF and padded <= HALF and together * padded % (2 * HALF) == 0


def _parts_tile(x: torch.Tensor, weight: Weight, is_gated: bool) -> PartsTile | None:
    """Return the tile with which `hopper/products.py` multiplies; None: it does not."""
    if not _takes(x, weight.values):
        return None
    return parts_tile(card_of(x.device), weight.rows, weight.values.element_size(), len(x), is_gated)


def _takes(*arrays: torch.Tensor) -> bool:
    """Return True if kernels in Gluon can read arrays: the copy engine wants rows at multiples of 16 bytes."""
    if not (arrays[0].is_cuda and knows_gluon()):
        return False
    return all(own.shape[-1] * own.element_size() % 16 == 0 and own.data_ptr() % 16 == 0 for own in arrays)
