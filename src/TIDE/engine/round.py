"""The round: draft, deep pass, sample, accept. Written once; it runs as it stands, or while a CUDA graph is captured.

draft       shallow layers, exit head, sample: the next draft of every row
deep pass   the newest final token of every row and its drafts through the remaining layers, in one pass; finished states
            are shown to the exit head
sample      the full model's token after each of them
accept      the longest run of drafts equal to those; the full model's token behind them is final too:

    final     … a  b
    drafts            x  y  z
    deep pass      b  x  y  z         gives the full model's token after each of them
    found             x  y  w  v      x and y are accepted; w is final too; z, and v which was found behind it, are dropped
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from TIDE.engine.rows.row import Draft, RoundResult, Row
from TIDE.engine.runners.device import device_errors
from TIDE.kernels.reference.layers import accepted
from TIDE.kernels.reference.trees import TreeShape


@dataclass
class Launched:
    """A round that was launched.

    Attributes:
        results: waits for the round and returns its outcome for every row that took part to the end.
        drafts: how many the round was planned with; None: a prefill, or scores decided while it ran.
        is_prefill: it ran prompts.
        is_typical: nothing was compiled or captured for it.
        rows: how many took part.
        tree: that rounds may have; None: drafts are in a row.
        event: recorded behind it on a device that works on its own; None: the host did it.
    """

    results: Callable[[], list[tuple[Row, RoundResult]]]
    drafts: int | None = None
    is_prefill: bool = False
    is_typical: bool = True
    rows: int = 1
    tree: TreeShape | None = None
    event: torch.cuda.Event | None = None

    @property
    def is_over(self) -> bool:
        """True if a device that works on its own has done it already."""
        if self.event is None:
            return False
        with device_errors():
            return self.event.query()

    def seconds_since(self, before: Launched) -> float | None:
        """Return the device's seconds from the end of a round to the end of this one, both of which were read; None: the host
        did them, and its clock says it."""
        if self.event is None or before.event is None:
            return None
        with device_errors():
            return before.event.elapsed_time(self.event) / 1000

    @property
    def is_timed(self) -> bool:
        """True if its time is that of a round and of nothing else."""
        return self.is_typical and not self.is_prefill


class Round(Protocol):
    """The parts of a round: `HostRound` decides between passes, `SlotRound` and `TreeRound` launch kernels on fixed buffers."""

    def draft(self, step: int) -> bool:
        """Make draft number `step`. Return False if there is none, because a row has to go to full depth now."""

    def deep_pass(self, drafted: int) -> None:
        """Run the remaining layers for the newest final tokens and their drafts, and show their states to the exit head."""

    def sample(self, drafted: int) -> None:
        """Choose the full model's token after each of them."""

    def accept(self, drafted: int) -> None:
        """Keep the drafts that equal those tokens."""


def run_round(round_: Round, drafts: int | None = None) -> None:
    """Run one round.

    Args:
        drafts: how many to make; None: as many as `round_.draft` finds worth making.
    """
    round_.accept(run_passes(round_, drafts))


def run_passes(round_: Round, drafts: int | None = None) -> int:
    """Run a round up to the full model's choice; return how many drafts it made."""
    drafted = 0
    while drafted != drafts and round_.draft(drafted):
        drafted += 1
    round_.deep_pass(drafted)
    round_.sample(drafted)
    return drafted


def row_result(drafts: Sequence[Draft], found: Sequence[int], depth: int) -> RoundResult:
    """Return the outcome of a round on the host for one row. On slots `ExitOps.accept` compares, for all rows at once.

    Args:
        found: the full model's tokens in the drafts' places, and one behind them; those behind the first difference may be
            missing.
        depth: of the full model.
    """
    kept = accepted([draft.token for draft in drafts], found)
    behind = [Draft(token, depth) for token in found[kept : kept + 1]]
    scores = [draft.score or 0.0 for draft in drafts]
    return RoundResult([*drafts[:kept], *behind], len(drafts), kept, scores=scores, made=len(drafts))
