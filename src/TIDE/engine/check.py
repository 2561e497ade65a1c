"""A start-up check for models that are not in the table or quantized: does catching up give what the model gives?

Two rows of different lengths, so that the cache has to line them up; a prefix, then three tokens one by one through the
first layer, then those three in one pass through each of the others. After every layer the states must be those of the
model run on each row alone. What a model keeps between tokens outside its cache, or forgets when several tokens arrive at
once, shows here, with the layer, before it can show in a text.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.engine.host.segments import Segments
from TIDE.engine.rows.row import Row
from TIDE.engine.rows.stop import StopRule
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.modules import ModuleRunner
from TIDE.routing.policy import Candidates, ExitPolicy

logger = logging.getLogger(__name__)
PREFIX, TOGETHER = {0: 4, 1: 2}, 3
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the largest state; other dtypes:
TOLERANCE_HALF = 0.1


def check_unknown(adapter: ModelAdapter) -> None:
    """Refuse a model whose layers cannot be caught up, naming the first of them."""
    name = type(adapter.model).__name__
    try:
        layer = first_difference(adapter)
    except Exception as problem:
        raise ValueError(
            f"TIDE does not know {name} and cannot run its layers one span at a time ({type(problem).__name__}: {problem}). "
            f"Run it with model.generate."
        ) from problem
    if layer is not None:
        raise ValueError(
            f"TIDE does not know {name}, and its layer {layer} ({type(adapter.layers[layer]).__name__}) gives other "
            f"states when tokens are caught up than when a text runs alone: it keeps something between tokens that "
            f"is not K/V by position, or takes positions from the cache. Run it with model.generate."
        )


def warn_where_tokens_are_not_alone(adapter: ModelAdapter) -> None:
    """Some ways to quantize give a token states that depend on the tokens beside it; then exact is only almost exact."""
    try:
        layer = first_difference(adapter)
    except Exception as problem:  # libraries refuse machines, dtypes and sizes in many ways
        logger.warning(
            "could not check whether this quantized model gives a token the same states alone and among others: %s", problem
        )
        return
    if layer is not None:
        logger.warning(
            "layer %d (%s) of this quantized %s gives a token other states among others than alone. Where two tokens are "
            "almost equally likely, texts may differ from those of model.generate.",
            layer, type(adapter.layers[layer]).__name__, type(adapter.model).__name__,
        )  # fmt: skip


def first_difference(adapter: ModelAdapter) -> int | None:
    """Return the first layer whose states are not those of the model when its tokens are caught up; None: there is none."""
    return _first_difference(ModuleRunner(adapter), _caught_up)


def first_compiled_difference(runner: Runner) -> int | None:
    """Return the first layer whose states are not those of the model when a runner takes tokens through all of them."""
    return _first_difference(runner, _passed)


def _first_difference(runner: Runner, run: Callable[[Runner, list[list[int]]], list[list[torch.Tensor]]]) -> int | None:
    texts = [_some_tokens(runner.adapter, row, count + TOGETHER) for row, count in PREFIX.items()]
    with runner.grad_off():
        expected = [_alone(runner.adapter, ids) for ids in texts]
        found = run(runner, texts)
    wrong = (
        layer
        for layer, states in enumerate(found)
        if not all(_close(own, expected[row][layer]) for row, own in enumerate(states))
    )
    return next(wrong, None)


def _some_tokens(adapter: ModelAdapter, row: int, count: int) -> list[int]:
    vocabulary = adapter.model.config.get_text_config(decoder=True).vocab_size
    return [(i * 37 + 11 + 5 * row) % min(vocabulary, 997) for i in range(count)]


def _alone(adapter: ModelAdapter, ids: list[int]) -> list[torch.Tensor]:
    """(TOGETHER, hidden) states after each layer for the last tokens of a row, by the model itself."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(lambda _, args, out: seen.append(out[0] if isinstance(out, tuple) else out))
        for layer in adapter.layers
    ]
    try:
        adapter.model(input_ids=torch.tensor([ids], device=adapter.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != adapter.num_layers:
        raise ValueError(f"{len(seen)} of its {adapter.num_layers} layers ran")
    if seen[0].ndim != 3:
        raise ValueError(f"its states have shape {tuple(seen[0].shape)}, expected (rows, tokens, hidden)")
    if not all(bool(states.isfinite().all()) for states in seen):
        raise ValueError("its states are NaN or infinite; check weights and dtype")
    return [states[0, -TOGETHER:] for states in seen]


def _caught_up(runner: Runner, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return the same states with every layer a segment of its own: by layer, then by row."""
    layers = runner.num_layers
    rows, segments = _segments(runner, texts, [*(range(layer, layer + 1) for layer in range(layers)), range(layers, layers)])
    prefix = {row: PREFIX[row.index] for row in rows}
    for segment in range(layers):
        segments.run(segment, prefix)
    for _ in range(TOGETHER):
        segments.run(0, dict.fromkeys(rows, 1))
    for segment in range(1, layers):
        segments.run(segment, dict.fromkeys(rows, TOGETHER))
    return [
        [segments.pending.states(layer + 1, row.slot, start, start + TOGETHER) for row, start in prefix.items()]
        for layer in range(layers)
    ]


def _passed(runner: Runner, texts: list[list[int]]) -> list[list[torch.Tensor]]:
    """Return the same states with all layers in a pass: a prefix, a token, then the rest together."""
    watcher = _Watcher(runner.num_layers)
    rows, segments = _segments(runner, texts, [range(runner.num_layers)], watcher)
    for counts in (PREFIX, dict.fromkeys(PREFIX, 1), dict.fromkeys(PREFIX, TOGETHER - 1)):
        segments.run(0, {row: counts[row.index] for row in rows})
    return [[torch.cat(watcher.seen[depth, row.slot])[-TOGETHER:] for row in rows] for depth in watcher.watches]


class _Watcher(ExitPolicy):
    """Keeps the states after every layer."""

    def __init__(self, layers: int) -> None:
        self.watches = tuple(range(1, layers + 1))
        self.seen: dict[tuple[int, int], list[torch.Tensor]] = defaultdict(list)

    def observe(self, depth: int, row: int, position: int, states: torch.Tensor) -> None:
        self.seen[depth, row].append(states.clone())

    def score(self, candidates: Candidates) -> torch.Tensor:
        raise AssertionError("nothing is asked in a check")


def _segments(
    runner: Runner, texts: list[list[int]], spans: list[range], watcher: ExitPolicy | None = None
) -> tuple[list[Row], Segments]:
    """Return the texts as rows, in segments of these layers."""
    rows = [Row(ids, StopRule(), runner.num_layers, index=index) for index, ids in enumerate(texts)]
    return rows, Segments(runner, spans, rows, max(map(len, texts)), watcher)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    allowed = TOLERANCE.get(expected.dtype, TOLERANCE_HALF) * float(expected.abs().max())
    return found.shape == expected.shape and float((found - expected).abs().max()) <= allowed
