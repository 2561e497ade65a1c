"""A calibration text: token ids, and which of them the model wrote."""

from __future__ import annotations

from typing import NamedTuple

HOLD_OUT = 10  # one group in so many is kept for validation


class Text(NamedTuple):
    """A text and who wrote it."""

    ids: list[int]
    start: int  # where the model's own writing begins; tokens before are the prompt
    group: int  # texts of one group share a prompt, and go to training or to validation together

    @property
    def is_held_out(self) -> bool:
        return self.group % HOLD_OUT == 0
