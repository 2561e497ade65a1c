"""Writing of texts: prompts in the engine's batch, each ended on the host once a stop string is complete.

transformers' own criterion finds stop strings. `engine.generate(stop_strings=...)` calls it for every token of every row, on
the model's device, which takes longer than writing the token. Here it is called once after each step, on the host, for the new
tokens of all rows. A round may write tokens behind a stop string; they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation import StopStringCriteria

from TIDE.engine.cache.prefixes import new_salt
from TIDE.engine.engine import TIDE
from TIDE.engine.round.options import row_seeds
from TIDE.engine.row import Row


class Written(NamedTuple):
    """A text that was written."""

    ids: list[int]
    exited: int  # tokens that left early


class Stops:
    """Stop strings, found where a token completes one; the prompt may have its beginning."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> None:
        self._criterion = StopStringCriteria(tokenizer, list(strings))
        self._width = max(len(string.encode()) for string in strings)  # tokens that a stop string may have
        self._nothing = max(tokenizer.get_vocab().values()) + 1  # no token

    def complete(self, texts: Sequence[Sequence[int]]) -> list[bool]:
        """Return True for each text whose last token completes a stop string."""
        if not texts:
            return []
        windows = [list(text[-self._width :]) for text in texts]
        filled = [[self._nothing] * (self._width - len(window)) + window for window in windows]
        found: list[bool] = self._criterion(torch.tensor(filled), None).tolist()
        return found


def write(engine: TIDE, prompts: Sequence[list[int]], stops: Stops | None, **options: Any) -> list[Written]:
    """Continue prompts together.

    Args:
        options: of `engine.add`; a `seed` serves all prompts, as in `engine.generate`.
    """
    seeds = row_seeds(options.pop("seed"), len(prompts)) if "seed" in options else None
    salt, rows = new_salt(), list[Row]()
    try:
        for place, prompt in enumerate(prompts):
            own = options if seeds is None else options | {"seed": seeds[place]}
            ids = torch.tensor([prompt], device=engine.adapter.device)
            rows.append(engine.add(ids, attention_mask=torch.ones_like(ids), cache_salt=salt, **own))
        ends = _decode(engine, rows, stops)
    finally:
        for row in rows:
            if not row.finished:
                engine.remove(row)
    engine.step()  # lets go of the rows, before others are timed
    return [_written(row, ends.get(row)) for row in rows]


def _decode(engine: TIDE, rows: list[Row], stops: Stops | None) -> dict[Row, int]:
    """Step until all rows have ended; return the new tokens of those that a stop string has ended."""
    ends: dict[Row, int] = {}
    looked_at = {row: len(row.tokens) for row in rows}
    while any(not row.finished for row in rows):
        engine.step()
        if (error := next((row.error for row in rows if row.error is not None), None)) is not None:
            raise error
        if stops is None:
            continue
        new = [(row, size) for row in rows if row not in ends for size in range(looked_at[row] + 1, len(row.tokens) + 1)]
        for (row, size), is_complete in zip(new, stops.complete([row.tokens[:size] for row, size in new]), strict=True):
            looked_at[row] = size
            if is_complete and row not in ends:
                ends[row] = size - row.prompt
                if not row.finished:
                    engine.remove(row)
    return ends


def _written(row: Row, count: int | None) -> Written:
    decided = row.decided[:count]
    return Written(row.new_tokens[:count], sum(one.depth < row.num_layers for one in decided))
