"""Rotary embeddings that change with the length of the text.

"longrope" and "dynamic" choose their frequencies once per forward, by the largest position in it. Tokens caught up
in one pass would get other frequencies than one by one, so past the switch no token exits. Some families also drop their
cache at the switch and run the whole text again; TIDE does the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedModel

STARTS_OVER = ("phi3", "phimoe")  # see their `prepare_inputs_for_generation`


class Rope(NamedTuple):
    """The text length at which a model's rotary frequencies change."""

    switches_at: int | None  # number of tokens up to which they are constant; None: no limit
    starts_over: bool  # the text is run again when it grows past that


def rope_of(model: PreTrainedModel) -> Rope:
    """Return the rope of a model, read off its config."""
    config = model.config.get_text_config(decoder=True)
    lengths = [_constant_up_to(parameters, config) for parameters in _rope_parameters(config)]
    known = [length for length in lengths if length is not None]
    if not known:
        return Rope(None, False)
    return Rope(min(known), config.model_type in STARTS_OVER)


def rope_kinds(config: Any) -> tuple[str, ...]:
    """Return the layer types that have angles of their own; empty if all layers share them."""
    found = getattr(config, "rope_parameters", None) or {}
    return tuple(sorted(kind for kind, own in found.items() if isinstance(own, dict))) if "rope_type" not in found else ()


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the rope parameters of the model, or those of each of its layer types."""
    found = getattr(config, "rope_parameters", None) or {}
    return [found] if "rope_type" in found else [own for own in found.values() if isinstance(own, dict)]


def _constant_up_to(parameters: dict[str, Any], config: Any) -> int | None:
    kind = parameters.get("rope_type", "default")
    if "dynamic" in kind:
        return int(config.max_position_embeddings)
    if kind == "longrope":
        original = parameters.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        return int(original or config.max_position_embeddings)
    return None
