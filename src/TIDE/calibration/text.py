"""A calibration text: token ids, and the index from which the model wrote them."""

from __future__ import annotations

from typing import NamedTuple

HOLD_OUT = 10  # one group out of HOLD_OUT is held out for validation


class Text(NamedTuple):
    """The token ids of a text, split into prompt and answer."""

    ids: list[int]
    start: int  # index of the first token the model wrote; tokens before it are the prompt
    group: int  # texts of one group share a prompt, and are all for training or all held out

    @property
    def is_held_out(self) -> bool:
        return self.group % HOLD_OUT == 0
