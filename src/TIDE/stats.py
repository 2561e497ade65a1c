"""Statistics of requests: exit depths, drafts accepted and rejected, layers run, and time.

A token counts as exited if its final value was decided at an exit. Layers are counted when they run, including prompt,
catch-up and batch padding: `layers_run` is measured work, not an estimate. Times are wall-clock measurements.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields


@dataclass
class Seconds:
    """Wall-clock seconds of a request and of its parts, measured on the host.

    GPU work is asynchronous: per-part times show where the host blocked, not where the device worked. The total is accurate.

    Attributes:
        prompt: the prefill, which runs the prompts through all layers and samples the first tokens.
        shallow: segments before the last one.
        exits: scoring exits and emitting the tokens that leave, including K/V filled in for skipped layers.
        deep: the last segment.
        choosing: verifying drafts, or sampling from the full model's logits.
        whole: from the call to the last token; slightly more than the sum of the parts, which leave gaps between them. Time
            spent in a streamer or in the consumer of a stream is excluded.
    """

    prompt: float = 0.0
    shallow: float = 0.0
    exits: float = 0.0
    deep: float = 0.0
    choosing: float = 0.0
    whole: float = 0.0

    def add(self, part: str, seconds: float) -> None:
        """Add seconds to a part."""
        setattr(self, part, getattr(self, part) + seconds)

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Add the time spent in the block to `whole`, also if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.whole += time.perf_counter() - began

    def summary(self) -> str:
        parts = ", ".join(f"{part.name} {getattr(self, part.name):.3f}" for part in fields(self) if part.name != "whole")
        return f"{self.whole:.3f} ({parts})"


class Clock:
    """A lap timer for the parts of a request: each lap is added to the part that has just run."""

    def __init__(self, seconds: Seconds) -> None:
        self.seconds = seconds
        self.start()

    def start(self, instead: str | None = None) -> None:
        """Begin a lap; until the next start all laps are added to the part `instead`, if given."""
        self._instead = instead
        self._began = time.perf_counter()

    def lap(self, part: str) -> float:
        """End a lap and return its seconds."""
        now, part = time.perf_counter(), self._instead or part
        took, self._began = now - self._began, now
        self.seconds.add(part, took)
        return took


@dataclass
class ExitStats:
    """Counts of one request, or the sum of several.

    Attributes:
        num_layers: layers of the model.
        total_tokens: new tokens emitted.
        exits_per_layer: last layer run (0-based) -> tokens decided there; -1 is an exit before the first layer.
        remaining_tokens: tokens decided after all layers.
        layers_run: (layer, token) pairs computed in full.
        reused_tokens: tokens of prompts whose K/V were there already, from texts that begin alike.
        cold_starts: rows that waited for kernels to be compiled: see `engine.warm_up`.
        settled_tokens: tokens of prompts that did not run all layers: see `TIDEConfig.prefill_exits`.
        drafted_by_step: step -> drafts made. Step 1 is the first exit of a row after a token that the full model decided or
            verified, step 2 the exit after that, and so on.
        accepted_by_step: step -> drafts accepted; in mode "fast" all are.
        catch_ups: passes through the last segment in which a row ran more than one token, prompts excluded.
        rollbacks: verifications of a row that rejected drafts.
        rejected: drafts rejected, including those after the first wrong one.
        trees: rounds of a row whose drafts were a tree; `tree_depths` and `tree_widths` are sums over them, of a tree's deepest
            level and of the drafts in its widest one.
        seed: of the noise that a single row's tokens were drawn with; None: greedy, or several rows.
        seconds: wall-clock time, in total and by part.
    """

    num_layers: int
    total_tokens: int = 0
    exits_per_layer: Counter[int] = field(default_factory=Counter)
    remaining_tokens: int = 0
    layers_run: int = 0
    reused_tokens: int = 0
    cold_starts: int = 0
    settled_tokens: int = 0
    drafted_by_step: Counter[int] = field(default_factory=Counter)
    accepted_by_step: Counter[int] = field(default_factory=Counter)
    catch_ups: int = 0
    rollbacks: int = 0
    rejected: int = 0
    trees: int = 0
    tree_depths: int = 0
    tree_widths: int = 0
    seed: int | None = None
    seconds: Seconds = field(default_factory=Seconds)

    def count_token(self, depth: int, step: int = 1) -> None:
        """Count a token decided after `depth` layers; `step` is its number among consecutive exits."""
        self.total_tokens += 1
        if depth < self.num_layers:
            self.exits_per_layer[depth - 1] += 1
            self.accepted_by_step[step] += 1
        else:
            self.remaining_tokens += 1

    def count_drafts(self, by_step: Sequence[int], accepted: int, first_step: int = 1) -> None:
        """Count the drafts of a round, as many as were made at each step, of which `accepted` in a row were accepted."""
        for step, count in enumerate(by_step, first_step):
            self.drafted_by_step[step] += count
        if accepted < len(by_step):
            self.rollbacks += 1
        if (made := sum(by_step)) > accepted:
            self.rejected += made - accepted

    def count_tree(self, levels: Sequence[int]) -> None:
        """Count a tree, given the number of drafts at each depth."""
        self.trees += 1
        self.tree_depths += len(levels)
        self.tree_widths += max(levels)

    def __add__(self, other: ExitStats) -> ExitStats:
        """Return the sum of both; their models must have the same depth."""
        if self.num_layers != other.num_layers:
            raise ValueError(
                f"stats of models of the same depth can be added, found {self.num_layers} and {other.num_layers} layers. "
                f"Keep a sum for each model."
            )
        names = [own.name for own in fields(self) if own.name not in ("num_layers", "seed")]
        return ExitStats(self.num_layers, **{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def drafted(self) -> int:
        """Number of drafts made."""
        return self.drafted_by_step.total()

    @property
    def accepted(self) -> int:
        """Number of drafts accepted."""
        return self.accepted_by_step.total()

    @property
    def acceptance_by_step(self) -> dict[int, float]:
        """Step -> share of its drafts that were accepted."""
        return {step: self.accepted_by_step[step] / count for step, count in sorted(self.drafted_by_step.items())}

    @property
    def tree_depth(self) -> float:
        """Mean depth of trees."""
        return self.tree_depths / self.trees if self.trees else 0.0

    @property
    def tree_width(self) -> float:
        """Mean width of trees: drafts in the widest level."""
        return self.tree_widths / self.trees if self.trees else 0.0

    @property
    def exited_tokens(self) -> int:
        return self.exits_per_layer.total()

    @property
    def exit_rate(self) -> float:
        """Share of the emitted tokens that were decided at an exit."""
        return self.exited_tokens / self.total_tokens if self.total_tokens else 0.0

    @property
    def mean_depth(self) -> float:
        """Mean depth at which the emitted tokens were decided."""
        if not self.total_tokens:
            return 0.0
        exited = sum((layer + 1) * count for layer, count in self.exits_per_layer.items())
        return (exited + self.num_layers * self.remaining_tokens) / self.total_tokens

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of the whole request, prompt included."""
        return self.total_tokens / self.seconds.whole if self.seconds.whole else 0.0

    def summary(self) -> str:
        """Return one line for the total, one for each exit depth, then drafts, rollbacks and time."""
        lines = [f"Total tokens: {self.total_tokens}, Exited: {self.exited_tokens} ({self.exit_rate:.1%})"]
        for layer, count in sorted(self.exits_per_layer.items()):
            depth = layer + 1
            where = f"Depth {depth}" + ("" if depth else ", before the first layer")
            lines.append(f"  {where}: {count} exits ({count / self.total_tokens:.1%})")
        lines.append(f"  Ran all layers: {self.remaining_tokens}")
        if self.total_tokens:
            lines.append(f"  Mean depth: {self.mean_depth:.1f} of {self.num_layers} layers")
        if self.reused_tokens:
            lines.append(f"  Prompt tokens found in the cache: {self.reused_tokens}")
        if self.cold_starts:
            lines.append("  Waited for kernels to be compiled (engine.warm_up() does that before)")
        if self.settled_tokens:
            lines.append(f"  Prompt tokens settled before the last layer: {self.settled_tokens}")
        if self.drafted:
            steps = ", ".join(f"{share:.1%}" for share in self.acceptance_by_step.values())
            lines.append(f"  Drafted: {self.drafted}, accepted: {self.accepted} (by step: {steps})")
            lines.append(f"  Catch-ups: {self.catch_ups}, rollbacks: {self.rollbacks}, rejected: {self.rejected}")
        if self.trees:
            lines.append(f"  Trees: {self.trees}, depth {self.tree_depth:.1f}, width {self.tree_width:.1f} on average")
        if self.seed is not None:
            lines.append(f"  Seed: {self.seed}")
        if self.seconds.whole:
            lines.append(f"  Seconds: {self.seconds.summary()}, {self.tokens_per_second:.1f} tokens/s")
        return "\n".join(lines)
