"""Tiles of the Triton kernels, chosen by the card: pure functions of a `Card`, the shape of a weight, and the size of a number.

A kernel keeps `stages` tiles of its weights and of the 16 tokens in shared memory, so that the next ones load while one is
multiplied. The tiles wanted here are those that are fastest on cards with 227 KB (compute capability 9.0). Cards with less
get fewer stages, then narrower tiles. Cards with fewer multiprocessors get tall tiles sooner.

A tile depends on the card and the weight, never on the tokens: a token's bits do not depend on the tokens beside it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from TIDE.kernels.layer import MOST_TOKENS

SMALLEST = 16  # rows or columns of a tile that tensor cores take


class Card(NamedTuple):
    """A GPU, as far as the choice of tiles goes."""

    capability: tuple[int, int]  # compute capability
    shared_memory: int  # bytes that a block of threads may have
    processors: int  # multiprocessors


class Tile(NamedTuple):
    """The part of a weight that a program loads at a time."""

    rows: int
    columns: int
    stages: int  # tiles in shared memory
    even: bool  # the weight's width is a multiple of `columns`


class AttentionTile(NamedTuple):
    """The keys and values that a program of attention loads at a time."""

    keys: int
    stages: int


INTERPRETED = Card((9, 0), 227 * 1024, 132)  # Triton's interpreter runs the tiles of an H200


@functools.cache
def card_of(device: torch.device) -> Card:
    """Return the card of a device; without a GPU, the one that Triton's interpreter stands for."""
    if device.type != "cuda":
        return INTERPRETED
    properties: Any = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    return Card((properties.major, properties.minor), shared, properties.multi_processor_count)


def why_not(card: Card, dtype: torch.dtype) -> str | None:
    """Return why a card cannot run the kernels in a dtype, and what would help; None if it can."""
    if dtype == torch.bfloat16 and card.capability < (8, 0):
        major, minor = card.capability
        return (
            f"bfloat16 needs a GPU of compute capability 8.0 or later, and this one has {major}.{minor}. "
            f"Load the model in float16"
        )
    return None


def linear_tile(card: Card, height: int, width: int, size: int) -> Tile:
    """Return the tile of one product with a (height, width) weight; `size` is bytes per number."""
    return _tile(card, height, width, size, rows=32, columns=512, stages=5, weights=1)


def gated_tile(card: Card, height: int, width: int, size: int) -> Tile:
    """Return the tile of gate and up, two weights at once."""
    return _tile(card, height, width, size, rows=64, columns=256, stages=3, weights=2)


def head_tile(card: Card, height: int, width: int, size: int) -> Tile:
    """Return the tile of an LM head, whose logits are reduced in place."""
    return _tile(card, height, width, size, rows=64, columns=512, stages=4, weights=1)


def project_tile(card: Card, height: int, width: int, dim: int, size: int) -> Tile:
    """Return the tile of q, k and v: two sets of rows of one head, which are rotated together."""
    rows = 32 if height >= 16 * _programs(card) and dim >= 64 else 16
    columns, stages = _fit(card, rows, 512 // size, 4, size, weights=2)
    return Tile(rows, columns, stages, width % columns == 0)


def propagate_tile(card: Card, rows: int, width: int, size: int) -> Tile:
    """Return the tile of K/V of skipped layers: two sets of rows of one head."""
    columns, stages = _fit(card, rows, 128 // size, 2, size, weights=2)
    return Tile(rows, columns, stages, width % columns == 0)


def attention_tile(card: Card, dim: int, group: int, size: int) -> AttentionTile:
    """Return the tile of attention: `group` queries of `dim` numbers, both padded as the kernel pads them."""
    keys = 64 if size == 2 else 16
    stages = min(2, _most_stages(card))
    while attention_memory(keys, stages, dim, group, size) > card.shared_memory:
        if stages > 1:
            stages -= 1
        elif keys > SMALLEST:
            keys //= 2
        else:
            break
    return AttentionTile(keys, stages)


def product_memory(rows: int, columns: int, stages: int, size: int, weights: int) -> int:
    """Return the bytes of shared memory that a product needs: tiles of its weights and of the tokens."""
    return (weights * rows + MOST_TOKENS) * columns * size * stages


def attention_memory(keys: int, stages: int, dim: int, group: int, size: int) -> int:
    """Return the bytes of shared memory that attention needs: tiles of keys and values, and the queries."""
    return (2 * keys * stages + group) * dim * size


def _tile(card: Card, height: int, width: int, size: int, *, rows: int, columns: int, stages: int, weights: int) -> Tile:
    """Fit a tile of `columns` bytes to a card. Small weights have fewer rows, so that every multiprocessor has work."""
    while rows > SMALLEST and height < _programs(card) * rows:
        rows //= 2
    fitting, stages = _fit(card, rows, columns // size, stages, size, weights)
    return Tile(rows, fitting, stages, width % fitting == 0)


def _fit(card: Card, rows: int, columns: int, stages: int, size: int, weights: int) -> tuple[int, int]:
    """Return columns and stages that fit into shared memory: fewer stages first, at last narrower tiles."""
    stages = min(stages, _most_stages(card))
    while product_memory(rows, columns, stages, size, weights) > card.shared_memory:
        if stages > 2:
            stages -= 1
        elif columns > SMALLEST:
            columns //= 2
        else:
            stages = 1
            break
    return columns, stages


def _programs(card: Card) -> int:
    """Return how many programs keep a card busy: a power of two, about its multiprocessors."""
    return 1 << (card.processors.bit_length() - 1)


def _most_stages(card: Card) -> int:
    """Return the stages that pay: cards before 8.0 cannot copy to shared memory in the background."""
    return 5 if card.capability >= (8, 0) else 2
