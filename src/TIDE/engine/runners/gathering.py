"""Gathered passes: some tokens of a text through deep layers, while the K/V of the others are there already.

    positions     0 1 2 3 4 5 6 7
    run           ■     ■ ■     ■         each sees all columns up to its own, those of the tokens that do not run included

A model's own modules need a mask for it that says so token by token. Not every family passes such a mask on to its layers, so
a short text is tried once: tokens that run alone must have the states they have among all.
"""

from __future__ import annotations

import weakref

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.adapters.probe import Store
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.engine.runners.passes import PassTokens

TOKENS, PICKED = 8, [0, 3, 4, 7]  # of the text that is tried
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the largest state; other dtypes:
TOLERANCE_HALF = 0.1

_tried: weakref.WeakKeyDictionary[ModelAdapter, str | None] = weakref.WeakKeyDictionary()


def why_no_gathering(adapter: ModelAdapter) -> str | None:
    """Return why some tokens of a text cannot run alone; None: they can."""
    if adapter not in _tried:
        _tried[adapter] = _reason(adapter)
    return _tried[adapter]


def window_of(adapter: ModelAdapter) -> int | None:
    """Return how many tokens a token of a text sees in the layers where it sees fewest; None: all.

    The mask of a gathered pass is the same for all layers, so longer texts do not run gathered on modules.
    """
    config = adapter.model.config.get_text_config(decoder=True)
    if set(getattr(config, "layer_types", None) or ["?"]) == {"full_attention"}:
        return None
    sizes = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)


def _reason(adapter: ModelAdapter) -> str | None:
    states = [index for index, store in enumerate(adapter.stores) if store is Store.STATE]
    if states:
        return f"layers {states} keep a running state (linear attention or convolution), which every token has to pass"
    if adapter.rope.switches_at is not None:
        return "its rotary embedding changes with the length of the text"
    try:
        share = _difference(adapter)
    except Exception as problem:  # families refuse masks in many ways
        return f"it does not run some tokens of a text alone ({type(problem).__name__}: {problem})"
    allowed = TOLERANCE.get(adapter.model.dtype, TOLERANCE_HALF)
    return None if share <= allowed else "its layers give other states to tokens that run alone than to all of a text"


def _difference(adapter: ModelAdapter) -> float:
    """Return how far states of tokens that run alone are from those among all, as a share of the largest of them."""
    runner, last = ModuleRunner(adapter), adapter.num_layers
    vocabulary = adapter.model.config.get_text_config(decoder=True).vocab_size
    ids = [(place * 37 + 11) % min(vocabulary, 997) for place in range(TOKENS)]
    cache = SegmentCache(1, [range(last)], adapter.stores, TOKENS)
    tokens = PassTokens([0], [0], [TOKENS], ids)
    with runner.grad_off(), cache.open(0, [0], [TOKENS]):
        passed = runner.run(range(last), tokens, cache, taps=(1,) if last > 1 else ())
        if last == 1:
            return 0.0  # there is no deeper layer
        expected, hidden = passed.states[PICKED], passed.taps[1][PICKED]
        with cache.picking(PICKED):
            found = runner.run(range(1, last), tokens.pick(PICKED), cache, hidden).states
    return float((found - expected).abs().max() / expected.abs().max())
