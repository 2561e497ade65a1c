"""Tiles of the Triton kernels, chosen by the card: pure functions of a `Card`, the shape of a weight, and the size of a number.

A kernel keeps `stages` tiles of its weights and of the tokens in shared memory, so that the next ones load while one is
multiplied. The tiles wanted here are those that are fastest on cards with 227 KB (compute capability 9.0). Cards with less
get fewer stages, then narrower tiles. Cards with fewer multiprocessors get tall tiles sooner.

A tile is as wide as the tokens: 16, 32, 64 or 128 of them; more are several tiles, of 256 tokens each where there are many. Its
rows, columns and stages follow that width. A token's bits do not depend on the tokens beside it, because they do not depend on
the tile: products are summed in the order of a weight's columns, whatever the step. What is summed over rows would depend on
it, so an LM head's tile has the same rows for any number of tokens, and the tile of skipped layers is always 16 tokens wide.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

SMALLEST = 16  # rows, columns or tokens of a tile that tensor cores take
MOST = 128  # tokens of a tile
MANY = 256  # and where there are many tiles of them
HALF = 0.55  # of a program's time, if it has half as many tokens
WIDEST = 512  # bytes of a tile's columns
FEW_ROWS = 16  # for each multiprocessor: weights with fewer rows are small
NARROW = 32  # tokens of a small weight's tile
PART = 64  # tokens of a part of a program that stays
SUMS = 128 * 128  # numbers that programs of attention sum up


class Card(NamedTuple):
    """A GPU, as far as the choice of tiles goes."""

    capability: tuple[int, int]  # compute capability
    shared_memory: int  # bytes that a block of threads may have
    processors: int  # multiprocessors


class Tile(NamedTuple):
    """The part of a weight that a program loads at a time, and the tokens that it multiplies it with."""

    rows: int
    columns: int
    stages: int  # tiles in shared memory
    even: bool  # the weight's width is a multiple of `columns`
    tokens: int
    groups: int  # of `tokens` each, with programs of their own
    warps: int

    @property
    def constants(self) -> tuple[int, int, int, bool, bool]:
        """Constants that kernels are compiled for: BN, BK, TN, EVEN and ONCE."""
        return self.rows, self.columns, self.tokens, self.even, self.groups == 1


class AttentionTile(NamedTuple):
    """The keys and values that a program of attention loads at a time."""

    keys: int
    stages: int
    warps: int


class PromptTile(NamedTuple):
    """The queries of a program of attention over long passes, and the keys that it loads at a time."""

    queries: int
    keys: int
    stages: int
    warps: int


class PartsTile(NamedTuple):
    """The tile of a product of a long pass, for programs that stay (`hopper/products.py`)."""

    parts: int  # of PART tokens each
    rows: int  # of each of two sets
    stages: int
    programs: int


class Shape(NamedTuple):
    """A tile of a tall weight on a card with 227 KB."""

    rows: int
    columns: int  # in bytes
    stages: int


# By the tokens of a tile. Those for 16 tokens and those of one product were measured on an H200; two weights at once have half
# the rows, so that their sums stay in registers.
LINEAR = {16: Shape(32, 512, 5), 32: Shape(64, 256, 4), 64: Shape(128, 128, 4), 128: Shape(128, 128, 3)}
GATED = {16: Shape(64, 256, 3), 32: Shape(64, 128, 5), 64: Shape(64, 128, 4), 128: Shape(64, 128, 3)}
# Tiles of programs that stay: parts, rows and stages, and the time that one takes, of that of the first.
PARTS = {(2, 128, 4): 1.0, (3, 128, 4): 1.5, (2, 64, 6): 0.52, (3, 64, 5): 0.78}
SMALL_GATED = Shape(16, 128, 4)  # small weights and more than 32 tokens
MANY_TOKENS = Shape(128, 128, 3)
HEAD = {16: Shape(64, 512, 4), 32: Shape(64, 256, 4), 64: Shape(64, 256, 4), 128: Shape(64, 256, 3)}
PROJECT = {16: Shape(32, 512, 4), 32: Shape(32, 256, 4), 64: Shape(32, 256, 3), 128: Shape(32, 128, 4)}
LONG_PROJECT = Shape(64, 128, 4)
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


def overlaps(card: Card) -> bool:
    """Return True if a kernel may be launched while the one before it still runs (`triton/launch.py`)."""
    return card.capability >= (9, 0)


@functools.lru_cache(4096)
def linear_tile(card: Card, height: int, width: int, size: int, tokens: int) -> Tile:
    """Return the tile of one product with a (height, width) weight; `size` is bytes per number."""
    if _many_tiles(card, height, size, tokens) >= _programs(card):
        return _tile(card, MANY_TOKENS, MANY_TOKENS.rows, width, size, tokens, weights=1, wide=MANY)
    wide = _wide(card, height, size, tokens)
    shape = LINEAR[wide]
    return _tile(card, shape, _rows(card, height, shape, wide // 2), width, size, tokens, weights=1, wide=wide)


@functools.lru_cache(4096)
def gated_tile(card: Card, height: int, width: int, size: int, tokens: int) -> Tile:
    """Return the tile of gate and up, two weights at once."""
    wide, blocks = tile_width(tokens), -(-height // MANY_TOKENS.rows)
    if _many_tiles(card, height, size, tokens) >= _programs(card) and _are_tall_quicker(card, blocks, tokens):
        return _tile(card, MANY_TOKENS, MANY_TOKENS.rows, width, size, tokens, weights=2)
    if wide > NARROW and _wide(card, height, size, tokens) == NARROW:
        return _tile(card, SMALL_GATED, SMALLEST, width, size, tokens, weights=2, wide=2 * NARROW)
    shape = GATED[wide]
    return _tile(card, shape, _rows(card, height, shape, wide // 4), width, size, tokens, weights=2)


@functools.lru_cache(4096)
def parts_tile(card: Card, height: int, size: int, tokens: int, is_gated: bool) -> PartsTile | None:
    """Return the tile of a product for programs that stay, the one with which the last of them ends soonest; `height` is that
    of gate or of up, if it has both. None: they do not suit the card, the dtype or so few tokens."""
    sets, times = 1 if is_gated else 2, {}
    if not _suits_parts(card, -(-height // (sets * MOST // 2)), size, tokens):
        return None
    for shape, time in PARTS.items():
        (whole, rest), blocks = divmod(tokens, PART * shape[0]), -(-height // (sets * shape[1]))
        tiles, last = (whole + (rest > 0)) * blocks, -(-rest // PART) / shape[0]
        are_few_last = rest > 0 and whole * blocks <= (_turns(card, tiles) - 1) * card.processors
        times[shape] = time * (_turns(card, tiles) - (1 - last) * are_few_last), tiles
    return _soonest(card, times)


@functools.lru_cache(4096)
def project_parts_tile(
    card: Card, heads: int, kv_heads: int, dim: int, size: int, tokens: int, asking: int
) -> PartsTile | None:
    """Return the tile of q, k and v for programs that stay, of which a set of rows is half a head; `asking` of the tokens have
    queries. None: they do not suit."""
    if dim != MOST or not _suits_parts(card, 2 * kv_heads + heads, size, tokens):
        return None
    times = {}
    for shape, time in PARTS.items():
        if shape[1] == dim // 2:
            asked, all_ = (-(-count // (PART * shape[0])) for count in (asking, tokens))
            tiles = heads * asked + 2 * kv_heads * all_
            times[shape] = time * _turns(card, tiles), tiles
    return _soonest(card, times)


def _suits_parts(card: Card, blocks: int, size: int, tokens: int) -> bool:
    """Return True if programs that stay are quicker than others, given the blocks of rows of the smallest tiles: where fewer
    than half of the processors have a tile, others have smaller ones."""
    return card.capability == (9, 0) and size == 2 and tokens > MOST and 2 * blocks * -(-tokens // MOST) > card.processors


def _soonest(card: Card, times: dict[tuple[int, int, int], tuple[float, int]]) -> PartsTile:
    """Return the tile with which the last of the programs that stay ends first, given times and numbers of tiles by shape."""
    (_, tiles), shape = min((found, shape) for shape, found in times.items())
    return PartsTile(*shape, min(tiles, card.processors))


def head_tile(card: Card, height: int, width: int, size: int, tokens: int) -> Tile:
    """Return the tile of an LM head, whose logits are reduced in place."""
    shape = HEAD[tile_width(tokens)]
    return _tile(card, shape, _rows(card, height, shape, SMALLEST), width, size, tokens, weights=1)


@functools.lru_cache(4096)
def project_tile(card: Card, height: int, width: int, dim: int, size: int, tokens: int) -> Tile:
    """Return the tile of q, k and v: two sets of rows of one head, which are rotated together."""
    wide = _wide(card, height, size, tokens)
    shape = PROJECT[wide]
    is_tall = dim >= 64 and (not _is_small(card, height) or tokens > (MOST if size == 2 else SMALLEST))
    rows = shape.rows if is_tall else SMALLEST
    if size == 2 and dim >= MOST and tokens >= 4 * MOST:
        return _tile(card, LONG_PROJECT, LONG_PROJECT.rows, width, size, tokens, weights=2)  # a whole head
    return _tile(card, shape, rows, width, size, tokens, weights=2, wide=wide)


def tile_width(tokens: int) -> int:
    """Return how many tokens a tile has: as few as hold all of them, or MOST."""
    return min(MOST, max(SMALLEST, 1 << (tokens - 1).bit_length()))


def attention_tile(card: Card, dim: int, queries: int, size: int) -> AttentionTile:
    """Return the tile of attention for `queries` queries of `dim` numbers, both padded as the kernel pads them."""
    keys = _keys(card, dim, size)
    return AttentionTile(keys, _stages(card, keys, dim, queries, size), 8 if dim * queries > MOST * 64 else 4)


def prompt_tile(card: Card, dim: int) -> PromptTile:
    """Return the tile of attention over long passes of prompts, for heads of `dim` numbers of half precision."""
    keys, queries = _keys(card, dim, 2), min(MOST // 2, most_queries(card, dim, 2))
    return PromptTile(queries, keys, _stages(card, keys, dim, queries, 2), 8 if queries * dim > MOST * 64 else 4)


def most_queries(card: Card, dim: int, size: int) -> int:
    """Return how many queries of `dim` numbers attention takes side by side: sums stay in registers, tiles in shared memory."""
    queries, keys = SUMS // dim, _keys(card, dim, size)
    while queries > SMALLEST and attention_memory(keys, 1, dim, queries, size) > card.shared_memory:
        queries //= 2
    return queries


def _keys(card: Card, dim: int, size: int) -> int:
    """Return the keys of a tile of attention. They do not depend on the queries: a token's bits depend on them."""
    keys = 64 if size == 2 else 16
    while keys > SMALLEST and attention_memory(keys, 1, dim, SMALLEST, size) > card.shared_memory:
        keys //= 2
    return keys


def _stages(card: Card, keys: int, dim: int, queries: int, size: int) -> int:
    """Return how many tiles of keys and values attention has in shared memory."""
    stages = min(3, _most_stages(card))
    while stages > 1 and attention_memory(keys, stages, dim, queries, size) > card.shared_memory:
        stages -= 1
    return stages


def product_memory(rows: int, columns: int, stages: int, size: int, weights: int, tokens: int) -> int:
    """Return the bytes of shared memory that a product needs: tiles of its weights and of the tokens."""
    return (weights * rows + tokens) * columns * size * stages


def attention_memory(keys: int, stages: int, dim: int, queries: int, size: int) -> int:
    """Return the bytes of shared memory that attention needs: tiles of keys and values, the queries, and their weights."""
    return (2 * keys * stages * dim + queries * (dim + keys)) * size


def keeps_busy(card: Card, programs: int) -> bool:
    """Return True if `programs` programs, each of which takes long, keep a card busy."""
    return programs >= 2 * _programs(card)


def _rows(card: Card, height: int, shape: Shape, least: int) -> int:
    """Return the rows of a tile. Small weights have fewer, so that every multiprocessor has work, but not less than `least`:
    each program loads all tokens again, and many tokens for a few rows are more to load than the weight."""
    rows = shape.rows
    while rows > max(SMALLEST, least) and height < _programs(card) * rows:
        rows //= 2
    return rows


def _is_small(card: Card, height: int) -> bool:
    """Return True if a weight has so few rows that its programs wait for each other rather than for memory."""
    return height < FEW_ROWS * _programs(card)


def _wide(card: Card, height: int, size: int, tokens: int) -> int:
    """Return the tokens of a tile. In rounds small weights of half precision have narrow ones: the card has programs to spare,
    and reads the rows from its cache again."""
    is_narrow = size == 2 and tokens <= MOST and _is_small(card, height)
    return min(tile_width(tokens), NARROW) if is_narrow else tile_width(tokens)


def _many_tiles(card: Card, height: int, size: int, tokens: int) -> int:
    """Return how many of the widest tiles a product has; 0: they do not suit the card, the dtype or so few tokens."""
    if card.capability[0] not in (9, 10) or size != 2 or tokens < 2 * MANY:
        return 0
    return -(-tokens // MANY) * -(-height // MANY_TOKENS.rows)


def _are_tall_quicker(card: Card, blocks: int, tokens: int) -> bool:
    """Return True if blocks of rows are done sooner than twice as many of half the height, with MOST tokens at a time."""
    groups = -(-tokens // MOST)
    return _turns(card, blocks * groups) <= HALF * _turns(card, 2 * blocks * groups)


def _turns(card: Card, programs: int) -> int:
    """Return how many programs a multiprocessor runs, one after the other."""
    return -(-programs // card.processors)


def _tile(
    card: Card, shape: Shape, rows: int, width: int, size: int, tokens: int, weights: int, wide: int | None = None
) -> Tile:
    """Fit a tile to a card. Wide ones have more columns for fewer rows, and more warps where there is much to sum; products of
    fp32, which keep more in registers, do without the columns and have the warps sooner."""
    wide, columns = wide or tile_width(tokens), shape.columns
    if wide > SMALLEST and size == 2:
        columns = min(WIDEST, columns * shape.rows // rows)
    fitting, stages = _fit(card, rows, columns // size, shape.stages, size, weights, wide)
    warps = 8 if weights * rows * wide * size > 2 * 64 * MOST else 4
    return Tile(rows, fitting, stages, width % fitting == 0, wide, -(-tokens // wide), warps)


def _fit(card: Card, rows: int, columns: int, stages: int, size: int, weights: int, tokens: int) -> tuple[int, int]:
    """Return columns and stages that fit into shared memory: fewer stages first, at last narrower tiles."""
    stages = min(stages, _most_stages(card))
    while product_memory(rows, columns, stages, size, weights, tokens) > card.shared_memory:
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
