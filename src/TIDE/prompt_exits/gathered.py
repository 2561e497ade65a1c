"""Gathered passes: some tokens of a text through deep layers, while the K/V of the others are there already.

    positions     0 1 2 3 4 5 6 7
    run           ■     ■ ■     ■         each sees all columns up to its own, those of the tokens that do not run included

A model's own modules need a mask for it, token by token. Not every family passes such a mask on to its layers, so
a short text is tried once: tokens that run alone must have the states they have among all.
"""

from __future__ import annotations

import weakref

import torch
from transformers import Cache

from TIDE.adapters.adapter import ModelAdapter, PassInputs
from TIDE.adapters.probe import Store
from TIDE.adapters.span import KVWritten
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.check import TOLERANCE, TOLERANCE_HALF
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.engine.runners.passes import PassTokens

TOKENS, GATHERED = 8, [0, 3, 4, 7]  # of the text that is tried

_tried: weakref.WeakKeyDictionary[ModelAdapter, str | None] = weakref.WeakKeyDictionary()


class GatheredCache(Cache):
    """Some of the new columns of an open pass of one row."""

    def __init__(self, cache: SegmentCache, columns: torch.Tensor) -> None:
        super().__init__(layers=cache.layers)
        self.cache = cache
        self.columns = columns
        self.leave_after_write = False

    def mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(1, 1, gathered, columns) added to the scores of the tokens: 0 where they see a column."""
        view = self.cache.view
        columns, origin = torch.arange(view.stop), self.cache.segments[view.segment].origin[view.rows[0]]
        seen = (columns >= origin) & (columns <= self.columns[:, None])
        return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)[None, None]

    def shared_view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.shared_view(layer)

    # ---- called by a model's forward -----------------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, view = self.layers[layer_idx], self.cache.view
        if not layer.is_initialized:
            layer.lazy_initialization(key_states, value_states)
        columns, (row,) = self.columns.to(key_states.device), view.rows
        layer.keys[row].index_copy_(1, columns, key_states[0])
        layer.values[row].index_copy_(1, columns, value_states[0])
        if self.leave_after_write:
            raise KVWritten
        return layer.keys[row : row + 1, :, : view.stop], layer.values[row : row + 1, :, : view.stop]

    @property
    def is_compileable(self) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.view.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.cache.view.start

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.cache.view.stop, 0


def gathered(adapter: ModelAdapter, tokens: PassTokens, cache: SegmentCache, numbers: list[int]) -> PassInputs:
    """Return some tokens, by their numbers, of an open pass of one row as the model's modules take them."""
    places = torch.tensor(numbers)
    some = GatheredCache(cache, cache.view.start + places)
    ids, positions = (own[None].to(adapter.device) for own in (torch.tensor(tokens.ids)[places], tokens.starts[0] + places))
    return PassInputs(ids, positions, some.mask(adapter.model.dtype).to(adapter.device), some)


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
        expected, hidden = passed.states[GATHERED], passed.taps[1][None, GATHERED]
        alone = adapter.run(1, last, gathered(adapter, tokens, cache, GATHERED), hidden=hidden).states[0]
    return float((alone - expected).abs().max() / expected.abs().max())
