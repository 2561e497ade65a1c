"""Prefill on slots: a row's text, so that rounds can go on from its newest token.

That token runs in a round like any other. But where nobody else waits for a round, it runs with the text, and the first new
token is chosen from its state: no layer is read once more for it.

Compiled layers take tokens of any rows in one pass, and give each the bits it has in any company. So K/V of a text do not
depend on how it was cut into passes, on the rows beside it, or on what of it was there already.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from TIDE.engine.cache.kv_blocks import NOBODY
from TIDE.engine.cache.prefill_buffers import CAPTURED, CHUNK, ROWS, Part, Prompts
from TIDE.engine.cache.slots import Slots, Tokens
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.device import DeviceRunner
from TIDE.engine.slots.drafter import SlotDrafter
from TIDE.kernels.transfer import sent

PACE = 256  # tokens of a pass between two rounds of others


class Entering:
    """A row on its way in.

    Attributes:
        text: all tokens but the newest.
        takes_newest: that one runs too.
        done: tokens that have run.
        target: tokens that have to.
    """

    def __init__(self, row: Row, blocks: list[int]) -> None:
        self.row = row
        self.blocks = blocks
        self.text = row.tokens[:-1]
        self.takes_newest = False
        self.done = 0

    @property
    def place(self) -> int:
        """Its slot, which may change."""
        return self.row.slot

    @property
    def target(self) -> int:
        return len(self.text) + self.takes_newest

    @property
    def is_done(self) -> bool:
        return self.done == self.target


class Prefill:
    """Takes texts into blocks.

    Args:
        depth: of the exit.
        rows: slots that the rows will be decoded on.
    """

    def __init__(self, runner: DeviceRunner, prompts: Prompts, depth: int, drafter: SlotDrafter | None, rows: Slots) -> None:
        self.runner = runner
        self.prompts = prompts
        self.rows = rows
        self.slots = prompts.slots
        self.depth = depth
        self.drafter = None if drafter is None else drafter.on(prompts.slots)
        self.parts: list[tuple[Entering, range]] = []  # the rows of the pass at hand, and which of their positions run

    def run(self, entering: Sequence[Entering], columns: int, others_wait: bool) -> bool:
        """Run one pass of what the first of these rows need; return True if that was as fast as it will be from now on.

        Args:
            columns: that no row has more of.
            others_wait: for their next round, so the pass is a short one.
        """
        room, given = PACE if others_wait else CHUNK, list[Part]()
        self.parts = []
        for own in entering[:ROWS]:
            if not room:
                break
            part = range(own.done, min(own.target, own.done + room))
            given.append(Part(own.row.tokens[part.start : part.stop], own.done, own.blocks))
            own.row.stats.layers_run += len(part) * self.runner.num_layers
            room -= len(part)
            own.done = part.stop
            self.parts.append((own, part))
        is_typical = self._launch(self.prompts.write(given), columns)
        self._hand_over()
        return is_typical

    def _hand_over(self) -> None:
        """Leave the states of newest tokens where the rows are decoded."""
        if ended := [(at, own.place) for at, (own, _) in enumerate(self.parts) if own.takes_newest and own.is_done]:
            numbers, places = sent(torch.tensor(ended), self.rows.last.device).T
            self.rows.last[places] = self.prompts.last[numbers]

    def run_nothing(self, count: int, columns: int) -> None:
        """Run a pass of `count` tokens that are nobody's; it is captured then."""
        self.parts = []
        nobodys = [NOBODY] * (count // self.slots.store.size + 1)
        self._launch(self.prompts.write([Part([0] * count, 0, nobodys)]), columns)

    def _launch(self, tokens: Tokens, columns: int) -> bool:
        count = len(tokens.ids)
        if count > CAPTURED:
            self._through(tokens, columns)
            return True
        return self.runner.graphs.launch(self.slots, ("prompts", count, columns), lambda: self._through(tokens, columns))

    def _through(self, tokens: Tokens, columns: int) -> None:
        slots, drafter, last, count = self.slots, self.drafter, self.runner.num_layers, len(tokens.ids)
        states = slots.like.new_empty(count, len(slots.like))
        self.runner.embed_on_slots(slots, tokens, states)
        if drafter is None:
            for _ in self.runner.layers_on_slots(slots, range(last), states, tokens, columns, ()):
                pass
            torch.index_select(states, 0, self.prompts.ends, out=self.prompts.last)
            return
        captured = None if slots.memory is None else states.new_empty(count, slots.memory.seen)
        drafter.through(range(self.depth), states, tokens, columns, captured)
        deep = states.clone()
        drafter.through(range(self.depth, last), deep, tokens, columns, captured)
        torch.index_select(deep, 0, self.prompts.ends, out=self.prompts.last)
        if captured is not None:
            drafter.remember_prompt(tokens, states, captured)
