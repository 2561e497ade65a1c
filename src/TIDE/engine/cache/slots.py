"""Slots: static buffers for decoding rows with CUDA graphs. Rows come and go, slots stay.

    tables          (rows + 1, blocks) where kernels find a row's K/V: see `kv_blocks.py`; in the last one, nobody's
    chain           (17, rows) tokens of a round: the newest final one of each row, then its drafts; and the full model's
    grid            (16, rows) the rows, numbers and positions of these tokens
    control         (rows,) is there a row, and how many drafts may it have in the round?
    choice          how tokens are chosen, row by row; for greedy rows nothing is read of it
    result          (rows, fields) for the host: see `kernels/result.py`
    drafts          of the exit: guesses, scores, what a memory head will be fed, and trees

The tokens of a round are flattened step by step, so those of one step, and of the first steps, are views. There are slots for
1, 2, 4, … rows; rows that go on in others take along what only the device knows of them.

What the host writes is filled in, or copied without waiting: otherwise it would wait for the round that is running, and the
device then for the host. `tensor[i] = number` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from TIDE.adapters.probe import Store
from TIDE.adapters.rotary_table import CosSin
from TIDE.engine.cache.kv_blocks import NOBODY, KVBlocks, draft_head
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.kernels.layer import MOST_TOKENS, Ancestors, Pass, only_kv
from TIDE.kernels.reference.sampling import Settings
from TIDE.kernels.reference.trees import Beam, Candidates, Chain, Nodes, TreeShape
from TIDE.kernels.result import FIELDS
from TIDE.kernels.transfer import sent, write
from TIDE.routing.exits import Exit
from TIDE.routing.heads import DraftHead
from TIDE.routing.router import Router

MOST_ROUND = 256  # tokens of a round, drafts included
KINDS = torch.int32, torch.long, torch.float32
Device = torch.device | str
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


class MemoryBuffers:
    """Static buffers of a head that remembers; what it keeps of a whole text is in blocks."""

    def __init__(self, head: DraftHead, rows: int, columns: int) -> None:
        weight, sizes = head.qkv.weight, head.sizes
        self.head = head
        self.layer = head.as_layer()
        self.only_kv = only_kv(self.layer.attention)
        self.seen = sizes.memories * sizes.hidden_dim
        self.captured = weight.new_zeros(rows * MOST_TOKENS, self.seen)  # of a round's tokens
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


class BeamBuffers(NamedTuple):
    """The tokens of a tree that are asked for children."""

    beam: Beam
    rows: torch.Tensor  # (rows * width,) int32
    roots: torch.Tensor  # (rows * width,) int32
    few: tuple[torch.Tensor, torch.Tensor]  # (rows * width, width) the likeliest children of a level, and logarithms
    numbers: torch.Tensor  # of all tokens that are asked
    guesses: torch.Tensor  # (asked, hidden) of the exit head for them

    def of(self, level: int) -> slice:
        """Return where a level is in `numbers` and `guesses`: the roots, then the beams."""
        first, wide = len(self.numbers) - (len(self.beam.ids) - 1) * len(self.rows), len(self.rows)
        return slice(0, first) if level == 0 else slice(first + (level - 1) * wide, first + level * wide)

    def ancestors(self, level: int) -> Ancestors:
        return Ancestors(self.roots, self.beam.ancestors[level])


class NodeBuffers(NamedTuple):
    """A tree as it runs all layers, flattened like the tokens of a round."""

    nodes: Nodes
    rows: torch.Tensor  # (n,) int32
    chosen: torch.Tensor  # (n,) after each node, by the full model
    best: torch.Tensor  # (n,)
    states: torch.Tensor  # (n, hidden)
    captured: torch.Tensor  # (n, seen) for the memory head

    def ancestors(self) -> Ancestors:
        return Ancestors(self.nodes.roots.flatten(), self.nodes.ancestors.flatten(0, 1))


def beam_of(shape: TreeShape, rows: int, device: Device) -> Beam:
    """Return room for the tokens that are asked for children."""
    short, long, single = (partial(torch.zeros, dtype=kind, device=device) for kind in KINDS)
    size = shape.levels, rows * shape.width
    ancestors = short(*size, shape.levels)
    return Beam(long(*size), single(*size), short(*size), short(*size), short(*size), ancestors, long(*size))


def candidates_of(shape: TreeShape, rows: int, device: Device) -> Candidates:
    """Return room for candidates."""
    short, long, single = (partial(torch.zeros, rows, shape.candidates, dtype=kind, device=device) for kind in KINDS)
    return Candidates(long(), single(), short(), short())


def nodes_of(shape: TreeShape, rows: int, device: Device) -> Nodes:
    """Return room for the nodes of a tree, and its root."""
    short, long, _ = (partial(torch.zeros, shape.drafts + 1, rows, dtype=kind, device=device) for kind in KINDS)
    return Nodes(long(), short(), short(), short(), short(shape.levels), short())


class TreeBuffers:
    """Buffers for one tree in each of `rows` rows.

    Args:
        like: (hidden,) a state; dtype and device are those of all states.
        seen: width of the states that the memory head captures for a token.
        vocabulary: tokens that the model has.
    """

    def __init__(self, shape: TreeShape, rows: int, like: torch.Tensor, seen: int, vocabulary: int) -> None:
        device, wide, count = like.device, rows * shape.width, (shape.drafts + 1) * rows
        short, long, single = (partial(torch.zeros, dtype=kind, device=device) for kind in KINDS)
        self.shape = shape
        self.rows = torch.arange(rows, dtype=torch.int32, device=device)
        self.drafting = BeamBuffers(
            beam_of(shape, rows, device),
            self.rows.repeat_interleave(shape.width),
            short(wide),
            (long(wide, shape.width), single(wide, shape.width)),
            torch.arange(shape.asked * rows, device=device),
            like.new_zeros(shape.asked * rows, len(like)),
        )
        self.candidates = candidates_of(shape, rows, device)
        self.verifying = NodeBuffers(
            nodes_of(shape, rows, device),
            self.rows.repeat(shape.drafts + 1),
            long(count),
            single(count),
            like.new_zeros(count, len(like)),
            like.new_zeros(count, seen),
        )
        self.logits = like.new_zeros(max(count, wide), vocabulary)
        self.path = long(shape.levels + 1, rows)

    def logits_of(self, count: int, vocabulary: int | None = None) -> torch.Tensor:
        """Return room for (count, vocabulary) logits."""
        return _room(self.logits, count, vocabulary)


def _room(logits: torch.Tensor, count: int, vocabulary: int | None) -> torch.Tensor:
    """Return the first elements of a buffer as (count, vocabulary)."""
    width = vocabulary or logits.shape[1]
    return logits.flatten()[: count * width].view(count, width)


class DraftBuffers:
    """Static buffers of the exit that drafts.

    Attributes:
        score_params: of its router: see `score_params`; None: it has none.
        guesses: (n, hidden) one for each draft.
        signals: (n, 4) for the router.
    """

    def __init__(self, exit_: Exit | None, rows: int, columns: int, like: torch.Tensor) -> None:
        self.exit = exit_
        self.rows = rows
        head, router = draft_head(exit_), None if exit_ is None else exit_.router
        self.memory = None if head is None else MemoryBuffers(head, rows, columns)
        self.score_params = score_params(router) if isinstance(router, Router) else None
        self.guesses = like.new_zeros(MOST_TOKENS * rows, len(like))
        self.signals = torch.zeros(MOST_TOKENS * rows, 4, dtype=torch.float32, device=like.device)
        self._trees: dict[TreeShape, TreeBuffers] = {}

    def tree(self, shape: TreeShape, vocabulary: int) -> TreeBuffers:
        """Return room for trees of a shape."""
        if shape not in self._trees:
            assert self.memory is not None, "trees are drafted by a memory head"
            self._trees[shape] = TreeBuffers(shape, self.rows, self.guesses[0], self.memory.seen, vocabulary)
        return self._trees[shape]


class ChoiceBuffers:
    """Static buffers for the choice of tokens by rows' settings: made when the first row has any."""

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        self.rows = rows
        self.like = like
        self._logits: torch.Tensor | None = None
        self._settings: Settings | None = None

    def prepare(self, vocabulary: int) -> None:
        """Make room for settings and logits, once."""
        if self._settings is None:
            self._settings = Settings(self.rows, vocabulary, self.like.device)
            self._logits = self.like.new_zeros(min(MOST_TOKENS * self.rows, MOST_ROUND), vocabulary)

    @property
    def settings(self) -> Settings:
        assert self._settings is not None, "prepare comes first"
        return self._settings

    def logits_of(self, count: int, vocabulary: int | None = None) -> torch.Tensor:
        """Return room for the (count, vocabulary) logits of tokens."""
        assert self._logits is not None, "prepare comes first"
        return _room(self._logits, count, vocabulary)

    def take_over(self, other: ChoiceBuffers, at: torch.Tensor) -> None:
        """Go on with rows of other slots."""
        if other._settings is not None:
            self.prepare(other.settings.vocabulary)
            self.settings.take_over(other.settings, at)


class Grid(NamedTuple):
    """The tokens of a round, (steps, rows) of each."""

    rows: torch.Tensor  # int32
    steps: torch.Tensor  # int32
    starts: torch.Tensor  # int32: positions
    places: torch.Tensor  # of a memory head, for one step more
    ring: torch.Tensor  # its buffers for tokens that it was not fed


class Control(NamedTuple):
    """What rounds may do with a slot."""

    active: torch.Tensor  # (rows,) int32; 0: the slot stands still
    limits: torch.Tensor  # (rows,) int32: drafts


class Results(NamedTuple):
    """The outcome of the latest round, and copies on the host for rounds in flight."""

    latest: torch.Tensor  # (rows, FIELDS)
    copies: torch.Tensor  # (rounds, rows, FIELDS), pinned


class ModuleInputs(NamedTuple):
    """The inputs of a pass of modules."""

    text: torch.Tensor  # (1, columns)
    positions: torch.Tensor  # of the tokens at each column


class Slots:
    """Fixed addresses for `rows` rows of up to `columns` tokens.

    Args:
        angles: rotary tables by kind; None: layers compute angles themselves.
        exit_: the exit that rounds will ask.
        context: tokens that the model can take. Rounds may run past it; positions beyond it are clamped.

    Attributes:
        states: (n, hidden) of the tokens of a round.
        last: (rows, hidden) at full depth, of newest tokens that have run with their texts.
    """

    def __init__(
        self,
        store: KVBlocks,
        angles: dict[str, CosSin] | None,
        rows: int,
        columns: int,
        exit_: Exit | None,
        context: int | None = None,
    ) -> None:
        like = store.like
        short, long, single = (partial(torch.zeros, dtype=kind, device=like.device) for kind in KINDS)
        self.store = store
        self.angles = angles
        self.drafts = DraftBuffers(exit_, rows, columns, like)
        self.choice = ChoiceBuffers(rows, like)
        width = 1 if store.is_dense else max(2, store.needed(columns))
        self.tables = short(rows if store.is_dense else rows + 1, width).fill_(NOBODY)
        steps = torch.arange(MOST_TOKENS, dtype=torch.int32, device=like.device)[:, None].repeat(1, rows)
        row_ids = torch.arange(rows, dtype=torch.int32, device=like.device).repeat(MOST_TOKENS, 1)
        self.grid = Grid(row_ids, steps, steps.clone(), long(MOST_TOKENS + 1, rows), long(MOST_TOKENS, rows))
        scores = single(MOST_TOKENS, rows), single(MOST_TOKENS, rows)
        self.chain = Chain(long(MOST_TOKENS + 1, rows), long(MOST_TOKENS, rows), *scores)
        self.control = Control(short(rows), short(rows))
        copies = torch.zeros(2 * AT_ONCE, rows, FIELDS, dtype=torch.float32, pin_memory=like.is_cuda)
        self.result = Results(single(rows, FIELDS), copies)
        self.states = like.new_zeros(MOST_TOKENS * rows, len(like))
        self.last = like.new_zeros(rows, len(like))
        positions = torch.arange(columns, device=like.device).clamp(max=(context or columns) - 1)
        self.inputs = ModuleInputs(long(1, columns if store.is_dense else 0), positions)

    @property
    def rows(self) -> int:
        return self.grid.rows.shape[1]

    @property
    def columns(self) -> int:
        return len(self.inputs.positions)

    @property
    def like(self) -> torch.Tensor:
        """(hidden,) a state; dtype and device are those of all states."""
        return self.store.like

    @property
    def memory(self) -> MemoryBuffers | None:
        return self.drafts.memory

    def of(self, own: slice) -> Tokens:
        """Return the tokens of some steps of a round."""
        later = slice(own.start + 1, own.stop + 1)
        grid = self.grid
        tables = self.chain.tokens[own], grid.rows[own], grid.starts[own], grid.places[own], grid.places[later]
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

    # ---- rows that come and go ---------------------------------------------------------------------------------------------

    def stand_at(self, place: int, token: int, position: int) -> None:
        """Put the newest token of a row at a position; all before it have run."""
        self.chain.tokens[0, place].fill_(token)
        torch.add(self.grid.steps[:, place], position, out=self.grid.starts[:, place])
        if self.memory is not None:
            self.memory.fed[place].fill_(position)

    def write_blocks(self, place: int, first: int, blocks: list[int]) -> None:
        """Note the blocks of a row from its number `first` on."""
        own = self.tables[place, first : first + len(blocks)]
        write(own, torch.tensor(blocks, dtype=torch.int32))

    def clear(self, place: int) -> None:
        """Let a slot stand still; what is written for it belongs to nobody."""
        for buffer in self.control:
            buffer[place].fill_(0)
        self.grid.starts[:, place].copy_(self.grid.steps[:, place])  # attention reads it as a text
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
        for mine, theirs in zip(self.control, other.control, strict=True):
            mine.zero_()
            mine[:count] = theirs[at]
        if self.store is not other.store:
            self.store.copy(other.store)
        self.chain.tokens[0, :count] = other.chain.tokens[0, at]
        self.grid.starts.copy_(self.grid.steps)
        self.grid.starts[:, :count] = other.grid.starts[:, at]
        if self.memory is not None and other.memory is not None:
            self.memory.fed.zero_()
            for mine, theirs in zip(self.memory.of(self.rows), other.memory.of(other.rows), strict=True):
                mine[:count] = theirs[at]
        self.choice.take_over(other.choice, at)
