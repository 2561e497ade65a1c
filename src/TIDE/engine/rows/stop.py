"""The stop rule of a request: end tokens, length, time, the model's context, and criteria of the user's own.

The first four are checked on the host without tensors. Stop strings are looked for by transformers' criterion, on the host too,
where the newest token can be the end of one. Criteria of the user's own are called once for every final token, with the text of
one row.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria

logger = logging.getLogger(__name__)


class Context(NamedTuple):
    """How many tokens a text may have."""

    made_for: int | None = None  # by the model's config, where it says so
    limit: int | None = None  # where the model would fail; None: nowhere

    def check(self, longest: int, room_for: int) -> None:
        """Make sure that a prompt of this length and `room_for` more tokens fit."""
        if self.limit is not None and longest + room_for > self.limit:
            raise ValueError(
                f"the prompt has {longest} tokens and the model's context holds {self.limit}. Shorten the prompt or choose a "
                f"model with a longer context."
            )


def context_of(model: PreTrainedModel) -> Context:
    """Read a model's context off its config and modules.

    Rotary angles are computed for any position. Tables of positions (learned, or made once) end with the context.
    """
    config = model.config.get_text_config(decoder=True)
    made_for = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None) or None
    is_rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    return Context(made_for, None if is_rotary else made_for)


class Text(Protocol):
    """What a stop rule reads of a row, and its one mark on it."""

    tokens: list[int]
    padding: Sequence[int]
    unseen: int
    cut_short: bool

    def shown(self) -> list[int]:
        """Return the text as criteria see it."""


class StopRule:
    """When the rows of a request end.

    Args:
        criteria: those transformers made of the request.
        context: a row ends at its limit.
        device: where the user's own criteria expect token ids.

    Attributes:
        strings: those that look for stop strings.
        custom: those of the user's own, which need tensors.
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
        self.strings = [_StopStrings(one) for one in known if type(one) is StopStringCriteria]
        quick = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StopStringCriteria)
        self.custom = StoppingCriteriaList(one for one in known if type(one) not in quick)
        self.context = context or Context()
        self.device = device
        made_for = self.context.made_for if self.context.limit is None else None
        self._warns_past = sys.maxsize if made_for is None else made_for  # tokens

    def ends(self, row: Text) -> bool:
        """Return True if a row's text ends with its newest final token."""
        size = len(row.tokens)
        if size > self._warns_past:
            self.warn_past_context(size)
        if self._is_asked_to_end(row, row.tokens[-1], size):
            return True
        if (self.deadlines and self._is_late()) or (self.custom and self._says_custom(row)):
            return True
        if self.strings and any(one.are_complete(row) for one in self.strings):
            return True
        row.cut_short = self._fills_context(size)
        return row.cut_short

    def is_last(self, row: Text, token: int, size: int) -> bool:
        """Return True if no token can follow `token`, the last of `size`. Time and the user's own criteria are not asked."""
        return self._is_asked_to_end(row, token, size) or self._fills_context(size)

    def room(self, row: Text) -> int:
        """Return how many tokens may follow the final ones; an end token may come before."""
        size, limit = len(row.tokens), self.context.limit
        found = sys.maxsize if limit is None else limit - size
        if self.max_columns is not None:
            left = self.max_columns - (len(row.padding) + size - row.unseen)
            found = left if left < found else found
        return found if found > 0 else 0

    def _is_asked_to_end(self, row: Text, token: int, size: int) -> bool:
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

    def _says_custom(self, row: Text) -> bool:
        return bool(self.custom(torch.tensor([row.shown()], device=self.device), None).any())


class _StopStrings:
    """Stop strings as transformers finds them. Its criterion takes as long as a round, so most tokens are kept from it: those
    that no stop string ends in."""

    def __init__(self, criterion: StopStringCriteria) -> None:
        self.criterion = criterion
        self._has_empty = bool((criterion.target_lens == 0).any())  # which every token completes
        self._can_end: dict[int, bool] = {}  # by token

    def are_complete(self, row: Text) -> bool:
        """Return True if the newest token of a row completes one; its beginning may be in the prompt."""
        token = row.tokens[-1]
        if token not in self._can_end:
            self._can_end[token] = self._has_empty or self._overlaps(token)
        if not self._can_end[token]:
            return False
        newest = row.shown()[-self.criterion.maximum_token_len :]
        return bool(self.criterion(torch.tensor([newest]), None).any())

    def _overlaps(self, token: int) -> bool:
        """Return True if a stop string can end in a token: the criterion knows how long such an end is, or has -1."""
        known, positions = self.criterion.embedding_vec, self.criterion.max_valid_positions * self.criterion.num_stop_strings
        return bool((known[min(token, len(known) - 1), positions:-1] > 0).any())
