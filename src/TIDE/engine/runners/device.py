"""Needs of captured rounds of a runner: layers on slots, the choice of tokens, and kernels for exits.

Every method launches work on fixed addresses and waits for nothing, so that it can be captured in a CUDA graph.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.engine.cache.kv_blocks import KVBlocks
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.device_pool import DevicePool
from TIDE.engine.runners.graphs import GraphPool
from TIDE.kernels.interfaces import ExitOps, LayerOps, SamplingOps
from TIDE.kernels.layer import Norm
from TIDE.kernels.reference import layers as reference
from TIDE.kernels.reference import sampling as reference_sampling
from TIDE.kernels.weights import Weight
from TIDE.routing.exits import Exit

if TYPE_CHECKING:
    from TIDE.engine.rows.row import Row


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
        lm_head_on_slots: of the model.
        graphs: of all slots.
        pool: slots and K/V.
        failed: why rounds were given up, if they were.
        has_compiled_layers: tokens of any rows run in one pass; otherwise the model's modules run one row at a time.
    """

    embedding: nn.Module | None
    is_checked = False
    has_compiled_layers = False
    most_rows = 1  # in whole rounds

    def prepare_rounds(self, ops: LayerOps, exits: ExitOps, sampling: SamplingOps) -> None:
        """Set up what rounds work with; nothing is allocated yet."""
        self.ops = ops
        self._exits = exits
        self._sampling = sampling
        self.failed: str | None = None
        self.lm_head_on_slots = LMHeadOnSlots(self)
        self._is_one_of_several = self.device.type == "cuda" and torch.cuda.device_count() > 1
        self.graphs = GraphPool(self.device)
        self.pool = DevicePool(self, self.graphs)

    @cached_property
    def device(self) -> torch.device:
        """The model's; on another device it has another runner."""
        return self.adapter.device

    @property
    def exits(self) -> ExitOps:
        """Operations of exits. Before the runner is checked nothing is compiled, so that the first token comes soon."""
        return self._exits if self.is_checked else reference

    @property
    def sampling(self) -> SamplingOps:
        """Operations that choose tokens by rows' settings; compiled once the runner is checked."""
        return self._sampling if self.is_checked else reference_sampling

    def plain_logits(self, like: torch.Tensor) -> tuple[Norm, Weight] | None:
        """Return the norm and the weight whose product makes logits of states; None: logits are made in another way."""
        return None

    def make_store(self, exit_: Exit | None) -> KVBlocks:
        """Return fresh K/V in blocks, for rows and for what an exit keeps of them."""
        raise NotImplementedError(f"{type(self).__name__} has no K/V in blocks")

    @abstractmethod
    def make_slots(self, rows: int, columns: int, exit_: Exit | None) -> Slots:
        """Return fresh slots for texts of up to `columns` tokens."""

    def why_not(self, row: Row) -> str | None:
        if self.failed is not None:
            return f"a round failed: {self.failed}"
        reasons = {
            "its prompt came as embeddings": row.embeds is not None,
            "its logits are to be returned": row.sampling.keeps_scores,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def forget_old_kv(self) -> None:
        """Share no K/V of weights that have changed since; for the thread that decodes."""

    def device_guard(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels are launched where the model is."""
        return torch.cuda.device(self.device) if self._is_one_of_several else nullcontext()

    @abstractmethod
    def layers_on_slots(
        self, slots: Slots, span: range, states: torch.Tensor, tokens: Tokens, most: int, taps: tuple[int, ...]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Take the (n, hidden) states of tokens that ask, in place, through layers; yield those at the depths of `taps`. Only
        compiled layers take tokens that do not ask.

        Args:
            most: no row has more tokens.
        """

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
        inputs = PassInputs(tokens.ids[None], slots.inputs.positions[None, tokens.positions], None, None)
        return self.adapter.run(0, 0, inputs).states[0], None


class LMHeadOnSlots:
    """A norm and an LM head as rounds use them: in kernels, if logits are a norm and a product.

    Args:
        plain: the norm and the weight; None: those of the runner's model, if it has them.
    """

    def __init__(self, runner: DeviceRunner, plain: tuple[Norm, Weight] | None = None) -> None:
        self._runner: DeviceRunner = weakref.proxy(runner)  # a runner that is dropped lets its model go at once
        self._plain = plain

    def choose(
        self,
        states: torch.Tensor,
        token: torch.Tensor,
        best: torch.Tensor,
        signals: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
    ) -> None:
        """Find the best tokens after (n, hidden) states; write their logits and the signals that routers take.

        Args:
            logits: (n, vocabulary) for the logits themselves.
        """
        runner, plain = self._runner, self._plain or self._runner.plain_logits(states)
        if plain is None:
            reference.best_of(runner.logits(states, vocabulary), best, token, signals, vocabulary, logits)
            return
        norm, weight = plain
        runner.exits.best_tokens(runner.ops.norm(states, norm), weight, best, token, signals, vocabulary, logits)

    def write_logits(self, states: torch.Tensor, vocabulary: torch.Tensor | None, logits: torch.Tensor) -> None:
        """Write the (n, vocabulary) logits of (n, hidden) states."""
        runner, plain = self._runner, self._plain or self._runner.plain_logits(states)
        if plain is None:
            logits.copy_(runner.logits(states, vocabulary))
            return
        norm, weight = plain
        runner.exits.write_logits(runner.ops.norm(states, norm), weight, vocabulary, logits)


def a_state(adapter: ModelAdapter) -> torch.Tensor:
    """Return a (hidden,) state, of the dtype and on the device of all of them."""
    return torch.zeros(adapter.hidden_dim, dtype=adapter.model.dtype, device=adapter.device)
