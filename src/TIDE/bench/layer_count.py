"""Layers that really run, counted by hooks on a model's own layers, beside what an engine says it ran.

Exit rates are claims. A token that left early cannot have had a pass through the last layer of its own: such a pass decides one
token at full depth, and drafts and caught-up tokens only ride along. So

    pairs (layer, token) that hooks count            =  layers_run
    calls of the last layer, one row, prompt included <= tokens decided at full depth + 1     (a text may end within a pass)

An engine that runs every layer for every token and reports exits fails the second, or the first if it changes that number too.
Hooks keep a model on its own modules, so what is counted is the same engine without compiled layers. What timed runs report,
without hooks, has to agree with that: see `timed_wrong`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from TIDE.stats import ExitStats

ROUNDED = 8  # one token in so many may have a score so close to the threshold that rounding decides


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


def timed_wrong(timed: ExitStats, counted: ExitStats, mode: str, prompt: int) -> str | None:
    """Return where what an engine reports without hooks cannot be, or is not what it reported of the same text with them.

    Drafts follow the clock, so their number may differ; in mode fast scores decide, so exits may not, but for scores at the
    threshold: kernels round otherwise than modules.

    Args:
        timed, counted: of one request with one row, whose text was the same.
        prompt: tokens of its prompt.
    """
    if why := impossible(timed, mode):
        return why
    needed = timed.num_layers * (prompt + timed.total_tokens - 1)
    if mode != "fast" and timed.layers_run < needed:
        return f"timed: {timed.layers_run} (layer, token) pairs were reported, {needed} are needed"
    depths = {*timed.exits_per_layer, *counted.exits_per_layer} if mode == "fast" else set()
    moved = sum(abs(timed.exits_per_layer[depth] - counted.exits_per_layer[depth]) for depth in depths)
    if moved > max(2, timed.total_tokens // ROUNDED):
        return (
            f"timed, {timed.exited_tokens} of {timed.total_tokens} tokens were reported as exits with mean depth "
            f"{timed.mean_depth:.1f}, counted {counted.exited_tokens} with {counted.mean_depth:.1f}"
        )
    return None


def impossible(timed: ExitStats, mode: str) -> str | None:
    """Return why an engine's numbers cannot be true of any request; None: they can."""
    drafts = min(timed.drafted, timed.total_tokens - 1)  # the full model decides the token behind a prompt
    most = 0 if mode == "off" else drafts + timed.settled_tokens  # unless the prompt's last token has settled
    if timed.exited_tokens > most:
        return f"timed: {timed.exited_tokens} of {timed.total_tokens} tokens were reported as exits, of {timed.drafted} drafts"
    return None
