"""Layers that really run, counted by hooks on a model's own layers, beside what an engine says it ran.

Exit rates are claims. A token that left early cannot have had a pass through the last layer of its own: such a pass decides one
token at full depth, and drafts and caught-up tokens only ride along. So

    pairs (layer, token) that hooks count            =  layers_run
    calls of the last layer, one row, prompt included <= tokens decided at full depth + 1     (a text may end within a pass)

An engine that runs every layer for every token and reports exits fails the second, or the first if it changes that number too.
Hooks keep a model on its own modules, so what is counted is the same engine without compiled layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from TIDE.stats import ExitStats


@dataclass
class LayerCount:
    """Counts of hooks.

    Attributes:
        pairs: (layer, token) pairs.
        first_calls, last_calls: passes through the first and the last layer.
        last_tokens: tokens in the passes through the last layer.
    """

    pairs: int = 0
    first_calls: int = 0
    last_calls: int = 0
    last_tokens: int = 0


@contextmanager
def counted_layers(layers: nn.ModuleList | list[nn.Module]) -> Iterator[LayerCount]:
    """Count what runs inside."""
    found = LayerCount()
    last = len(layers) - 1

    def hook(index: int) -> Any:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            states = args[0] if args else kwargs["hidden_states"]
            tokens = states.shape[:-1].numel()
            found.pairs += tokens
            found.first_calls += index == 0
            if index == last:
                found.last_calls += 1
                found.last_tokens += tokens

        return add

    handles = [layer.register_forward_hook(hook(index), with_kwargs=True) for index, layer in enumerate(layers)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def wrong_with(found: LayerCount, told: ExitStats) -> str | None:
    """Return where the count contradicts an engine's own numbers of one request with one row; None: nowhere."""
    if found.pairs != told.layers_run:
        return f"{found.pairs} (layer, token) pairs ran, {told.layers_run} were reported"
    if found.last_calls > told.remaining_tokens + 1:
        return (
            f"the last layer ran {found.last_calls} times, for {told.remaining_tokens} tokens reported as decided there and "
            f"{told.exited_tokens} as exits"
        )
    return None
