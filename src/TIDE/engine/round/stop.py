"""The stop rule of a request: end tokens, length, time, the model's context, and criteria of the user's own.

The first four are checked on the host without tensors. Criteria of the user's own are called once for every final token, with
the text of one row.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from typing import TYPE_CHECKING

import torch
from transformers import StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from TIDE.engine.inputs import Context

if TYPE_CHECKING:
    from TIDE.engine.row import Row

logger = logging.getLogger(__name__)


class StopRule:
    """When the rows of a request end.

    Args:
        criteria: those transformers made of the request.
        context: a row ends at its limit.
        device: where the user's own criteria expect token ids.

    Attributes:
        custom: the criteria that need tensors.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList | None = None,
        context: Context | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        known = criteria or StoppingCriteriaList()
        self.end_tokens = {end for one in known if type(one) is EosTokenCriteria for end in one.eos_token_id.tolist()}
        lengths = [math.ceil(one.max_length) for one in known if type(one) is MaxLengthCriteria]
        self.max_columns = min(lengths, default=None)
        self.deadlines = [one for one in known if type(one) is MaxTimeCriteria]
        quick = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)
        self.custom = StoppingCriteriaList(one for one in known if type(one) not in quick)
        self.context = context or Context()
        self.device = device
        made_for = self.context.made_for if self.context.limit is None else None
        self._warns_past = sys.maxsize if made_for is None else made_for  # tokens

    def ends(self, row: Row) -> bool:
        """Return True if a row's text ends with its newest final token."""
        size = len(row.tokens)
        if size > self._warns_past:
            self.warn_past_context(size)
        if self._is_asked_to_end(row, row.tokens[-1], size):
            return True
        if (self.deadlines and self._is_late()) or (self.custom and self._says_custom(row)):
            return True
        row.cut_short = self._fills_context(size)
        return row.cut_short

    def is_last(self, row: Row, token: int, size: int) -> bool:
        """Return True if no token can follow `token`, the last of `size`. Time and the user's own criteria are not asked."""
        return self._is_asked_to_end(row, token, size) or self._fills_context(size)

    def room(self, row: Row) -> int:
        """Return how many tokens may follow the final ones; an end token may come before."""
        size, limit = len(row.tokens), self.context.limit
        found = sys.maxsize if limit is None else limit - size
        if self.max_columns is not None:
            left = self.max_columns - (len(row.padding) + size - row.unseen)
            found = left if left < found else found
        return found if found > 0 else 0

    def _is_asked_to_end(self, row: Row, token: int, size: int) -> bool:
        shown = len(row.padding) + size - row.unseen
        return token in self.end_tokens or (self.max_columns is not None and shown >= self.max_columns)

    def _fills_context(self, size: int) -> bool:
        return self.context.limit is not None and size >= self.context.limit

    def warn_past_context(self, size: int) -> None:
        """Warn, once, if a text is longer than the model was made for and the model takes it all the same."""
        if size > self._warns_past:
            self._warns_past = sys.maxsize
            logger.warning(
                "the text is longer than the %d tokens this model was made for. It goes on, as with model.generate; what is "
                "written there may be worse.",
                self.context.made_for,
            )

    def _is_late(self) -> bool:
        return any(time.time() - one.initial_timestamp > one.max_time for one in self.deadlines)

    def _says_custom(self, row: Row) -> bool:
        return bool(self.custom(torch.tensor([row.shown()], device=self.device), None).any())
