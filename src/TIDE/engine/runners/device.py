"""Needs of captured rounds of a runner: layers on slots, the choice of tokens, and kernels for exits.

Every method launches work on fixed addresses and waits for nothing, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import nn

from TIDE.adapters.adapter import PassInputs
from TIDE.engine.cache.kv_blocks import KVBlocks
from TIDE.engine.cache.prefill_buffers import ROWS, Prompts
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.graphs import Graphs
from TIDE.kernels.layer import Begun
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import sampling as reference_sampling
from TIDE.kernels.triton.compile_ahead import compiled_ahead
from TIDE.routing.exits import Exit

if TYPE_CHECKING:
    from TIDE.engine.rows.row import Row


COLUMNS = 1024  # of the smallest slots; others have twice as many, and so on
MARGIN = 0.1  # of a device's memory, that K/V leave free; half of it where less than that is free
MOST_BLOCKS = 1 << 20


class DeviceError(RuntimeError):
    """A device or its compiler refused."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Tell what a device refuses, in whichever way, from errors of the user's own code."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as problem:  # compilers refuse cards and sizes, and models shapes, in many ways
        raise DeviceError(f"{type(problem).__name__}: {problem}") from problem


class DeviceRunner(Runner):
    """A runner on whose device whole rounds can run.

    Attributes:
        ops: compiled operations of layers.
        failed: why rounds were given up, if they were.
        has_compiled_layers: tokens of any rows run in one pass; otherwise the model's modules run one row at a time.
    """

    embedding: nn.Module | None
    is_checked = False
    has_compiled_layers = False
    most_rows = 1  # in whole rounds

    def prepare_rounds(self, ops: Any, exits: Any, sampling: Any) -> None:
        """Set up what rounds work with; nothing is allocated yet."""
        self.ops = ops
        self._exits = exits
        self._sampling = sampling
        self.failed: str | None = None
        self._stores: list[tuple[Exit | None, KVBlocks]] = []
        self._prompts: list[tuple[Exit | None, Prompts]] = []
        self._free: list[Slots] = []  # that wait for their next rows
        self._acquired: WeakSet[Slots] = WeakSet()
        self.launched = 0  # pieces of work, of all requests
        self._graphs: dict[Slots, Graphs] = {}
        self._dropped_seconds = 0.0

    @cached_property
    def device(self) -> torch.device:
        """The model's; on another device it has another runner."""
        return self.adapter.device

    @property
    def exits(self) -> Any:
        """Operations of exits. Before the runner is checked nothing is compiled, so that the first token comes soon."""
        return self._exits if self.is_checked else reference

    @property
    def sampling(self) -> Any:
        """Operations that choose tokens by rows' settings; compiled once the runner is checked."""
        return self._sampling if self.is_checked else reference_sampling

    @property
    def has_plain_logits(self) -> bool:
        """True if logits are a norm and a product, for which there are kernels."""
        return False

    def make_store(self, exit_: Exit | None) -> KVBlocks:
        """Return fresh K/V in blocks, for rows and for what an exit keeps of them."""
        raise NotImplementedError(f"{type(self).__name__} has no K/V in blocks")

    @abstractmethod
    def make_slots(self, rows: int, columns: int, exit_: Exit | None) -> Slots:
        """Return fresh slots for texts of up to `columns` tokens."""

    @property
    def without_graphs(self) -> str | None:
        """Why rounds are not captured; None: they are."""
        if os.environ.get("TIDE_NO_GRAPHS") == "1":
            return "TIDE_NO_GRAPHS=1 is set"
        if self.device.type != "cuda":
            return f"there are none on {self.device.type}"
        return next((graphs.without for graphs in self._graphs.values() if graphs.without is not None), None)

    @property
    def capture_seconds(self) -> float:
        """Spent so far on captures."""
        return sum(graphs.seconds for graphs in self._graphs.values()) + self._dropped_seconds

    def why_not(self, row: Row) -> str | None:
        if self.failed is not None:
            return f"a round failed: {self.failed}"
        reasons = {
            "its prompt came as embeddings": row.embeds is not None,
            "its logits are to be returned": row.sampling.keeps_scores,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def launch(self, slots: Slots, key: Hashable, work: Callable[[], object]) -> bool:
        """Run work on slots, or replay its graph; return True if that was as fast as it will be from now on."""
        self.launched += 1
        if slots not in self._graphs:
            self._graphs[slots] = Graphs(self.device)
        return self._graphs[slots].run(key, work)

    @contextmanager
    def compiled_ahead(self, shows: bool) -> Iterator[None]:
        """Compile, many at a time, the kernels of work that is launched in here; it does not run."""
        with compiled_ahead(shows):
            yield
        for graphs in self._graphs.values():
            graphs.forget_runs()

    # ---- slots and K/V -----------------------------------------------------------------------------------------------------

    def store(self, exit_: Exit | None) -> KVBlocks:
        """Return the K/V of all rows that an exit drafts for."""
        found = next((store for known, store in self._stores if known is exit_), None)
        if found is None:
            found = self.make_store(exit_)
            self._stores.append((exit_, found))
        return found

    @property
    def cache_use(self) -> tuple[float, float]:
        """GiB of blocks that rows have, and of all that are allocated."""
        stores = [store for _, store in self._stores]
        taken = sum((store.blocks - 1 - store.free) * store.block_bytes for store in stores)
        return taken / 2**30, sum(store.blocks * store.block_bytes for store in stores) / 2**30

    def most_blocks(self, store: KVBlocks, cache_gib: float | None, alone: bool = False) -> int:
        """Return how many blocks K/V may have: by their budget, or by what is free. K/V of other exits that no row uses count
        as free.

        Args:
            alone: as if no other K/V were in use.
        """
        others = [own for _, own in self._stores if own is not store]
        used = 0 if alone else sum(own.block_bytes * own.blocks for own in others if not self._is_idle(own))
        if cache_gib is not None:
            free = cache_gib * 2**30 - used
        elif self.device.type == "cuda":
            free, whole = torch.cuda.mem_get_info(self.device)
            free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = max(free - MARGIN * whole, free / 2) + store.block_bytes * store.blocks
            free += sum(own.block_bytes * own.blocks for own in others) - used
        else:
            return MOST_BLOCKS
        return max(2, min(MOST_BLOCKS, int(free // store.block_bytes)))

    def _is_idle(self, store: KVBlocks) -> bool:
        return store.free == store.blocks - 1 and all(slots.store is not store for slots in self._acquired)

    def grow(self, store: KVBlocks, blocks: int, cache_gib: float | None) -> None:
        """Give K/V more blocks. Graphs know their old addresses, so they are made again. Others that no row uses are given up
        where there is no room beside them."""
        idle = [(exit_, own) for exit_, own in self._stores if own is not store and self._is_idle(own)]
        beside = self.most_blocks(store, cache_gib) - sum(own.block_bytes * own.blocks for _, own in idle) // store.block_bytes
        if blocks > beside:
            for exit_, own in idle:
                self._drop_store(exit_, own)
        for slots in [own for own in self._graphs if own.store is store]:
            self.drop_graphs(slots)
        store.grow(blocks)

    def _drop_store(self, exit_: Exit | None, store: KVBlocks) -> None:
        self.drop_prompts(exit_)
        for slots in [own for own in self._free if own.store is store]:
            self._free.remove(slots)
            self.drop_graphs(slots)
        self._stores.remove((exit_, store))

    def acquire(self, rows: int, columns: int, exit_: Exit | None) -> Slots:
        """Return slots with room for `rows` rows and `columns` columns, which have to be released."""
        alike = [slots for slots in self._free if slots.exit is exit_ and slots.rows == rows]
        found = next((slots for slots in alike if slots.columns >= columns), None)
        if found is not None:
            self._free.remove(found)
            self._acquired.add(found)
            return found
        for slots in alike:  # too narrow for what is asked now
            self._free.remove(slots)
            self.drop_graphs(slots)
        made = self.make_slots(rows, _rounded(columns), exit_)
        self._acquired.add(made)
        return made

    def has_free(self, rows: int, columns: int, exit_: Exit | None) -> bool:
        """Return True if there are such slots already, with what was captured on them."""
        return any(slots.exit is exit_ and slots.rows == rows and slots.columns >= columns for slots in self._free)

    def prompts(self, exit_: Exit | None, columns: int) -> Prompts:
        """Return buffers for texts of up to `columns` tokens, on slots that no row is decoded on."""
        found = next((prompts for known, prompts in self._prompts if known is exit_), None)
        if found is None or found.slots.columns < columns:
            self.drop_prompts(exit_)
            found = Prompts(self.make_slots(ROWS, _rounded(columns), exit_))
            self._prompts.append((exit_, found))
        return found

    def drop_prompts(self, exit_: Exit | None) -> None:
        """Give up buffers for texts, and what was captured on them."""
        for known, prompts in list(self._prompts):
            if known is exit_:
                self._prompts.remove((known, prompts))
                self.drop_graphs(prompts.slots)

    def forget_old_kv(self) -> None:
        """Share no K/V of weights that have changed since; for the thread that decodes."""

    def release(self, slots: Slots) -> None:
        """Take slots back, for rows that come later."""
        self._acquired.discard(slots)
        self._free.append(slots)

    def drop_graphs(self, slots: Slots) -> None:
        """Give up what was captured on slots."""
        graphs = self._graphs.pop(slots, None)
        self._dropped_seconds += 0.0 if graphs is None else graphs.seconds

    def device_guard(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched where the model is."""
        return torch.cuda.device(self.device) if self._has_others else nullcontext()

    @cached_property
    def _has_others(self) -> bool:
        """True if there are GPUs beside the model's."""
        return self.device.type == "cuda" and torch.cuda.device_count() > 1

    @abstractmethod
    def layers_on_slots(
        self, slots: Slots, span: range, states: torch.Tensor, tokens: Tokens, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Take the (n, hidden) states of tokens that ask, in place, through layers; yield those at the depths of `taps`. Only
        compiled layers take tokens that do not ask.

        Args:
            most: no row has more tokens.
        """

    def begin_layer_on_slots(self, slots: Slots, index: int, states: torch.Tensor, tokens: Tokens, most: int) -> Begun:
        """Run what of a layer looks at other tokens, for those whose states these are."""
        raise NotImplementedError(f"{type(self).__name__} runs whole layers")

    def end_layer_on_slots(self, index: int, states: torch.Tensor, begun: Begun) -> None:
        """Run the rest of a layer for all or some of these tokens, in place."""
        raise NotImplementedError(f"{type(self).__name__} runs whole layers")

    def embed_on_slots(self, slots: Slots, tokens: Tokens, out: torch.Tensor) -> None:
        """Write the states of tokens at depth 0."""
        table, rows = self.embedded(slots, tokens)
        if rows is None:
            out.copy_(table)
        else:
            torch.index_select(table, 0, rows, out=out)

    def embedded(self, slots: Slots, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a table and the rows of it that are the states of tokens at depth 0; no rows: all of them."""
        if type(self.embedding) is nn.Embedding:
            return self.embedding.weight, tokens.ids
        if self.embedding is not None:
            return self.embedding(tokens.ids), None  # some are scaled
        inputs = PassInputs(tokens.ids[None], slots.positions[None, tokens.positions], None, None)
        return self.adapter.run(0, 0, inputs).states[0], None

    def choose(
        self,
        states: torch.Tensor,
        token: torch.Tensor,
        best: torch.Tensor,
        signals: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        """Find the best tokens after (n, hidden) states at full depth; write their logits and the signals that routers take.

        Args:
            logits: (n, vocabulary) for the logits themselves.
        """
        found = self.logits(states, vocabulary)
        if logits is not None:
            logits.copy_(found)
        reference.best_of(found, best, token, signals, vocabulary)

    def write_logits(self, states: torch.Tensor, vocabulary: torch.Tensor | None, logits: torch.Tensor) -> None:
        """Write the (n, vocabulary) logits of (n, hidden) states at full depth."""
        logits.copy_(self.logits(states, vocabulary))


def _rounded(columns: int) -> int:
    return max(COLUMNS, 1 << (columns - 1).bit_length())
