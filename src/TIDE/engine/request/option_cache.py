"""Options that transformers has made sense of before.

`model.generate` takes a millisecond or two to make processors, criteria and a config of options: longer than a round of a small
model, and servers ask for the same again and again. So what came of plain options is remembered, and made fit for another
prompt, where nothing in it depends on the prompt but the length of the text.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from transformers import EosTokenCriteria, GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import logits_process as theirs

PLAIN = {bool, int, float, str, type(None)}
MOST = 256  # sets of options
ALIKE = {  # processors that do the same after any prompt, and keep nothing
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.TemperatureLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopPLogitsWarper,
    theirs.MinPLogitsWarper,
    theirs.LogitNormalization,
}


class Made(NamedTuple):
    """Options as transformers reads them."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig


class RememberedOptions:
    """Options of one row and what came of them, for prompts of any length. Other defaults of the model empty it."""

    def __init__(self) -> None:
        self._defaults: Hashable = None
        self._made: dict[Hashable, tuple[Made, int]] = {}

    def key(self, defaults: GenerationConfig | None, options: Mapping[str, Any], device: Any) -> Hashable | None:
        """Return what options are remembered by; None: they are not, for they may mean something else the next time.

        Args:
            options: of one row, the prompt and its mask left out.
        """
        if type(options.get("max_new_tokens")) is not int or defaults is None:
            return None
        own, theirs = _plain(options), _plain(vars(defaults))
        if own is None or theirs is None:
            return None
        if theirs != self._defaults:
            self._defaults, self._made = theirs, {}
        return own, device

    def find(self, key: Hashable, columns: int) -> Made | None:
        """Return what came of options, for a prompt of `columns` columns."""
        if key not in self._made:
            return None
        (processors, criteria, config), was = self._made[key]
        config = copy.copy(config)
        config.max_length += columns - was
        return Made(processors, StoppingCriteriaList(_for(config, one) for one in criteria), config)

    def keep(self, key: Hashable, columns: int, made: Made) -> None:
        """Remember what came of options after a prompt of `columns` columns, if it can be made fit for others."""
        kinds = {type(one) for one in made.criteria}
        is_plain = kinds <= {MaxLengthCriteria, EosTokenCriteria} and {type(one) for one in made.processors} <= ALIKE
        if is_plain and made.config.max_length == columns + (made.config.max_new_tokens or 0):
            if len(self._made) == MOST:
                self._made.pop(next(iter(self._made)))
            self._made[key] = made, columns


def _plain(options: Mapping[str, Any]) -> frozenset[Hashable] | None:
    """Return options as something to compare, if all of them are numbers and words, or lists of such."""
    found = set[Hashable]()
    for name, value in options.items():
        parts = tuple(value) if type(value) in (list, tuple) else (value,)
        kinds = tuple(map(type, parts))  # 1, 1.0 and True are the same otherwise
        if not set(kinds) <= PLAIN:
            return None
        found.add((name, type(value), kinds, parts))
    return frozenset(found)


def _for(config: GenerationConfig, one: Any) -> Any:
    if type(one) is MaxLengthCriteria:
        return MaxLengthCriteria(config.max_length, one.max_position_embeddings)
    return one
