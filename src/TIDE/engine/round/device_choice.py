"""The choice of tokens on slots: by the rows' settings, inside a round; on the host for rows with processors of their own.

Greedy rows without processors need no logits: the best token is found while they are made. Otherwise logits are written once,
and kernels process them row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from TIDE.engine.cache.slots import Slots
from TIDE.engine.round.sampler import Sampler
from TIDE.engine.row import Draft, Row
from TIDE.engine.runners.device import DeviceRunner, device_errors
from TIDE.kernels.sampling import Features


class Places(NamedTuple):
    """The tokens after which others are chosen."""

    rows: torch.Tensor  # (n,)
    starts: torch.Tensor  # (n,) their positions
    steps: torch.Tensor  # (n,) drafts of the round up to them


class DeviceChoice:
    """Chooses the tokens of one request.

    Attributes:
        features: what its rows need of kernels; None: nothing, for they are greedy.
    """

    def __init__(self, runner: DeviceRunner, slots: Slots, rows: Sequence[Row], sampler: Sampler) -> None:
        self.runner = runner
        self.slots = slots
        self.rows = rows
        self.sampler = sampler
        self.on_host = [place for place, row in enumerate(rows) if row.sampling.custom]
        self.features: Features | None = None
        for row in rows:
            if row.sampling.custom or not row.sampling.params.is_plain:
                self.features = row.sampling.params.features | (self.features or Features())
        if self.features is not None:
            slots.prepare_choice(runner.adapter.vocab_size)
            slots.settings.write([(row.sampling.params, row.sampling.seed or 0, row.shown_prompt) for row in rows])

    def of(self, own: slice) -> Places:
        """Return the tokens of some steps of a round."""
        slots = self.slots
        return Places(*(table[own].flatten() for table in (slots.row_ids, slots.starts, slots.steps)))

    def newest_of(self, row: int) -> Places:
        """Return the newest final token of a row."""
        slots, own = self.slots, slice(row, row + 1)
        return Places(slots.row_ids[0, own], slots.starts[0, own], slots.steps[0, own])

    def choose(
        self,
        states: torch.Tensor,
        places: Places,
        token: torch.Tensor,
        best: torch.Tensor,
        signals: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """Choose the tokens after (n, hidden) states at full depth; write their scores and the signals that routers take."""
        if self.features is None:
            self.runner.choose(states, token, best, signals, vocabulary)
            return
        logits = self.slots.logits_of(len(states), None if vocabulary is None else len(vocabulary))
        self.runner.choose(states, token, best, signals, vocabulary, logits)
        settings, tokens = self.slots.settings, self.slots.tokens
        self.runner.sampling.sample(logits, vocabulary, settings, tokens, *places, self.features, token, best)

    def count(self) -> None:
        """Add the final tokens of a round to the text that penalties see."""
        if self.features is not None and self.features.penalties:
            self.runner.sampling.count(self.slots.settings.seen, self.slots.result, self.slots.active)

    def choose_on_host(self, place: int, drafted: int, logits: torch.Tensor) -> None:
        """Replace the full model's choices in a row that has processors of its own; waits for the device.

        Args:
            logits: (drafted + 1, vocabulary) after its newest final token and its drafts.
        """
        row, found = self.rows[place], self.slots.found
        with device_errors():
            tokens = self.slots.tokens[1 : drafted + 1, place].tolist()
        row.drafts = [Draft(token, 0) for token in tokens]
        chosen = self.sampler.verify({row: logits}).get(row, [])
        row.drafts = []
        if row.error is not None:
            raise row.error
        found[: len(chosen), place] = torch.tensor(chosen).to(found.device)
