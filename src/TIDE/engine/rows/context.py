"""The context: how many tokens a text may have."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedModel


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
