"""Asked: prompts that are continued together, as every contender gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch


@dataclass(frozen=True)
class Asked:
    """Rows of prompts, continued greedily.

    Attributes:
        prompts: token ids of each row.
        ends: tokens that end a text.
    """

    prompts: list[list[int]]
    max_new_tokens: int
    device: torch.device
    ends: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        return max(map(len, self.prompts))

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of `generate`: left-padded ids and their mask."""
        gaps = [self.width - len(prompt) for prompt in self.prompts]
        ids = [[0] * gap + prompt for gap, prompt in zip(gaps, self.prompts, strict=True)]
        mask = [[0] * gap + [1] * (self.width - gap) for gap in gaps]
        tensors = {"input_ids": ids, "attention_mask": mask}
        given = {name: torch.tensor(values, device=self.device) for name, values in tensors.items()}
        return given | {"max_new_tokens": self.max_new_tokens, "do_sample": False, "pad_token_id": 0}

    def texts(self, ids: torch.Tensor) -> list[list[int]]:
        """Return the new tokens of each row, without the padding behind its end."""
        return [self._up_to_the_end(row) for row in ids[:, self.width :].tolist()]

    def _up_to_the_end(self, row: list[int]) -> list[int]:
        ended = next((place for place, token in enumerate(row) if token in self.ends), len(row) - 1)
        return row[: ended + 1]

    def first_row(self, max_new_tokens: int) -> Asked:
        """Return the first prompt alone."""
        return replace(self, prompts=self.prompts[:1], max_new_tokens=min(max_new_tokens, self.max_new_tokens))


def groups(prompts: Sequence[list[int]], rows: int, max_new_tokens: int, model: Any) -> list[Asked]:
    """Return prompts in groups of `rows`; the last one is filled up from the beginning."""
    found = [[prompts[(start + row) % len(prompts)] for row in range(rows)] for start in range(0, len(prompts), rows)]
    ends = getattr(model.generation_config, "eos_token_id", None)
    ends = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    return [Asked(group, max_new_tokens, model.device, ends) for group in found]
