"""Trying an EAGLE-3 head on its model: does it fit, and which reading of its configuration is the right one?

The model writes a few hundred tokens. Each reading drafts three tokens ahead from every position of them, and the one whose
drafts are most often the model's own choice is taken; that of the configuration unless another is clearly better. A head that
was made for another model of the same sizes agrees with none: that is said, and the text stays right anyway.
"""

from __future__ import annotations

import logging
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.routing.eagle3.head import EagleHead, EagleSizes, default_depths, frequencies
from TIDE.routing.eagle3.read import UntriedHead

logger = logging.getLogger(__name__)
ROWS, LENGTH, STEPS = 4, 64, 3
TEMPERATURE = 0.7
CLEARLY = 0.02  # better, for another reading than that of the configuration
UNLIKELY = 0.2  # agreement below which a head hardly belongs to its model
ALIKE = 0.02  # relative difference of embeddings, by rounding
OTHER = "Use the head that was made for this model, or calibrate one: tide calibrate MODEL --strategy eagle3"


class Resolved(NamedTuple):
    """A head as it is to be read."""

    head: EagleHead
    agreement: list[float]  # at drafts 1, 2, 3
    readings: list[dict[str, Any]]  # all that were tried
    words: str


class _Text(NamedTuple):
    """Texts of the model, and what it computes of them."""

    states: dict[int, torch.Tensor]  # (rows, tokens, hidden) by depth
    choices: torch.Tensor  # (rows, tokens) the model's own next tokens


def resolve(head: UntriedHead, vocabulary: torch.Tensor | None, adapter: ModelAdapter, name: str) -> Resolved:
    """Return a head as it agrees best with a model; raise if it does not fit that model."""
    check_fit(head, vocabulary, adapter, name, head.target_vocabulary)
    _check_own_embedding(head, adapter, name)
    readings = _possible(head.readings, adapter.num_layers, name)
    head.to(adapter.device, adapter.model.dtype)  # outside of inference mode, whose tensors could not be used elsewhere
    with adapter.grad_off():
        ids = _own_text(adapter)
        text = _run(adapter, ids, sorted({0, *(depth for own in readings for depth in own.depths)}))
        own = None if vocabulary is None else vocabulary.to(adapter.device)
        found = [_agreement(head.read_as(sizes), own, text) for sizes in readings]
    means = [sum(one) / len(one) for one in found]
    best = means.index(max(means))
    if means[best] <= means[0] + CLEARLY:
        best = 0
    chosen = replace(readings[best], context=_context(adapter, readings[best]))
    table = [_row(sizes, one) for sizes, one in zip(readings, found, strict=True)]
    words = _words(readings, best, found, ids.numel())
    is_weak = means[best] < UNLIKELY
    logger.log(
        logging.WARNING if best or is_weak else logging.INFO,
        "EAGLE-3 head of %s: %s%s",
        *(name, words, f" It was probably made for another model. The text stays right. {OTHER}" if is_weak else ""),
    )
    return Resolved(head.read_as(chosen), found[best], table, words)


# ---- does it fit? -----------------------------------------------------------------------------------------------------------


def check_fit(head: EagleHead, vocabulary: torch.Tensor | None, adapter: ModelAdapter, name: str, made_for: int | None) -> None:
    """Raise if a head, read in whatever way, cannot be for a model.

    Args:
        made_for: tokens of the model it was made for; None: not known.
    """
    sizes, tokens = head.sizes, adapter.vocab_size
    if sizes.hidden_dim != adapter.hidden_dim:
        raise ValueError(
            f"{name} was made for another model: it has states of {sizes.hidden_dim}, this model has states of "
            f"{adapter.hidden_dim}. {OTHER}"
        )
    rows = int(adapter.model.config.get_text_config(decoder=True).vocab_size)
    made_for = sizes.vocabulary if vocabulary is None else made_for or tokens
    if made_for not in (tokens, rows) or (vocabulary is not None and int(vocabulary.max()) >= tokens):
        raise ValueError(
            f"{name} was made for another model: it knows a vocabulary of {made_for} tokens, this model has {tokens}. {OTHER}"
        )

    if not reads_embeddings(adapter):
        raise ValueError(
            f"{name} cannot be used with {type(adapter.model).__name__}: an EAGLE-3 head reads the embeddings of tokens, and "
            f"this model changes them before its first layer (by positions or a norm). {OTHER}"
        )


def check_depths(sizes: EagleSizes, num_layers: int, name: str) -> None:
    """Raise if a head sees states that a model of `num_layers` layers does not have."""
    _possible((sizes,), num_layers, name)


@torch.no_grad()
def reads_embeddings(adapter: ModelAdapter) -> bool:
    """Return True if the states before the first layer are the embeddings of tokens, up to a factor, which norms take away."""
    ids = torch.arange(3, 11, device=adapter.device)[None] % adapter.vocab_size
    places = torch.arange(8, device=adapter.device)[None]
    states = adapter.run(0, 0, PassInputs(ids, places, None, None)).states
    return are_alike(states, adapter.model.get_input_embeddings()(ids))


def _possible(readings: tuple[EagleSizes, ...], num_layers: int, name: str) -> list[EagleSizes]:
    """Return readings with the depths they mean in a model of `num_layers` layers, without those that it has not."""
    meant = [replace(sizes, depths=sizes.depths or default_depths(num_layers)) for sizes in readings]
    found = [sizes for sizes in meant if list(sizes.depths) == sorted(set(sizes.depths)) and sizes.depths[0] >= 0]
    found = [sizes for sizes in found if sizes.depths[-1] <= num_layers]
    if not found:
        raise ValueError(
            f"{name} was made for another model: it sees states of the depths {_listed(meant[0].depths)}, this model has "
            f"{num_layers} layers. {OTHER}"
        )
    return found


@torch.no_grad()
def _check_own_embedding(head: UntriedHead, adapter: ModelAdapter, name: str) -> None:
    """Raise if the files have an embedding, and it is not that of the model."""
    if head.embedding is None:
        return
    own = head.embedding
    places = torch.linspace(0, min(len(own), adapter.vocab_size) - 1, 512).long()
    if not are_alike(own[places], adapter.model.get_input_embeddings()(places.to(adapter.device)).cpu()):
        raise ValueError(f"{name} has an embedding of its own, which is not that of this model. {OTHER}")


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors are equal up to a factor above 0 and rounding."""
    if one.shape != other.shape:
        return False
    a, b = one.float().flatten(), other.float().flatten()
    factor = (a @ b) / (b @ b).clamp_min(1e-12)
    return bool(factor > 0) and float((a - factor * b).norm()) <= ALIKE * float(a.norm())


# ---- the model's own text ---------------------------------------------------------------------------------------------------


def _own_text(adapter: ModelAdapter) -> torch.Tensor:
    """Return (rows, tokens) ids that the model writes from nothing, the same each time."""
    config = adapter.model.config.get_text_config(decoder=True)
    starts = (config.bos_token_id, config.eos_token_id, 0)
    start = next(first for each in starts if (first := each[0] if isinstance(each, list) else each) is not None)
    generator = torch.Generator().manual_seed(0)
    ids = torch.full((ROWS, 1), start, device=adapter.device)
    newest, cache = ids, None
    for _ in range(LENGTH - 1):
        output = adapter.model(input_ids=newest, past_key_values=cache, use_cache=True, return_dict=True)
        cache = output.past_key_values
        odds = (output.logits[:, -1].float() / TEMPERATURE).softmax(-1).cpu()
        newest = torch.multinomial(odds, 1, generator=generator).to(ids.device)
        ids = torch.cat([ids, newest], 1)
    return ids


def _run(adapter: ModelAdapter, ids: torch.Tensor, depths: list[int]) -> _Text:
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    inner = tuple(depth for depth in depths if depth < adapter.num_layers)
    inputs = PassInputs(ids, positions, None, None)
    passed = adapter.run(0, adapter.num_layers, inputs, keep=positions, taps=inner)
    assert passed.logits is not None
    states = passed.taps | {adapter.num_layers: passed.states}
    here = {depth: own.to(ids.device) for depth, own in states.items()}  # layers may be on several devices
    return _Text(here, passed.logits.argmax(-1).to(ids.device))


def _agreement(head: EagleHead, vocabulary: torch.Tensor | None, text: _Text) -> list[float]:
    """Return how often drafts 1, 2, 3 are the model's choice, where all before them were."""
    deep = torch.cat([text.states[depth] for depth in head.sizes.depths], -1)
    found = []
    for step, guesses in enumerate(head.unroll(text.states[0], deep, STEPS), 1):
        best = head.logits(guesses[:, step:].flatten(0, 1)).argmax(-1)
        best = best if vocabulary is None else vocabulary[best]
        found.append(round(float((best == text.choices[:, step:].flatten()).float().mean()), 4))
    return found


# ---- words ------------------------------------------------------------------------------------------------------------------


def _words(readings: list[EagleSizes], best: int, found: list[list[float]], tokens: int) -> str:
    chosen, said = readings[best], readings[0]
    words = f"it sees states of the depths {_listed(chosen.depths)}, and its drafts 1, 2, 3 are the model's own choice at "
    words += f"{_shares(found[best])} of {tokens} tokens."
    if len(readings) > 1:
        others = max((one for place, one in enumerate(found) if place != best), key=sum)
        words += f" Its configuration can be read in {len(readings)} ways; the next best gives {_shares(others)}."
    changed = [f"{name} {new!r} instead of {old!r}" for name, new, old in _differences(chosen, said)]
    return words + (f" Read unlike its configuration: {', '.join(changed)}." if changed else "")


def _differences(chosen: EagleSizes, said: EagleSizes) -> list[tuple[str, Any, Any]]:
    pairs = [(field.name, getattr(chosen, field.name), getattr(said, field.name)) for field in fields(EagleSizes)]
    return [(name, new, old) for name, new, old in pairs if new != old]


def _row(sizes: EagleSizes, agreement: list[float]) -> dict[str, Any]:
    flags = {name: getattr(sizes, name) for name in ("rope_theta", "norm_output", "norm_before_residual")}
    return {"depths": list(sizes.depths)} | flags | {"agreement": agreement}


def _context(adapter: ModelAdapter, sizes: EagleSizes) -> int:
    """Return the context of the model, unless the head's own is part of its rotary embedding, as in some of the kind yarn."""
    config = adapter.model.config.get_text_config(decoder=True)
    most = max(sizes.context, int(getattr(config, "max_position_embeddings", None) or 0))
    (own, factor), (other, other_factor) = frequencies(sizes), frequencies(replace(sizes, context=most))
    return most if torch.equal(own, other) and factor == other_factor else sizes.context


def _shares(values: list[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _listed(depths: tuple[int, ...]) -> str:
    return ", ".join(map(str, depths))
