"""Prompts some of whose tokens stop at a checkpoint, as an engine runs them.

    depth 0 … c     all tokens of the row
    at c            which of them stop?                  the last one of the prompt never does, nor one that was written
    K/V, c … L      of the stopped ones, made of their predicted states
    c … L           the others, gathered; they see all columns

On the host a pass has one row, because rows differ in who stops. On slots: `slots.py`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from TIDE.adapters.adapter import ModelAdapter
from TIDE.config import TIDEConfig
from TIDE.engine.cache.segment_cache import SegmentCache
from TIDE.engine.rows.row import Row
from TIDE.engine.runners.base import Runner
from TIDE.engine.runners.passes import PassResult, PassTokens
from TIDE.engine.runners.prompt_pass import PromptPass
from TIDE.prompt_exits.gathered import gathered, why_no_gathering, window_of
from TIDE.prompt_exits.maps import FittedPromptExit, PromptExit
from TIDE.prompt_exits.slots import PromptExitPrefill, count_stopped
from TIDE.routing.policy import ExitPolicy
from TIDE.routing.router_file import RouterFile

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PromptExitPass(PromptPass):
    """Runs prompts with an exit.

    Attributes:
        window: tokens that a token sees in the layers where it sees fewest; None: all.
    """

    exit: PromptExit
    window: int | None

    @property
    def depth(self) -> int:
        return self.exit.depth

    def takes(self, row: Row, start: int) -> bool:
        if start >= row.prompt - 1:
            return False
        reason = self._why_not(row)
        if reason is not None and not start:
            logger.warning("a prompt of %d tokens runs all layers in spite of prefill_exits: %s.", row.prompt, reason)
        return reason is None

    def _why_not(self, row: Row) -> str | None:
        if row.embeds is not None:
            return "its prompt came as embeddings"
        if self.window is not None and row.prompt > self.window:
            return f"layers of the model see {self.window} tokens, and gathered passes of its modules are for shorter prompts"
        return None

    def run(self, runner: Runner, row: Row, tokens: PassTokens, cache: SegmentCache, taps: tuple[int, ...]) -> PassResult:
        below, above = [depth for depth in taps if depth < self.depth], [depth for depth in taps if depth > self.depth]
        passed = runner.run(range(self.depth), tokens._replace(kept=None), cache, None, tuple(below))
        gone = self._stopped(row, tokens.starts[0], passed.states)
        deep = self._deep(runner, tokens, cache, passed.states, gone, tuple(above))
        seen = passed.taps | {self.depth: passed.states} | deep.taps
        return deep._replace(taps=seen, computed=[passed.computed[0] + deep.computed[0]])

    def _deep(
        self,
        runner: Runner,
        tokens: PassTokens,
        cache: SegmentCache,
        states: torch.Tensor,
        gone: list[int],
        taps: tuple[int, ...],
    ) -> PassResult:
        """Run the deep layers for the tokens that stay, and write the K/V of the others there."""
        span, adapter = range(self.depth, runner.num_layers), runner.adapter
        if not gone:
            return runner.run(span, tokens, cache, states, taps)
        stopped, stay = states[gone], sorted({*range(len(states))} - {*gone})
        inputs = gathered(adapter, tokens, cache, gone)
        adapter.run(
            span.start, span.stop, inputs, hidden=stopped[None], kv_of=lambda layer: self.exit.predict(layer, stopped)[None]
        )
        tables = {depth: torch.empty_like(states) for depth in (*taps, span.stop)}
        for depth, table in tables.items():
            table[gone] = self.exit.predict(depth, stopped)
        if stay:
            inputs = gathered(adapter, tokens, cache, stay)
            passed = adapter.run(span.start, span.stop, inputs, hidden=states[None, stay], taps=taps)
            for depth, found in (passed.taps | {span.stop: passed.states}).items():
                tables[depth][stay] = found[0]
        deepest = tables.pop(span.stop)
        logits = None if tokens.kept is None else runner.logits(deepest[tokens.kept_places()])
        return PassResult(deepest, logits, tables, [len(span) * len(stay)])

    def _stopped(self, row: Row, start: int, states: torch.Tensor) -> list[int]:
        """Return which tokens of a pass stop, by their numbers."""
        count = min(len(states), row.prompt - 1 - start)
        positions = torch.arange(start, start + count, device=states.device)
        stops: list[bool] = self.exit.stops(states[:count], positions).tolist()
        gone = [number for number, is_gone in enumerate(stops) if is_gone]
        count_stopped(row, start, len(gone))
        return gone

    def why_not_on_slots(self, runner: Runner) -> str | None:
        has_compiled_layers = getattr(runner, "has_compiled_layers", False)
        return None if has_compiled_layers else "exits in the prompt gather tokens, which its modules do pass by pass"

    def prefill(self, *parts: Any) -> PromptExitPrefill:
        return PromptExitPrefill(self.exit, *parts)


def prompt_exit_of(source: RouterFile | ExitPolicy | None, adapter: ModelAdapter) -> PromptExit | None:
    """Return the exit of a router file, where the model is, or the `prompt_exit` of a user's own policy; None: it has none."""
    found: PromptExit | None = getattr(source, "prompt_exit", None)
    if isinstance(source, RouterFile) and isinstance(found, FittedPromptExit):
        return found.to(adapter.device, adapter.model.dtype)
    return found


def prompt_pass(
    config: TIDEConfig, policy: ExitPolicy | None, exit_: PromptExit | None, adapter: ModelAdapter
) -> PromptExitPass | None:
    """Return how prompts run by a configuration; None: through all layers. Raise with the reason if none of them can exit."""
    if not config.prefill_exits:
        return None
    if policy is None or exit_ is None:
        found = "no exits" if policy is None else "exits without them"
        raise ValueError(
            f"prefill_exits=True needs a router file with the maps and the router of prompts, found {found}. Make one with "
            f"TIDE.calibrate(..., config=TIDEConfig(prefill_exits=True)) or tide calibrate MODEL --prefill-exits, or leave "
            f"prefill_exits out."
        )
    if not 0 < exit_.depth < adapter.num_layers:
        raise ValueError(
            f"prompts settle at a depth from 1 to {adapter.num_layers - 1} in a model of {adapter.num_layers} layers, "
            f"found {exit_.depth}. Use the router file of this model."
        )
    if reason := why_no_gathering(adapter):
        raise ValueError(f"prefill_exits=True cannot be used with this model: {reason}. Leave prefill_exits out.")
    if isinstance(exit_, FittedPromptExit) and exit_.threshold is None:
        logger.warning(
            "calibration found no score at which prompts settle without harm to what follows, so with prefill_exits=True no "
            "token of a prompt will. Leave prefill_exits out."
        )
    return PromptExitPass(exit_, window_of(adapter))
