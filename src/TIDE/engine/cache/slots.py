"""Slots: static buffers for decoding rows with CUDA graphs. Rows come and go, slots stay.

    tables          (rows + 1, blocks) where kernels find a row's K/V: see `kv_blocks.py`; in the last one, nobody's
    tokens          (17, rows) of a round: the newest final token of each row, then its drafts
    starts          (16, rows) the positions they stand at
    limits          (rows,) drafts that each row may have in the round
    settings        how tokens are chosen, row by row; for greedy rows nothing is read of it
    result          (rows, fields) what the host reads: see `kernels/result.py`
    memory          of a head that remembers: what it will be fed

The tokens of a round are flattened step by step, so those of one step, and of the first steps, are views. There are slots for
1, 2, 4, … rows; rows that go on in others take along what only the device knows of them.

What the host writes is filled in, or copied without waiting: otherwise it would wait for the round that is running, and the
device then for the host. `tensor[i] = number` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from TIDE.adapters.probe import Store
from TIDE.adapters.rotary_table import CosSin
from TIDE.engine.cache.kv_blocks import NOBODY, KVBlocks, draft_head
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.cache.tree_buffers import TreeBuffers
from TIDE.kernels.layer import MOST_TOKENS, Ancestors, Pass, only_kv
from TIDE.kernels.reference.sampling import Settings
from TIDE.kernels.reference.trees import TreeShape
from TIDE.kernels.result import FIELDS
from TIDE.kernels.transfer import sent, write
from TIDE.routing.exits import Exit
from TIDE.routing.heads import DraftHead
from TIDE.routing.router import Router

MOST_ROUND = 256  # tokens of a round, drafts included
AT_ONCE = 4  # rounds that are launched before the host looks at those before them, at most


def slots_for(rows: int) -> int:
    """Return the number of slots that `rows` rows are decoded on."""
    return 1 << (rows - 1).bit_length()


def most_slots(drafts: int) -> int:
    """Return the number of slots on which a round has room for so many drafts of each row."""
    return 1 << (MOST_ROUND // (drafts + 1)).bit_length() - 1


class Tokens(NamedTuple):
    """Tokens of a pass, flat, in fixed buffers."""

    ids: torch.Tensor  # (n,)
    rows: torch.Tensor  # (n,) int32
    positions: torch.Tensor  # (n,) int32
    places: torch.Tensor  # (n,) where a memory head has what belongs to them
    after: torch.Tensor  # (n,) and to the tokens after them
    groups: torch.Tensor | int | None = None  # those of one row: see `Pass`
    columns: torch.Tensor | None = None  # (n,) int32, of tokens in trees; others stand at the columns of their positions
    ancestors: Ancestors | None = None
    asking: int | None = None  # the first of them, which run; those behind them only leave K/V

    def taken(self, numbers: torch.Tensor) -> Tokens:
        """Return some of them, of a pass without trees; who lets them attend has to group them."""
        ids, rows, positions, places, after = (table[numbers] for table in self[:5])
        return Tokens(ids, rows, positions, places, after)


class Memory:
    """Static buffers of a head that remembers; what it keeps of a whole text is in blocks."""

    def __init__(self, head: DraftHead, rows: int, columns: int) -> None:
        weight, sizes = head.qkv.weight, head.sizes
        self.head = head
        self.layer = head.as_layer()
        self.only_kv = only_kv(self.layer.attention)
        self.seen = sizes.memories * sizes.hidden_dim
        self.noted = weight.new_zeros(rows * MOST_TOKENS, self.seen)  # of a round's tokens, to be remembered
        # by row, then by position modulo 16: of finished tokens that the head was not fed
        self.parts = weight.new_zeros(rows * MOST_TOKENS, self.seen)
        self.entries = weight.new_zeros(rows * MOST_TOKENS, (sizes.inputs + 1) * sizes.hidden_dim)
        self.fed = torch.zeros(rows, dtype=torch.int32, device=weight.device)  # positions whose K/V are there
        positions = torch.arange(columns, device=weight.device)[None]
        self.angles = CosSin(*(part[0, 0].contiguous() for part in head.angles(positions, weight.dtype)))

    def of(self, rows: int) -> list[torch.Tensor]:
        """Return the buffers by row."""
        return [self.parts.view(rows, -1), self.entries.view(rows, -1), self.fed]


def score_params(router: Router) -> torch.Tensor:
    """Return what makes a score of a router's sum: bias, temperature, offset."""
    bias = router.temperature.new_zeros(1) if router.up.bias is None else router.up.bias
    return torch.cat([bias, router.temperature[None], router.offset[None]])


class Slots:
    """Fixed addresses for `rows` rows of up to `columns` tokens.

    Args:
        like: (hidden,) a state; dtype and device are those of all states.
        angles: rotary tables by kind; None: layers compute angles themselves.
        exit_: the exit that rounds will ask.
        context: tokens that the model can take. Rounds may run past it; positions beyond it are clamped.
    """

    def __init__(
        self,
        like: torch.Tensor,
        store: KVBlocks,
        angles: dict[str, CosSin] | None,
        rows: int,
        columns: int,
        exit_: Exit | None,
        context: int | None = None,
    ) -> None:
        long: dict[str, Any] = dict(dtype=torch.long, device=like.device)
        short: dict[str, Any] = dict(dtype=torch.int32, device=like.device)
        single: dict[str, Any] = dict(dtype=torch.float32, device=like.device)
        self.store = store
        self.rows = rows
        self.columns = columns
        self.exit = exit_
        self.angles = angles
        head = draft_head(exit_)
        self.memory = None if head is None else Memory(head, rows, columns)
        router = None if exit_ is None else exit_.router
        self.score_params = score_params(router) if isinstance(router, Router) else None
        width = 1 if store.is_dense else max(2, store.needed(columns))
        self.tables = torch.full((rows if store.is_dense else rows + 1, width), NOBODY, **short)
        self.tokens = torch.zeros(MOST_TOKENS + 1, rows, **long)
        self.starts = torch.arange(MOST_TOKENS, **short)[:, None].repeat(1, rows)
        self.row_ids = torch.arange(rows, **short).repeat(MOST_TOKENS, 1)
        self.places = torch.zeros(MOST_TOKENS + 1, rows, **long)  # of a memory head, from the newest token on
        self.ring = torch.zeros(MOST_TOKENS, rows, **long)  # its buffers for tokens that it was not fed
        self.steps = torch.arange(MOST_TOKENS, **short)[:, None].repeat(1, rows)
        self.active = torch.zeros(rows, **short)  # 0: the slot stands still
        self.limits = torch.zeros(rows, **short)
        self.found = torch.zeros(MOST_TOKENS, rows, **long)
        self.best = torch.zeros(MOST_TOKENS, rows, **single)
        self.scores = torch.zeros(MOST_TOKENS, rows, **single)
        self.signals = torch.zeros(MOST_TOKENS * rows, 4, **single)
        self.guesses = like.new_zeros(MOST_TOKENS * rows, len(like))  # of the exit head, one for each draft
        self.result = torch.zeros(rows, FIELDS, **single)
        self.states = like.new_zeros(MOST_TOKENS * rows, len(like))
        self.last = like.new_zeros(rows, len(like))  # of newest tokens that have run with their texts, at full depth
        self.columns_ids = torch.arange(columns, device=like.device)
        self.positions = self.columns_ids.clamp(max=(context or columns) - 1)  # of the tokens at each column
        self.text = torch.zeros(1, columns if store.is_dense else 0, **long)  # of a pass of modules
        self.like = like
        self._logits: torch.Tensor | None = None
        self._settings: Settings | None = None
        self._trees: dict[TreeShape, TreeBuffers] = {}
        self.pinned = torch.zeros(2 * AT_ONCE, rows, FIELDS, dtype=torch.float32, pin_memory=like.is_cuda)

    def of(self, own: slice) -> Tokens:
        """Return the tokens of some steps of a round."""
        later = slice(own.start + 1, own.stop + 1)
        tables = self.tokens[own], self.row_ids[own], self.starts[own], self.places[own], self.places[later]
        ids, rows, positions, places, after = (table.flatten() for table in tables)
        return Tokens(ids, rows, positions, places, after, groups=self.rows)

    def states_of(self, own: slice) -> torch.Tensor:
        """Return the (n, hidden) states of some steps of a round."""
        return self.states[own.start * self.rows : own.stop * self.rows]

    def cache(self, stores: Sequence[Store], columns: int, static: bool = False) -> SegmentCache:
        """Return a cache for one pass of the only row, which writes its K/V into the first columns of its block."""
        assert self.store.is_dense
        cache = SegmentCache(1, [range(len(stores))], stores, columns, static)
        for index in range(len(stores)):
            cache.adopt(index, self.store.keys[index][:, :, :columns], self.store.values[index][:, :, :columns])
        return cache

    def pass_of(self, states: torch.Tensor, tokens: Tokens, angles: CosSin) -> Pass:
        """Return tokens on their way through a layer."""
        at = tokens.positions
        columns = at if tokens.columns is None else tokens.columns
        return Pass(states, *angles, tokens.rows, columns, at, at, self.tables, tokens.groups, tokens.ancestors, tokens.asking)

    def tree(self, shape: TreeShape, vocabulary: int) -> TreeBuffers:
        """Return room for trees of a shape."""
        if shape not in self._trees:
            assert self.memory is not None, "trees are drafted by a memory head"
            self._trees[shape] = TreeBuffers(shape, self.rows, self.like, self.memory.seen, vocabulary)
        return self._trees[shape]

    # ---- rows that come and go ---------------------------------------------------------------------------------------------

    def stand_at(self, place: int, token: int, position: int) -> None:
        """Put the newest token of a row at a position; all before it have run."""
        self.tokens[0, place].fill_(token)
        torch.add(self.steps[:, place], position, out=self.starts[:, place])
        if self.memory is not None:
            self.memory.fed[place].fill_(position)

    def write_blocks(self, place: int, first: int, blocks: list[int]) -> None:
        """Note the blocks of a row from its number `first` on."""
        own = self.tables[place, first : first + len(blocks)]
        write(own, torch.tensor(blocks, dtype=torch.int32))

    def clear(self, place: int) -> None:
        """Let a slot stand still; what is written for it belongs to nobody."""
        self.active[place].fill_(0)
        self.limits[place].fill_(0)
        self.starts[:, place].copy_(self.steps[:, place])  # attention takes it for a text, which must not be a long one
        if self.memory is not None:
            self.memory.fed[place].fill_(0)
        if not self.store.is_dense:
            self.tables[place].fill_(NOBODY)

    def take_over(self, other: Slots, places: list[int]) -> None:
        """Go on with rows of other slots, which are given in the order they have here."""
        at, count = sent(torch.tensor(places, dtype=torch.long), self.tables.device), len(places)
        width = min(self.tables.shape[1], other.tables.shape[1])
        self.tables.fill_(NOBODY)
        self.tables[:count, :width] = other.tables[at, :width]
        self.active.zero_()
        self.limits.zero_()
        for mine, theirs in ((self.active, other.active), (self.limits, other.limits)):
            mine[:count] = theirs[at]
        if self.store is not other.store:
            self.store.copy(other.store)
        self.tokens[0, :count] = other.tokens[0, at]
        self.starts.copy_(self.steps)
        self.starts[:, :count] = other.starts[:, at]
        if self.memory is not None and other.memory is not None:
            self.memory.fed.zero_()
            for mine, theirs in zip(self.memory.of(self.rows), other.memory.of(other.rows), strict=True):
                mine[:count] = theirs[at]
        if other._settings is not None:
            self.prepare_choice(other.settings.vocabulary)
            self.settings.take_over(other.settings, at)

    # ---- the choice of tokens ------------------------------------------------------------------------------------------------

    def prepare_choice(self, vocabulary: int) -> None:
        """Make room for settings and logits, once."""
        if self._settings is None:
            self._settings = Settings(self.rows, vocabulary, self.like.device)
            self._logits = self.like.new_zeros(min(MOST_TOKENS * self.rows, MOST_ROUND), vocabulary)

    @property
    def settings(self) -> Settings:
        assert self._settings is not None, "prepare_choice comes first"
        return self._settings

    def logits_of(self, count: int, vocabulary: int | None = None) -> torch.Tensor:
        """Return room for the (count, vocabulary) logits of tokens."""
        assert self._logits is not None, "prepare_choice comes first"
        width = vocabulary or self._logits.shape[1]
        return self._logits.flatten()[: count * width].view(count, width)
