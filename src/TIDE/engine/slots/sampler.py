"""The choice of tokens on slots: by the rows' settings, inside a round; on the host for rows with processors of their own.

Greedy rows without processors need no logits: the best token is found while they are made. Otherwise logits are written once,
and kernels process them row by row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from TIDE.engine.cache.slots import Slots
from TIDE.engine.host.sampler import Sampler
from TIDE.engine.rows.row import Draft, Row
from TIDE.engine.runners.device import DeviceRunner, LMHeadOnSlots, device_errors
from TIDE.kernels.reference.sampling import Features


class Places(NamedTuple):
    """The tokens after which others are chosen."""

    rows: torch.Tensor  # (n,)
    starts: torch.Tensor  # (n,) their positions
    steps: torch.Tensor  # (n,) drafts of the round up to them


def features_of(rows: Iterable[Row], features: Features | None = None) -> Features | None:
    """Return what the choice of tokens of rows needs, beside what it needs anyhow; None: nothing, the best tokens are taken."""
    for row in rows:
        if row.sampling.custom or not row.sampling.params.is_plain:
            features = row.sampling.params.features | (features or Features())
    return features


class SlotSampler:
    """Chooses the tokens of rows on slots.

    Attributes:
        features: what they need of kernels; None: nothing, for they are greedy.
        on_host: rows with processors of their own.
    """

    def __init__(self, runner: DeviceRunner, sampler: Sampler) -> None:
        self.runner = runner
        self.sampler = sampler
        self.features: Features | None = None
        self.on_host: dict[int, Row] = {}
        self._written: set[Row] = set()

    def serve(self, slots: Slots, rows: dict[int, Row], features: Features | None = None) -> None:
        """Serve rows, by their places on slots; those that were served before are there already.

        Args:
            features: that are needed whatever the rows are.
        """
        self.slots = slots
        self.on_host = {place: row for place, row in rows.items() if row.sampling.custom}
        self.sampler.serve(list(self.on_host.values()))
        self.features = features_of(rows.values(), features)
        self._written &= set(rows.values())
        if self.features is None:
            return
        slots.choice.prepare(self.runner.adapter.vocab_size)
        for place, row in rows.items():
            if row not in self._written:
                own = row.sampling
                slots.choice.settings.write_row(place, own.params, own.seed or 0, row.counted_prompt, row.new_tokens)
                self._written.add(row)

    def of(self, own: slice) -> Places:
        """Return the tokens of some steps of a round."""
        slots = self.slots
        return Places(*(table[own].flatten() for table in (slots.grid.rows, slots.grid.starts, slots.grid.steps)))

    def choose(
        self,
        states: torch.Tensor,
        places: Places,
        token: torch.Tensor,
        best: torch.Tensor,
        signals: torch.Tensor | None = None,
        vocabulary: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        lm_head: LMHeadOnSlots | None = None,
    ) -> None:
        """Choose the tokens after (n, hidden) states at full depth; write their scores and the signals that routers take.

        Args:
            logits: room for the (n, vocabulary) logits; None: that of the slots.
            lm_head: what makes logits; None: the model's.
        """
        lm_head = lm_head or self.runner.lm_head_on_slots
        if self.features is None:
            lm_head.choose(states, token, best, signals, vocabulary)
            return
        if logits is None:
            logits = self.slots.choice.logits_of(len(states), None if vocabulary is None else len(vocabulary))
        lm_head.choose(states, token, best, signals, vocabulary, logits)
        settings, tokens = self.slots.choice.settings, self.slots.chain.tokens
        self.runner.sampling.sample(logits, vocabulary, settings, tokens, *places, self.features, token, best)

    def count(self) -> None:
        """Add the final tokens of a round to the text that penalties see."""
        if self.features is not None and self.features.penalties:
            self.runner.sampling.count(self.slots.choice.settings.seen, self.slots.result.latest, self.slots.control.active)

    def choose_on_host(self, drafts: int) -> None:
        """Replace the full model's choices in rows that have processors of their own; waits for the device."""
        slots = self.slots
        logits = slots.choice.logits_of((drafts + 1) * slots.rows)
        for place, row in self.on_host.items():
            if row.finished:
                continue
            drafted = min(drafts, row.wanted or 0)
            with device_errors():
                tokens = slots.chain.tokens[1 : drafted + 1, place].tolist()
            row.drafts = [Draft(token, 0) for token in tokens]
            try:
                chosen = self.sampler.verify({row: logits[place :: slots.rows][: drafted + 1]}).get(row, [])
            finally:
                row.drafts = []
            slots.chain.found[: len(chosen), place] = torch.tensor(chosen).to(slots.chain.found.device)
