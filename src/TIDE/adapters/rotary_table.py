"""Cosines and sines of a model's rotary embedding, by position.

    constant ropes      one table for each kind of layer, computed once and made longer as texts grow
    changing ropes      "longrope" and "dynamic" choose frequencies by the largest position of a pass: computed at each pass

The model's own `rotary_emb` computes them, so they have its bits. Most models have one kind of table, named ""; Gemma 3 and
OLMo 3 have one for layers with a sliding window and another for the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from TIDE.adapters.rope import rope_kinds, rope_of

STEP = 1024  # positions a table is made longer by


class CosSin(NamedTuple):
    """Cosines and sines: a row for each position."""

    cos: torch.Tensor  # (m, rotary_dim)
    sin: torch.Tensor


class RotaryTable:
    """The rotary tables of a model.

    Attributes:
        kinds: names of the kinds of tables; `Layer.rope` is one of them.
        exists: the model has a `rotary_emb` that this can use.
        is_constant: angles depend on the position alone, so that `tables` may be used.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.kinds = rope_kinds(model.config.get_text_config(decoder=True)) or ("",)
        self.is_constant = rope_of(model).switches_at is None
        self._rotary = getattr(model.get_decoder(), "rotary_emb", None)
        self.exists = self._rotary is not None
        weight = model.get_input_embeddings().weight
        self._like = torch.zeros(1, 1, 1, dtype=model.dtype, device=weight.device)
        self._tables: dict[str, CosSin] = {}

    def tables(self, kind: str = "", positions: int = 1) -> CosSin:
        """Return the table of a kind, for the positions from 0 to at least `positions` - 1.

        A longer one is a new pair of tensors; those returned before stay as they are, so CUDA graphs that read them stay valid
        as long as somebody holds them.
        """
        assert self.is_constant, "this rope changes with the length of the text: use `at`"
        held = self._tables.get(kind)
        if held is None or len(held.cos) < positions:
            length = max(positions, 0 if held is None else 2 * len(held.cos))
            every = torch.arange(-(-length // STEP) * STEP, device=self._like.device)
            held = self._tables[kind] = self.at(every, kind)
        return held

    def of_pass(self, kind: str, positions: list[int]) -> tuple[CosSin, list[int]]:
        """Return cosines and sines for the tokens of a pass, and the row of them that each token has."""
        if self.is_constant:
            return self.tables(kind, max(positions) + 1), positions
        return self.at(torch.tensor(positions), kind), list(range(len(positions)))

    def restart(self) -> None:
        """Forget the texts before. "dynamic" keeps the frequencies of the longest one until it sees a short one again."""
        if self.exists and not self.is_constant:
            for kind in self.kinds:
                self.at(torch.zeros(1, dtype=torch.long), kind)

    def at(self, positions: torch.Tensor, kind: str = "") -> CosSin:
        """Return cosines and sines of (n,) positions, which are all that a pass has: row i belongs to positions[i]."""
        assert self._rotary is not None and positions.ndim == 1
        more = {"layer_type": kind} if kind else {}
        cos, sin = self._rotary(self._like, positions[None].to(self._like.device), **more)
        return CosSin(cos[0].contiguous(), sin[0].contiguous())
