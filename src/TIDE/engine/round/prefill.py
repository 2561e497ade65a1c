"""Prefill on slots: everything of a row's text but its newest token, which the next round takes like any other.

Compiled layers take tokens of any rows in one pass, and give each the bits it has in any company. So K/V of a text do not
depend on how it was cut into passes, on the rows beside it, or on what of it was there already.
"""

from __future__ import annotations

from collections.abc import Sequence

from TIDE.engine.cache.blocks import NOBODY
from TIDE.engine.cache.prompts import CAPTURED, CHUNK, ROWS, Given, Prompts
from TIDE.engine.cache.slots import Tokens
from TIDE.engine.round.device_drafter import DeviceDrafter
from TIDE.engine.row import Row
from TIDE.engine.runners.device import DeviceRunner

PACE = 256  # tokens of a pass between two rounds of others


class Entering:
    """A row on its way in.

    Attributes:
        done: tokens that have run.
        target: tokens that have to.
    """

    def __init__(self, row: Row, place: int, blocks: list[int]) -> None:
        self.row = row
        self.place = place
        self.blocks = blocks
        self.text = row.tokens[:-1]
        self.done = 0

    @property
    def target(self) -> int:
        return len(self.text)

    def token(self, number: int, position: int, size: int) -> Given:
        """Return a token as `Prompts` takes it, in the row `number` of a pass; blocks have `size` positions."""
        place, after = (self.blocks[at // size] * size + at % size for at in (position, position + 1))
        return self.text[position], number, position, place, after

    @property
    def is_done(self) -> bool:
        return self.done == self.target


class Prefill:
    """Takes texts into blocks.

    Args:
        depth: of the exit.
    """

    def __init__(self, runner: DeviceRunner, prompts: Prompts, depth: int, drafter: DeviceDrafter | None) -> None:
        self.runner = runner
        self.prompts = prompts
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
        most, given = PACE if others_wait else CHUNK, list[Given]()
        self.parts = []
        for own in entering[:ROWS]:
            if len(given) == most:
                break
            part = range(own.done, min(own.target, own.done + most - len(given)))
            given += [own.token(len(self.parts), position, self.slots.store.size) for position in part]
            own.row.stats.layers_run += len(part) * self.runner.num_layers
            own.done = part.stop
            self.parts.append((own, part))
        return self._launch(self.prompts.write(given, [own.blocks for own, _ in self.parts]), columns)

    def run_nothing(self, count: int, columns: int) -> None:
        """Run a pass of so many tokens that are nobody's; it is captured then."""
        size = self.slots.store.size
        self.parts = []
        self._launch(self.prompts.write([(0, 0, place % size, 0, 0) for place in range(count)], [[NOBODY]]), columns)

    def _launch(self, tokens: Tokens, columns: int) -> bool:
        count = len(tokens.ids)
        if count > CAPTURED:
            self._through(tokens, columns)
            return True
        return self.runner.launch(self.slots, ("prompts", count, columns), lambda: self._through(tokens, columns))

    def _through(self, tokens: Tokens, columns: int) -> None:
        slots, drafter, last, count = self.slots, self.drafter, self.runner.num_layers, len(tokens.ids)
        states = slots.like.new_empty(count, len(slots.like))
        self.runner.embed_on_slots(slots, tokens, states)
        if drafter is None:
            for _ in self.runner.layers_on_slots(slots, range(last), states, tokens, columns, ()):
                pass
            return
        noted = None if slots.memory is None else states.new_empty(count, slots.memory.seen)
        drafter.through(range(self.depth), states, tokens, columns, noted)
        deep = states.clone()
        drafter.through(range(self.depth, last), deep, tokens, columns, noted)
        if noted is not None:
            drafter.remember_prompt(tokens, states, noted)
