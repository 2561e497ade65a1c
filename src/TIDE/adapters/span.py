"""One pass through a span of a model's layers: what the patched layers and the LM head do in it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from TIDE.adapters.lm_head import LMHeadWeight
from TIDE.adapters.probe import Store


class KVWritten(Exception):
    """An exception of the cache, raised to leave a layer as soon as its K/V are stored."""


class LayerFacts(NamedTuple):
    """The facts about a model's layers that a pass depends on."""

    model: str  # name of its class
    answers: int  # size of the tuple a layer returns; 0: states alone
    stores: tuple[Store, ...]  # of each layer
    sources: dict[str, int]  # by kind, the layer whose K/V the layers without their own read


@dataclass
class SpanPass:
    """A pass through the layers [start, stop); its arguments are those of `ModelAdapter.run` and `head`."""

    facts: LayerFacts
    lm_head: LMHeadWeight
    start: int
    stop: int
    hidden: torch.Tensor | None
    keep: torch.Tensor | None
    kv_of: Callable[[int], torch.Tensor] | None = None
    cache: Any = None
    taps: tuple[int, ...] = ()
    vocabulary: torch.Tensor | None = None
    states: torch.Tensor | None = None
    tapped: dict[int, torch.Tensor] = field(default_factory=dict)

    def run_layer(self, index: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a decoder layer, or skip it."""
        given = args[0] if args else kwargs.pop("hidden_states")
        states = self.hidden if index == 0 and self.hidden is not None else given
        if index in self.taps:
            self.tapped[index] = states
        if index == self.start < self.stop:
            self._lend_shared_kv(kwargs)
        if self.start <= index < self.stop:
            given = states if self.kv_of is None else self.kv_of(index)
            states = self._called(index, functools.partial(call, given, *args[1:], **kwargs), states)
        if index == self.stop - 1 or self.start == self.stop:
            self.states = states
        return (states, *[None] * (self.facts.answers - 1)) if self.facts.answers else states

    def _called(self, index: int, call: Callable[[], Any], states: torch.Tensor) -> torch.Tensor:
        if self.kv_of is None:
            output = call()
            return output[0] if isinstance(output, tuple) else output
        if self.facts.stores[index] is Store.KV:
            self.cache.leave_after_write = True
            try:
                call()
            except KVWritten:
                pass
            else:
                raise RuntimeError(f"layer {index} of {self.facts.model} ran without handing K/V to the cache.")
            finally:
                self.cache.leave_after_write = False
        return states

    def _lend_shared_kv(self, kwargs: dict[str, Any]) -> None:
        """Give layers that read another layer's K/V those of the cache, if that layer is before the span."""
        for kind, source in self.facts.sources.items():
            if source < self.start:
                kwargs["shared_kv_states"][kind] = self.cache.shared_view(source)

    def run_head(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the LM head at the requested positions."""
        if self.keep is None:
            return args[0][..., :0]
        picked = pick(args[0], self.keep)
        rows = None if self.vocabulary is None else self.lm_head.rows(self.vocabulary)
        return call(picked, *args[1:], **kwargs) if rows is None else nn.functional.linear(picked, *rows)


def pick(values: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Gather (n, q, d) values at (n, kept) indices into q -> (n, kept, d)."""
    return values.gather(1, keep.to(values.device)[..., None].expand(-1, -1, values.shape[-1]))
